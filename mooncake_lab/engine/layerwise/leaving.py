"""Storing while computing: new keys and values leave layer by layer, and a thread writes them into the store."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

import torch

from mooncake_lab.core import MIB
from mooncake_lab.engine.kv_layout import KVLayout, bytes_of
from mooncake_lab.store.tier_writer import BlockWriter
from mooncake_lab.store.tiered_store import TieredStore

QUEUE_BYTES: Final = 256 * MIB


@dataclass(slots=True)
class _Filling:
    """A block whose layers are on their way. Mutable: it fills."""

    room: BlockWriter
    layers_done: set[int] = field(default_factory=set[int])
    parts: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict[int, tuple[torch.Tensor, int]])
    """Layers that came in part, because chunks end within blocks: their memory, and how many tokens are there."""


@dataclass(frozen=True, slots=True)
class _Delivery:
    """One layer of new keys and values of one request, or the end of the request."""

    leaving: "LeavingKV"
    layer: int
    start: int
    span: torch.Tensor | None
    """On the CPU, (2, tokens, kv_heads, head_width); `None` where it did not fit into the queue."""
    tokens: int
    copied: torch.cuda.Event | None = None
    """When the copy from the device is complete."""
    is_end: bool = False


@dataclass(slots=True)
class LeavingCounts:
    """What became of blocks that were computed. Mutable: it counts."""

    stored: int = 0
    held: int = 0
    """Needed no storing: the store had them, or another writer was writing them, or it had no room."""
    dropped: int = 0
    """Given up because the queue was full: a cache may forget, and a prefill must not wait."""
    failed: int = 0
    """Given up because the medium failed."""
    incomplete: int = 0
    """Given up because the engine found their beginning in its own blocks, or the request ended early."""


@final
class KVWriter:
    """The thread that writes what leaves. Mutable: it owns a bounded queue.

    Args:
        store: where blocks go.
        layout: of the blocks.
        queue_bytes: how much may wait; what comes when it is full is not stored.
    """

    def __init__(self, store: TieredStore, layout: KVLayout, *, queue_bytes: int = QUEUE_BYTES) -> None:
        self.store = store
        self.layout = layout
        self.counts = LeavingCounts()
        self._queue_bytes = queue_bytes
        self._queue: deque[_Delivery | tuple[bytes, ...]] = deque()
        self._waiting_bytes = 0
        self._turn = threading.Condition()
        self._busy = False
        self._stopping = False
        self._crash: Exception | None = None
        self._copies: torch.cuda.Stream | None = None
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)
        self._thread.start()

    def send(self, leaving: "LeavingKV", layer: int, start: int, span: torch.Tensor) -> None:
        """Let one layer of new keys and values be stored; never waits for the store."""
        with self._turn:
            fits = self._waiting_bytes + span.nbytes <= self._queue_bytes
            self._waiting_bytes += span.nbytes if fits else 0
        kept, copied = self._to_cpu(span) if fits else (None, None)
        self._put(_Delivery(leaving, layer, start, kept, span.shape[1], copied))

    def end(self, leaving: "LeavingKV") -> None:
        """Nothing more comes from a request."""
        self._put(_Delivery(leaving, 0, 0, None, 0, is_end=True))

    def promote(self, keys: Sequence[bytes]) -> None:
        """Let blocks that were loaded from lower tiers rise into the first, once what came before is stored."""
        self._put(tuple(keys))

    def flush(self) -> None:
        """Return when everything that was sent is stored or given up.

        Raises:
            RuntimeError: when the thread died, which is a bug of ours.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._crash or not (self._queue or self._busy))
        if self._crash is not None:
            raise RuntimeError("the thread that stores KVCache died") from self._crash

    def close(self) -> None:
        """Store what waits, and end."""
        with self._turn:
            self._stopping = True
            self._turn.notify_all()
        self._thread.join()
        self.flush()

    def _put(self, delivery: _Delivery | tuple[bytes, ...]) -> None:
        with self._turn:
            self._queue.append(delivery)
            self._turn.notify_all()

    def _to_cpu(self, span: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """The span on the CPU; from a device it is on its way over a stream of its own, into pinned memory."""
        if span.device.type != "cuda":
            return span, None
        self._copies = self._copies or torch.cuda.Stream(span.device)
        pinned = torch.empty(span.shape, dtype=span.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream(span.device))
        with torch.cuda.stream(self._copies):
            pinned.copy_(span, non_blocking=True)
            span.record_stream(self._copies)  # pyright: ignore[reportArgumentType]  # a cuda stream is a stream
            copied = torch.cuda.Event()
            copied.record(self._copies)
        return pinned, copied

    def _run(self) -> None:
        try:
            while self._deliver():
                pass
        except Exception as error:  # noqa: BLE001  # passed to the flushing caller
            with self._turn:
                self._crash = error
                self._turn.notify_all()

    def _deliver(self) -> bool:
        """Write one delivery; false when it is time to end."""
        with self._turn:
            self._turn.wait_for(lambda: self._queue or self._stopping)
            if not self._queue:
                return False
            delivery = self._queue.popleft()
            self._busy = True
        size_bytes = 0
        if isinstance(delivery, tuple):
            self.store.promote(delivery)
        else:
            if delivery.copied is not None:
                delivery.copied.synchronize()
            delivery.leaving.take(
                delivery.layer, delivery.start, delivery.tokens, delivery.span, ends=delivery.is_end
            )
            size_bytes = 0 if delivery.span is None else delivery.span.nbytes
        with self._turn:
            self._busy = False
            self._waiting_bytes -= size_bytes
            self._turn.notify_all()
        return True


@final
class LeavingKV:
    """The new KVCache of one request on its way into a store; `on_layer` is what an engine calls.

    Only whole blocks are stored. Where a prefix was lost while the request ran, its layers come again; what came
    before is not written twice. Mutable: it knows what came so far. `take` belongs to the writer's thread.

    Args:
        writer: whose thread writes.
        keys: of the prompt's whole blocks, the first that is to be stored included, from position 0.
        whole: whether everything waits until the request ended, as without overlap; for comparison.
    """

    __slots__ = ("_ended", "_filling", "_held_back", "_keys", "_whole", "_writer")

    def __init__(self, writer: KVWriter, keys: Sequence[bytes], *, whole: bool = False) -> None:
        self._writer = writer
        self._keys = keys
        self._whole = whole
        self._held_back: list[tuple[int, int, torch.Tensor]] = []
        self._filling: dict[int, _Filling] = {}
        self._ended: set[int] = set()

    def on_layer(self, layer: int, start: int, span: torch.Tensor) -> None:
        """One layer of new keys and values: (2, tokens, kv_heads, head_width), from position `start` on."""
        if self._whole:
            self._held_back.append((layer, start, span))
        else:
            self._writer.send(self, layer, start, span)

    def end(self) -> None:
        """The request ended: nothing more comes."""
        for layer, start, span in self._held_back:
            self._writer.send(self, layer, start, span)
        self._held_back.clear()
        self._writer.end(self)

    # in the writer's thread

    def take(self, layer: int, start: int, tokens: int, span: torch.Tensor | None, *, ends: bool) -> None:
        """Write what came into the blocks it belongs to."""
        if ends:
            for block in list(self._filling):
                self._give_up(block)
                self._writer.counts.incomplete += 1
            return
        size = self._writer.layout.block_tokens
        for block in range(start // size, min(len(self._keys), -(-(start + tokens) // size))):
            if block in self._ended:
                continue
            if span is None:
                self._give_up(block)
                self._writer.counts.dropped += 1
                continue
            first = max(start, block * size)
            last = min(start + tokens, (block + 1) * size)
            self._fill(block, layer, first - block * size, span[:, first - start : last - start])

    def _fill(self, block: int, layer: int, offset: int, part: torch.Tensor) -> None:
        """Add tokens from `offset` on to one layer of one block; write the layer once it is whole."""
        filling = self._filling.get(block) or self._open(block)
        if filling is None or layer in filling.layers_done:
            return
        size = self._writer.layout.block_tokens
        memory, there = filling.parts.pop(layer, (None, 0))
        if offset > there:
            self._give_up(block)
            self._writer.counts.incomplete += 1
            return
        if part.shape[1] < size:
            memory = torch.empty(self._writer.layout.layer_shape, dtype=part.dtype) if memory is None else memory
            memory[:, offset : offset + part.shape[1]] = part
            there = max(there, offset + part.shape[1])
            if there < size:
                filling.parts[layer] = (memory, there)
                return
            part = memory
        self._write(block, layer, filling, part.contiguous())

    def _write(self, block: int, layer: int, filling: _Filling, whole: torch.Tensor) -> None:
        if not filling.room.write([bytes_of(whole)], first_layer=layer):
            self._give_up(block)
            self._writer.counts.failed += 1
            return
        filling.layers_done.add(layer)
        if len(filling.layers_done) == self._writer.layout.layers:
            del self._filling[block]
            self._ended.add(block)
            if filling.room.commit():
                self._writer.counts.stored += 1
            else:
                self._writer.counts.failed += 1

    def _open(self, block: int) -> _Filling | None:
        room = self._writer.store.open(self._keys[block], self._writer.layout.block_bytes, position=block)
        if room is None:
            self._ended.add(block)
            self._writer.counts.held += 1
            return None
        self._filling[block] = _Filling(room)
        return self._filling[block]

    def _give_up(self, block: int) -> None:
        self._ended.add(block)
        filling = self._filling.pop(block, None)
        if filling is not None:
            filling.room.abandon()
