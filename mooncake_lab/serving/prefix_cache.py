"""A prefill worker's own store of prefix blocks: DRAM, and an SSD below it where it has one."""

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import torch

from mooncake_lab.engine import KVSpan
from mooncake_lab.engine.kv_layout import KVLayout, bytes_of
from mooncake_lab.serving.messages import CacheUpdate
from mooncake_lab.serving.spec import WorkerSpec
from mooncake_lab.store.backends import DramBackend, SsdBackend
from mooncake_lab.store.backends.ssd_slab import extent_bytes
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

_QUEUED_SHARE: Final = 4
"""One part in four of DRAM is for blocks on their way to the SSD."""
_KEY_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A prefix that was read, and what of it came from the SSD."""

    span: KVSpan
    start_s: float
    """When reading began (monotonic clock)."""
    end_s: float
    ssd_bytes: int


@final
class PrefixCache:
    """Blocks by key in a `TieredStore`, and what the cluster was told of them.

    Blocks on the SSD stay when a worker fails: its replacement opens the same folder and finds them. Methods may
    be called from several threads, but `news`, `forget` and `close` only from one; these two wait for the others.
    Mutable: it is a cache, and owns its media.

    Args:
        spec: how much it holds, and where.
        shape: of the model's KVCache.

    Raises:
        OSError: when the SSD's folder cannot be used.
        FolderInUseError: when another process has it open.
        ValueError: when the folder's slab is larger than `ssd_tokens` allow.
    """

    def __init__(self, spec: WorkerSpec, shape: KVLayout) -> None:
        self._shape = shape
        self._block_tokens = spec.block_size_tokens
        self._dram_bytes = spec.cache_tokens * shape.bytes_per_token
        self._ssd = None if spec.ssd_dir is None else self._open_ssd(spec, spec.ssd_dir)
        self._dram = DramBackend(self._dram_bytes)
        self._store = self._open_store()
        self._turn = threading.Condition()
        self._users = 0
        """Calls that use the store now; below 0, one call has it alone."""
        self._announced = set[bytes]()
        self._left = 0
        """Blocks that had left some tier when the cluster was last told."""
        self._damaged = 0
        """Blocks that had been found damaged by then."""

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are here; changes nothing."""
        with self._using():
            return self._store.match_prefix(keys)

    def blocks(self, keys: Sequence[bytes]) -> list[tuple[torch.Tensor, ...]]:
        """The leading blocks that can be delivered now, each with a tensor a layer."""
        return self._read(keys)[0]

    def read(self, keys: Sequence[bytes]) -> Found | None:
        """The same blocks as one prefix; `None` where not even the first can be delivered."""
        start_s = time.monotonic()
        blocks, ssd_bytes = self._read(keys)
        if not blocks:
            return None
        span = self._shape.span([torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True)])
        return Found(span=span, start_s=start_s, end_s=time.monotonic(), ssd_bytes=ssd_bytes)

    def _read(self, keys: Sequence[bytes]) -> tuple[list[tuple[torch.Tensor, ...]], int]:
        """The leading blocks, and how many of their bytes came from the SSD."""
        blocks, ssd_bytes = list[tuple[torch.Tensor, ...]](), 0
        with self._using():
            for key in keys[: self._store.match_prefix(keys)]:
                block = self._shape.empty(self._block_tokens)
                tier = self._store.read_into(key, [bytes_of(layer) for layer in block])
                if tier is None:
                    break
                if self._ssd is not None and tier == self._ssd.name:
                    ssd_bytes += self._block_tokens * self._shape.bytes_per_token
                blocks.append(block)
        return blocks, ssd_bytes

    def keep(self, keys: Sequence[bytes], kv: KVSpan) -> None:
        """Store the whole blocks that a span covers; `keys` are those of the whole prompt, front to back."""
        size = self._block_tokens
        first = -(-kv.start // size)
        last = (kv.start + kv.tokens) // size
        for index in range(first, min(last, len(keys))):
            begin = index * size - kv.start
            block = [layer[:, begin : begin + size].cpu().contiguous() for layer in kv.layers]
            with self._using():
                self._store.put(keys[index], [bytes_of(layer) for layer in block], position=index)

    def adopt(self, keys: Sequence[bytes], blocks: Sequence[tuple[torch.Tensor, ...]], *, first: int) -> None:
        """Store blocks that came from another worker; `first` is the position of the first of them."""
        for position, (key, block) in enumerate(zip(keys, blocks, strict=True), first):
            with self._using():
                self._store.put(key, [bytes_of(layer) for layer in block], position=position)

    def news(self, keys: Sequence[bytes] = ()) -> CacheUpdate | None:
        """What came and what left since the cluster was last told; `None` where nothing did.

        Args:
            keys: all that may have come.
        """
        added = tuple(key for key in keys if key not in self._announced and key in self._store)
        self._announced.update(added)
        removed: tuple[bytes, ...] = ()
        tiers = self._store.statistics()
        left = sum(tier.evicted + tier.dropped + tier.damaged + tier.refused + tier.write_errors for tier in tiers)
        damaged = sum(tier.damaged for tier in tiers) - self._damaged
        self._damaged += damaged
        if left != self._left:
            self._left = left
            removed = tuple(key for key in self._announced if key not in self._store)
            self._announced.difference_update(removed)
        if not (added or removed or damaged):
            return None
        return CacheUpdate(added=added, removed=removed, damaged_blocks=damaged)

    def found_at_birth(self) -> CacheUpdate | None:
        """What a dead worker left on the SSD."""
        return None if self._ssd is None else self.news([block.key for block in self._ssd.blocks()])

    def forget(self) -> CacheUpdate:
        """Empty every tier."""
        with self._alone():
            self._store.close()
            self._dram.free(*list(self._dram.blocks()))
            if self._ssd is not None:
                self._ssd.free(*list(self._ssd.blocks()))
            self._store = self._open_store()
        gone, self._announced, self._left, self._damaged = tuple(self._announced), set[bytes](), 0, 0
        return CacheUpdate(removed=gone)

    def close(self) -> None:
        """Save what DRAM holds on the SSD, and close both; no method may be called afterwards."""
        self._shut_out()
        if self._ssd is not None:
            self._store.sink()
        self._store.close()
        self._dram.close()
        if self._ssd is not None:
            self._ssd.close()

    @contextmanager
    def _using(self) -> Generator[None]:
        """The store stays as it is meanwhile."""
        with self._turn:
            self._turn.wait_for(lambda: self._users >= 0)
            self._users += 1
        try:
            yield
        finally:
            with self._turn:
                self._users -= 1
                self._turn.notify_all()

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Keep every other call from the store meanwhile."""
        self._shut_out()
        try:
            yield
        finally:
            with self._turn:
                self._users = 0
                self._turn.notify_all()

    def _shut_out(self) -> None:
        with self._turn:
            self._turn.wait_for(lambda: not self._users)
            self._users = -1

    def _open_ssd(self, spec: WorkerSpec, folder: str) -> SsdBackend:
        layers = [self._block_tokens * self._shape.layer_bytes] * self._shape.layers
        blocks = max(1, spec.ssd_tokens // self._block_tokens)
        capacity = blocks * extent_bytes(bytes(_KEY_BYTES), layers)
        return SsdBackend(Path(folder) / spec.name, capacity, fingerprint=self._shape.fingerprint)

    def _open_store(self) -> TieredStore:
        if self._ssd is None:
            return TieredStore([TierSettings(medium=self._dram)])
        upper = TierSettings(medium=self._dram, queue_bytes=self._dram_bytes // _QUEUED_SHARE)
        return TieredStore([upper, TierSettings(medium=self._ssd)])
