"""A prefill engine over a store: what is held is loaded, what is computed is stored, both layer by layer."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, final

import torch

from mooncake_lab.engine.kv_layout import KVLayout, bytes_of
from mooncake_lab.engine.layerwise.arriving import ArrivingPrefix
from mooncake_lab.engine.layerwise.leaving import QUEUE_BYTES, KVWriter, LeavingKV
from mooncake_lab.engine.roles import PrefillEngine, PrefillResult, Prompt
from mooncake_lab.engine.sampling import GREEDY, Sampling
from mooncake_lab.store.tiered_store import TieredStore


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

    def prefill(
        self, prompt: Prompt, *, load: bool = True, keep: bool = True, sampling: Sampling = GREEDY
    ) -> LayerwiseResult:
        """Prefill one prompt, up to its first token; what it computed may still be on its way to the store then.

        Args:
            prompt: token ids.
            load: whether to reuse what the store holds.
            keep: whether to store what is computed.
            sampling: of the first token.

        Raises:
            ValueError: when the prompt does not fit.
        """
        keys = self.layout.keys(prompt)
        held = keys[: self._store.match_prefix(keys)] if load else []
        arriving = ArrivingPrefix(StoredBlocks(self._store, held), self.layout, whole=not self._overlap)
        leaving = LeavingKV(self.writer, keys, whole=not self._overlap) if keep else None
        with self._pinned(held):
            asked = self._engine.submit(
                prompt,
                prefix=arriving if held else (),
                sampling=sampling,
                on_kv=leaving.on_layer if leaving else None,
            )
            try:
                result = self._engine.wait(asked)
            finally:
                if leaving is not None:
                    leaving.end()
        if arriving.is_complete:
            self.writer.promote(held)
        return LayerwiseResult(
            prefill=result,
            loaded_tokens=arriving.tokens if arriving.is_complete else 0,
            lost_blocks=arriving.lost_blocks,
            waited_s=arriving.waited_s,
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
