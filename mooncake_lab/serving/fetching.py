"""Fetching prefix blocks from another worker's store (FAST'25 Algorithm 1, TransferKVCache)."""

import logging
from collections.abc import Sequence
from typing import Final

import torch

from mooncake_lab.serving.kv import KVShape, raw
from mooncake_lab.serving.messages import Ask, Give
from mooncake_lab.serving.messenger import Identity, dial, expect
from mooncake_lab.store.media import MediumError, ProtocolError, wire

_LOG: Final = logging.getLogger(__name__)


def fetch(
    port: int, who: Identity, shape: KVShape, keys: Sequence[bytes], block_tokens: int
) -> list[tuple[torch.Tensor, ...]]:
    """The leading blocks of these keys that another worker still holds, each as its layers.

    What cannot be had is computed instead: a holder that is gone or stalls gives no blocks, and the log says why.
    """
    if not keys:
        return []
    try:
        with dial(port, who) as peer:
            wire.send_frame(peer, Ask(tuple(keys)), (), who.timeout_s)
            parcel, size = expect(peer, Give, who.timeout_s)
            assert isinstance(parcel, Give)  # noqa: S101  # `expect` has checked
            if not 0 <= parcel.blocks <= len(keys) or size != parcel.blocks * block_tokens * shape.bytes_per_token:
                raise ProtocolError(f"{parcel.blocks} blocks in {size} bytes; {len(keys)} were asked for")
            blocks = [shape.empty(block_tokens) for _ in range(parcel.blocks)]
            wire.receive_into(peer, [raw(layer) for block in blocks for layer in block], who.timeout_s)
            return blocks
    except (OSError, MediumError) as error:
        _LOG.warning("%s computes %d blocks that it could not fetch: %s", who.name, len(keys), error)
        return []
