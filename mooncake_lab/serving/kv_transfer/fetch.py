"""Where prefix blocks come from: another worker's store (FAST'25 Algorithm 1, TransferKVCache), or the pool."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch

from mooncake_lab.cluster import POOL
from mooncake_lab.engine.kv_layout import KVLayout, bytes_of
from mooncake_lab.serving.kv_transfer.protocol import Blocks, GetBlocks
from mooncake_lab.serving.kv_transfer.sender import Identity, dial, expect
from mooncake_lab.serving.kv_transfer.transfer_engine import TransferEngineChannel
from mooncake_lab.serving.spec import WorkerSpec
from mooncake_lab.store.backends import (
    MooncakeClient,
    MooncakePool,
    ProtocolError,
    RemoteBackend,
    StorageBackend,
    StorageError,
    wire,
)
from mooncake_lab.store.backends.wire import SLOWEST_BYTES_PER_S

PrefixSource = Callable[[Sequence[bytes], int], list[tuple[torch.Tensor, ...]]]
"""Gives the leading blocks of these keys that it has, each as its layers; what it lacks is computed.

The number is the position of the first key in its prompt."""
_LOG: Final = logging.getLogger(__name__)


def fetch(
    port: int,
    identity: Identity,
    shape: KVLayout,
    keys: Sequence[bytes],
    block_tokens: int,
    channel: TransferEngineChannel | None = None,
) -> list[tuple[torch.Tensor, ...]]:
    """The leading blocks of these keys that another worker still holds, each as its layers.

    What cannot be had is computed instead: a holder that is gone or stalls gives no blocks, and the log says why.
    """
    if not keys:
        return []
    block_bytes = block_tokens * shape.bytes_per_token
    with contextlib.ExitStack() as stack:
        region = None if channel is None else channel.lend(len(keys) * block_bytes, stack)
        try:
            peer = stack.enter_context(dial(port, identity))
            wire.send_frame(
                peer, GetBlocks(tuple(keys), None if region is None else region.where), (), identity.timeout_s
            )
            give, size = expect(peer, Blocks, identity.timeout_s + len(keys) * block_bytes / SLOWEST_BYTES_PER_S)
            follow = give.blocks * block_bytes if give.pushed is None else 0
            if not 0 <= give.blocks <= len(keys) or size != follow or (give.pushed and region is None):
                raise ProtocolError(f"{give.blocks} blocks in {size} bytes; {len(keys)} were asked for")
            blocks = [shape.empty(block_tokens) for _ in range(give.blocks)]
            parts = [bytes_of(layer) for block in blocks for layer in block]
            if give.pushed is None or region is None:
                wire.receive_into(peer, parts, identity.timeout_s)
            else:
                region.copy_to(parts, give.pushed)
        except (OSError, StorageError) as error:
            _LOG.warning("%s computes %d blocks that it could not fetch: %s", identity.name, len(keys), error)
            return []
        return blocks


def open_pool(spec: WorkerSpec, shape: KVLayout, address: str) -> StorageBackend:
    """The pool at an address, as a tier of a worker's cache.

    Raises:
        StorageError: when it refuses this worker, or Mooncake's wheel is missing.
        OSError: when it does not answer.
    """
    if spec.pool == "mooncake":
        layers = [spec.block_size_tokens * shape.layer_bytes] * shape.layers
        capacity_bytes = spec.pool_tokens * shape.bytes_per_token
        client = MooncakeClient(address, 0)
        return MooncakePool(client, capacity_bytes, layers, fingerprint=shape.fingerprint, name=POOL)
    host, _, port = address.rpartition(":")
    return RemoteBackend(
        (host, int(port)),
        spec.pool_token,
        fingerprint=shape.fingerprint,
        name=POOL,
        timeout_s=spec.fetch_timeout_s,
    )
