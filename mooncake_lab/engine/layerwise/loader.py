"""Loading while computing: a thread brings a prefix layer by layer, and attention waits for its own layer only."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, final

import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.kvcache import BlockTable, KVCache

_STAGING_TENSORS: Final = 2
"""Layers that may be on the host at once on their way to a device: one is read, one is copied."""


class PrefixLostError(Exception):
    """Part of a prefix cannot be had after all; the iteration is to be planned anew with what is left of it."""


class LayerSource(Protocol):
    """Where the blocks of a prefix come from."""

    @property
    def blocks(self) -> int:
        """How many there are."""
        ...

    def read(self, layer: int, block: int, into: torch.Tensor) -> bool:
        """Fill a CPU tensor of `KVLayout.layer_shape`; false where the block is lost, and `into` of no use."""
        ...


@final
class LayerLoader:
    """KVCache of a prompt's first tokens on its way into an engine (arXiv §5.2, layer-wise prefill).

    Its thread starts with the request's first iteration and runs ahead of the computation as far as it can: layers
    go straight into the request's blocks. When a block is lost, the prefix ends before it from then
    on. The remaining layers are loaded up to there, and `wait` raises, so that the engine plans to compute
    the tokens behind it. On CUDA, copies go over a stream of their own, and attention waits for a layer's event.

    Mutable: it shrinks, and it owns a thread.

    Args:
        source: of the blocks.
        layout: of the blocks.
        on_layer: gets each layer that arrived, on the CPU, (2, tokens, kv_heads, head_width) from position 0 on,
            on this thread and before attention uses it.
        whole: whether every layer waits for the last one, as without overlap; for comparison.
    """

    __slots__ = (
        "_arrived", "_copies", "_crash", "_events", "_good_blocks", "_layers", "_layout", "_limit", "_on_layer",
        "_source", "_staging", "_stopping", "_thread", "_turn", "_whole", "lost_blocks", "waited_s",
    )  # fmt: skip

    def __init__(
        self,
        source: LayerSource,
        layout: KVLayout,
        *,
        on_layer: Callable[[int, torch.Tensor], None] | None = None,
        whole: bool = False,
    ) -> None:
        self._source = source
        self._layout = layout
        self._on_layer = on_layer
        self._whole = whole
        self._layers = layout.layers
        self._good_blocks = source.blocks
        self._limit = source.blocks * layout.block_tokens
        self._arrived = 0  # layers
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._crash: Exception | None = None
        self._copies: torch.cuda.Stream | None = None
        self._events: list[torch.cuda.Event] = []
        self._staging: list[torch.Tensor] = []  # on CUDA two pinned tensors, which layers take in turn
        self.lost_blocks = 0
        """Blocks that were promised and could not be had, those behind a lost one included."""
        self.waited_s = 0.0
        """How long computation stood still for it."""

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the model that computed it."""
        return self._layout.fingerprint

    @property
    def start(self) -> int:
        """Position of its first token."""
        return 0

    @property
    def tokens(self) -> int:
        """How many tokens it holds, as far as is known now; it only shrinks."""
        return min(self._good_blocks * self._layout.block_tokens, self._limit)

    @property
    def is_complete(self) -> bool:
        """Whether every layer arrived."""
        return self._arrived == self._layers

    def limit(self, tokens: int) -> None:
        """Use at most `tokens` tokens of it; call this before its first iteration."""
        self._limit = min(self._limit, tokens)

    def begin(self, cache: KVCache, blocks: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Begin to fill a request's blocks; they must stay its own until `wait` for the last layer, or `stop`."""
        if self._thread is None:
            device = cache.data.device
            if device.type == "cuda":
                self._copies = torch.cuda.Stream(device)
                self._copies.wait_stream(torch.cuda.current_stream(device))  # others may still write these blocks
            with torch.cuda.stream(self._copies):  # which uses the table, and to which its memory belongs
                table = cache.table(blocks)
            self._thread = threading.Thread(target=self._run, args=(cache, table), name="kv-load", daemon=True)
            self._thread.start()

    def wait(self, layer: int, tokens: int) -> None:
        """Return when a layer of the first `tokens` tokens is in its blocks.

        Raises:
            PrefixLostError: when fewer than `tokens` tokens are still available.
        """
        last = self._layers if self._whole else layer + 1
        started_s = time.perf_counter()
        with self._turn:
            self._turn.wait_for(lambda: self._arrived >= last or self.tokens < tokens or self._crash)
        self.waited_s += time.perf_counter() - started_s
        if self._crash is not None:
            raise RuntimeError("loading a prefix failed") from self._crash
        if self.tokens < tokens:
            raise PrefixLostError(f"{self.tokens} of {tokens} tokens of a prefix can be had")
        if self._copies is not None:
            torch.cuda.current_stream(self._copies.device).wait_event(self._events[last - 1])

    def stop(self) -> None:
        """Return when nothing is written into the request's blocks any more."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join()
        if self._copies is not None:
            self._copies.synchronize()

    def _run(self, cache: KVCache, table: BlockTable) -> None:
        try:
            for layer in range(self._layers):
                with torch.inference_mode(), torch.cuda.stream(self._copies):
                    self._load(layer, cache, table)
                with self._turn:
                    self._arrived = layer + 1
                    self._turn.notify_all()
                if self._stopping or not self._good_blocks:
                    return
        except Exception as error:  # noqa: BLE001  # passed to the waiting caller
            with self._turn:
                self._crash = error
                self._turn.notify_all()

    def _load(self, layer: int, cache: KVCache, table: BlockTable) -> None:
        """Bring one layer of every block that is still good."""
        count = self._good_blocks
        staged = self._stage(layer, count)
        for block in range(count):
            if self._stopping:
                return
            if not self._source.read(layer, block, staged[block]):
                with self._turn:
                    self.lost_blocks += count - block
                    self._good_blocks = block
                    self._turn.notify_all()
                break
        if self.tokens:
            self._write(layer, staged[: self._good_blocks], cache, table)
        if self._copies is not None:
            event = torch.cuda.Event()
            event.record(self._copies)
            self._events.append(event)

    def _stage(self, layer: int, count: int) -> torch.Tensor:
        """Host memory for a layer of some blocks: on CUDA one of two tensors, once the copy out of it is done.

        They are kept, since fresh memory costs a page fault every 4 KiB: ten times what copying the bytes costs.
        """
        shape = (count, *self._layout.layer_shape)
        if self._copies is None:
            return torch.empty(shape, dtype=self._layout.dtype)
        if layer < _STAGING_TENSORS:
            self._staging.append(torch.empty(shape, dtype=self._layout.dtype, pin_memory=True))
        else:
            self._events[layer - _STAGING_TENSORS].synchronize()
        return self._staging[layer % _STAGING_TENSORS][:count]

    def _write(self, layer: int, staged: torch.Tensor, cache: KVCache, table: BlockTable) -> None:
        """Put the blocks of a layer where they belong, and tell the listener."""
        if self._copies is None:
            span = self._joined(staged).contiguous()
            cache.write(layer, table, 0, span)
        else:  # as they lie, so that the device reorders them; on the host that takes longer than reading them
            cache.write(layer, table, 0, self._joined(staged.to(cache.data.device, non_blocking=True)))
            # the listener gets a copy, since the memory is used again
            span = torch.cat(tuple(staged), dim=1)[:, : self.tokens].contiguous() if self._on_layer else None
        if self._on_layer is not None and span is not None:
            self._on_layer(layer, span)

    def _joined(self, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks (blocks, 2, block_tokens, heads, width) side by side: (2, tokens, heads, width)."""
        return blocks.transpose(0, 1).flatten(1, 2)[:, : self.tokens]
