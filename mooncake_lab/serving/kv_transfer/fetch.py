"""Prefix blocks from elsewhere, layer by layer: another worker (FAST'25 Algorithm 1), or the shared store."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

import torch

from mooncake_lab.engine.kv_layout import KVLayout, bytes_of
from mooncake_lab.net import wire
from mooncake_lab.net.wire import ProtocolError
from mooncake_lab.serving.kv_transfer import Identity, LayerStream, dial, expect
from mooncake_lab.serving.kv_transfer.transfer_engine import TransferEngineChannel
from mooncake_lab.serving.messages import Blocks, GetBlocks, Job
from mooncake_lab.store.backends import StorageError

PrefixSource = Callable[[Sequence[bytes], int], LayerStream]
"""Gives the leading blocks of these keys that it has; the number is the position of the first key in a prompt."""
_LOG: Final = logging.getLogger(__name__)


def fetch_layers(
    port: int,
    identity: Identity,
    layout: KVLayout,
    job: Job,
    keys: Sequence[bytes],
    channel: TransferEngineChannel | None = None,
) -> LayerStream:
    """The leading blocks of these keys that another worker still holds (FAST'25 Algorithm 1, TransferKVCache).

    A holder that is gone or stalls gives no more of them: they are computed instead, and the log says why.
    """
    layer_bytes = len(keys) * layout.layer_bytes
    with contextlib.ExitStack() as stack:
        region = None if channel is None else channel.lend(layer_bytes * layout.layers, stack)
        try:
            peer = stack.enter_context(dial(port, identity))
            question = GetBlocks(job, tuple(keys), None if region is None else region.where)
            wire.send_frame(peer, question, (), identity.timeout_s)
            blocks, done_bytes = len(keys), 0
            for _ in range(layout.layers):
                give, size = expect(peer, Blocks, identity.timeout_s + layer_bytes / wire.SLOWEST_BYTES_PER_S)
                follow = give.blocks * layout.layer_bytes if give.pushed is None else 0
                if not 0 <= give.blocks <= blocks:
                    raise ProtocolError(f"an answer of {give.blocks} blocks; allowed are 0 to {blocks}")
                if size != follow:
                    raise ProtocolError(
                        f"{give.blocks} blocks with {size} bytes behind them; expected are {follow}"
                    )
                if give.pushed and region is None:
                    raise ProtocolError("an answer says that its bytes were pushed, but no memory was lent")
                blocks = give.blocks
                if not blocks:
                    return
                layer = torch.empty((blocks, *layout.layer_shape), dtype=layout.dtype)
                if give.pushed is None or region is None:
                    wire.receive_into(peer, [bytes_of(layer)], identity.timeout_s)
                else:
                    region.copy_to([bytes_of(layer)], give.pushed, first=done_bytes)
                done_bytes += layer.nbytes
                yield layer
        except (OSError, StorageError) as error:
            _LOG.warning("%s computes blocks that it could not fetch: %s", identity.name, error)
