"""Prefix blocks that come from elsewhere layer by layer: another worker (FAST'25 Algorithm 1), or the pool."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

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
                if not 0 <= give.blocks <= blocks or size != follow or (give.pushed and region is None):
                    raise ProtocolError(f"{give.blocks} blocks in {size} bytes; {blocks} were asked for")
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


@final
class ArrivingBlocks:
    """Prefix blocks on their way from elsewhere, layer by layer. Mutable: one thread fills it, others read.

    Either all layers of a block come, or it is lost, like all behind it; after `give_up` all blocks are.

    Args:
        layers: of each block.
    """

    def __init__(self, layers: int) -> None:
        self.first = 0
        """The position of its first block in the prompt."""
        self.blocks = 0
        """How many come, as far as is known now; from the first layer on it only shrinks."""
        self.start_s, self.end_s = time.monotonic(), 0.0
        """When it was asked for, and when its last byte came or it was given up (monotonic clock)."""
        self._wanted = layers
        self._layers: list[torch.Tensor] = []
        self._shares: list[tuple[str, int]] = []  # by source, how many blocks it said to have
        self._turn = threading.Condition()
        self._is_over = False

    def fill(
        self, keys: Sequence[bytes], first: int, sources: Mapping[str, PrefixSource], begun: Callable[[], None]
    ) -> None:
        """Take in what these sources have, each what the one before it lacks.

        Args:
            keys: of the blocks.
            first: position of the first of them in the prompt.
            sources: by name.
            begun: called when the first layer is here.
        """
        self.first = first
        streams, parts, found = list[LayerStream](), list[torch.Tensor](), 0
        for name, source in sources.items():
            stream = source(keys[found:], first + found)
            part = next(stream, None) if found < len(keys) else None
            if part is not None:
                streams.append(stream)
                parts.append(part)
                self._shares.append((name, len(part)))
                found += len(part)
        while parts and self._add(torch.cat(parts) if len(parts) > 1 else parts[0]):
            if len(self._layers) == 1:
                begun()
            parts = self._next(streams)
        self.give_up()

    def _next(self, streams: Sequence[LayerStream]) -> list[torch.Tensor]:
        """The next layer from each stream, up to the first block that is lost."""
        parts = list[torch.Tensor]()
        for stream, (_, share) in zip(streams, self._shares, strict=True):
            part = next(stream, None)
            if part is not None:
                parts.append(part)
            if part is None or len(part) < share:
                break
        return parts

    def _add(self, layer: torch.Tensor) -> bool:
        with self._turn:
            if not self._is_over:
                self._layers.append(layer)
                self.blocks, self.end_s = len(layer), time.monotonic()
                self._is_over = len(self._layers) == self._wanted
                self._turn.notify_all()
            return not self._is_over

    def read(self, layer: int, block: int, into: torch.Tensor) -> bool:
        """Wait for a layer of a block and copy it; false where it does not come."""
        with self._turn:
            self._turn.wait_for(lambda: len(self._layers) > layer or block >= self.blocks or self._is_over)
            if block >= self.blocks or len(self._layers) <= layer:
                return False
            into.copy_(self._layers[layer][block])
        return True

    def give_up(self) -> None:
        """Wait for no more: what is not complete is lost."""
        with self._turn:
            if not self._is_over:
                self.blocks, self._is_over, self.end_s = 0, True, time.monotonic()
                self._turn.notify_all()

    def came(self) -> list[tuple[torch.Tensor, ...]]:
        """The blocks that are complete, each with a tensor a layer."""
        return [tuple(layer[block] for layer in self._layers) for block in range(self.blocks)]

    def bytes_by_source(self) -> dict[str, int]:
        """What is complete, by the source that it came from."""
        found, left = dict[str, int](), self.blocks
        for name, share in self._shares:
            found[name] = min(share, left) * sum(layer[0].nbytes for layer in self._layers)
            left -= min(share, left)
        return found
