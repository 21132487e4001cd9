"""Loading while computing: a thread brings a prefix layer by layer, and attention waits for its own layer only."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch

from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.kvcache import KVCache


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
class ArrivingPrefix:
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
        "_source", "_stopping", "_thread", "_turn", "_whole", "lost_blocks", "waited_s",
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

    def begin(self, cache: KVCache, blocks: Sequence[int]) -> None:
        """Begin to fill a request's blocks; they must stay its own until `wait` for the last layer, or `stop`."""
        if self._thread is None:
            device = cache.data.device
            if device.type == "cuda":
                self._copies = torch.cuda.Stream(device)
                self._copies.wait_stream(torch.cuda.current_stream(device))  # others may still write these blocks
            self._thread = threading.Thread(
                target=self._run, args=(cache, list(blocks)), name="kv-load", daemon=True
            )
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

    def _run(self, cache: KVCache, blocks: list[int]) -> None:
        try:
            for layer in range(self._layers):
                with torch.inference_mode(), torch.cuda.stream(self._copies):
                    self._load(layer, cache, blocks)
                with self._turn:
                    self._arrived = layer + 1
                    self._turn.notify_all()
                if self._stopping or not self._good_blocks:
                    return
        except Exception as error:  # noqa: BLE001  # passed to the waiting caller
            with self._turn:
                self._crash = error
                self._turn.notify_all()

    def _load(self, layer: int, cache: KVCache, blocks: Sequence[int]) -> None:
        """Bring one layer of every block that is still good."""
        is_pinned, count = self._copies is not None, self._good_blocks
        halves, *rest = self._layout.layer_shape
        staged = torch.empty((count, halves, *rest), dtype=self._layout.dtype)
        for block in range(count):
            if self._stopping:
                return
            if not self._source.read(layer, block, staged[block]):
                with self._turn:
                    self.lost_blocks += count - block
                    self._good_blocks = block
                    self._turn.notify_all()
                break
        tokens = self.tokens
        if tokens:
            span = staged[: self._good_blocks].transpose(0, 1).reshape(halves, -1, *rest[1:])[:, :tokens]
            span = span.pin_memory() if is_pinned else span.contiguous()
            cache.write(layer, blocks, 0, span)
            if self._on_layer is not None:
                self._on_layer(layer, span)
        if self._copies is not None:
            event = torch.cuda.Event()
            event.record(self._copies)
            self._events.append(event)
