"""A prefill engine over a store: what is held is loaded, what is computed is stored, both layer by layer.

`LayerLoader` loads. New keys and values leave through a `LeavingKV` per request, and the thread of a `KVWriter`
writes them into the store.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self, final

import torch

from mooncake_lab.core import MIB
from mooncake_lab.engine.host_copies import HostCopies, HostCopy
from mooncake_lab.engine.kv_layout import KVLayout, bytes_of
from mooncake_lab.engine.layerwise.loader import LayerLoader
from mooncake_lab.engine.roles import PrefillEngine, PrefillResult, TokenIds
from mooncake_lab.engine.sequence import GenerationRequest
from mooncake_lab.store.backed_tier import BlockWriter
from mooncake_lab.store.tiered_store import TieredStore

QUEUE_BYTES: Final = 256 * MIB


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
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._crash: BaseException | None = None
        self._copies = HostCopies()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-store")

    def send(self, leaving: "LeavingKV", layer: int, start: int, span: torch.Tensor) -> None:
        """Let one layer of new keys and values be stored; never waits for the store."""
        with self._lock:
            fits = self._waiting_bytes + span.nbytes <= self._queue_bytes
            self._waiting_bytes += span.nbytes if fits else 0
        copy = self._copies.start(span) if fits else None
        self.do(self._deliver, leaving, layer, start, span.shape[1], copy)

    def do(self, task: Callable[..., None], *arguments: Any) -> None:
        """Let the thread do something once it has done what came before."""
        self._thread.submit(task, *arguments).add_done_callback(self._note)

    def flush(self) -> None:
        """Return when everything that was sent is stored or given up.

        Raises:
            RuntimeError: when a delivery raised, which is a bug of ours.
        """
        self._thread.submit(int).result()
        self._raise()

    def close(self) -> None:
        """Store what waits, and end."""
        self._thread.shutdown()
        self._raise()

    def _raise(self) -> None:
        if self._crash is not None:
            raise RuntimeError("the thread that stores KVCache failed") from self._crash

    def _note(self, done: "Future[None]") -> None:
        self._crash = self._crash or done.exception()

    def _deliver(self, leaving: "LeavingKV", layer: int, start: int, tokens: int, copy: HostCopy | None) -> None:
        if copy is not None:
            copy.wait()
        leaving.take(layer, start, tokens, None if copy is None else copy.tensor)
        with self._lock:
            self._waiting_bytes -= 0 if copy is None else copy.tensor.nbytes


@dataclass(slots=True)
class _Filling:
    """A block whose layers are on their way. Mutable: it fills."""

    room: BlockWriter
    layers_done: set[int] = field(default_factory=set[int])
    parts: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict[int, tuple[torch.Tensor, int]])
    """Layers that came in part, because chunks end within blocks: their memory, and how many tokens are there."""


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
        self._writer.do(self._end)

    def _end(self) -> None:
        for block in list(self._filling):
            self._give_up(block)
            self._writer.counts.incomplete += 1

    def take(self, layer: int, start: int, tokens: int, span: torch.Tensor | None) -> None:
        """Write what came into the blocks it belongs to; `None` did not fit into the queue, and drops them."""
        size = self._writer.layout.block_tokens
        for block in range(start // size, min(len(self._keys), -(-(start + tokens) // size))):
            if block in self._ended:
                continue
            if span is None:
                self._give_up(block)
                self._writer.counts.dropped += 1
                continue
            first, last = max(start, block * size), min(start + tokens, (block + 1) * size)
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
        counts = self._writer.counts
        if not filling.room.write([bytes_of(whole)], first_layer=layer):
            self._give_up(block)
            counts.failed += 1
            return
        filling.layers_done.add(layer)
        if len(filling.layers_done) == self._writer.layout.layers:
            del self._filling[block]
            self._ended.add(block)
            committed = filling.room.commit()
            counts.stored += committed
            counts.failed += not committed

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


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks in a tiered store, read a layer at a time; damaged, evicted and unreachable ones are lost."""

    store: TieredStore
    keys: Sequence[bytes]

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.keys)

    def read(self, layer: int, block: int, into: torch.Tensor) -> bool:
        """Fill a CPU tensor with one layer of one block; see `LayerSource`."""
        return self.store.read_into(self.keys[block], [bytes_of(into)], first_layer=layer) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseResult:
    """What a prefill over a store gave, and what loading cost it."""

    prefill: PrefillResult
    loaded_tokens: int
    """Prompt tokens whose KVCache came from the store."""
    lost_blocks: int
    """Blocks the store had promised and could not deliver; their tokens were computed."""
    waited_s: float
    """How long computation stood still for the store."""


@final
class LayerwisePrefill:
    """Prefill that reuses and fills a store (FAST'25 §3: incremental prefill with layer-wise load and store).

    A layer's attention waits for that layer of the prefix and for nothing else; new keys and values leave as soon
    as they are computed, through a bounded queue. A block that is damaged, evicted meanwhile, or on a peer that
    died is computed again: slower, never wrong. Mutable: it owns a thread; the store stays its maker's to close.

    Args:
        engine: what computes.
        store: of this model's blocks.
        block_tokens: tokens of a block in the store.
        queue_bytes: how much may wait to be stored; beyond it blocks are not stored.
        overlap: whether loading and storing happen while computing; without it, before and after, for comparison.
    """

    def __init__(
        self,
        engine: PrefillEngine,
        store: TieredStore,
        *,
        block_tokens: int = 512,
        queue_bytes: int = QUEUE_BYTES,
        overlap: bool = True,
    ) -> None:
        runner = engine.engine.runner
        self.layout = KVLayout.of(runner.model, runner.fingerprint, block_tokens=block_tokens)
        self.writer = KVWriter(store, self.layout, queue_bytes=queue_bytes)
        self._engine = engine
        self._store = store
        self._overlap = overlap

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Store what waits, and stop."""
        self.writer.close()

    def flush(self) -> None:
        """Return when what was computed so far is stored or given up."""
        self.writer.flush()

    def prefill(self, prompt: TokenIds, *, keep: bool = True) -> LayerwiseResult:
        """Prefill one prompt, up to its first token; what it computed may still be on its way to the store then.

        Args:
            prompt: token ids.
            keep: whether to store what is computed.

        Raises:
            ValueError: when the prompt does not fit.
        """
        keys = self.layout.keys(prompt)
        held = keys[: self._store.match_prefix(keys)]
        loader = LayerLoader(StoredBlocks(self._store, held), self.layout, whole=not self._overlap)
        leaving = LeavingKV(self.writer, keys, whole=not self._overlap) if keep else None
        with self._pinned(held):
            request = GenerationRequest(prompt=prompt, on_kv=leaving.on_layer if leaving else None)
            asked = self._engine.submit(request, prefix=loader if held else ())
            try:
                result = self._engine.wait(asked)
            finally:
                if leaving is not None:
                    leaving.end()
        if loader.is_complete:
            self.writer.do(self._store.promote, held)
        return LayerwiseResult(
            prefill=result,
            loaded_tokens=loader.tokens if loader.is_complete else 0,
            lost_blocks=loader.lost_blocks,
            waited_s=loader.waited_s,
        )

    @contextmanager
    def _pinned(self, keys: Sequence[bytes]) -> Generator[None]:
        """Keep blocks from being evicted; those on their way down cannot be kept, and are lost if they go."""
        pinned: list[bytes] = []
        for key in keys:
            try:
                self._store.pin(key)
            except KeyError:
                continue
            pinned.append(key)
        try:
            yield
        finally:
            for key in pinned:
                self._store.unpin(key)
