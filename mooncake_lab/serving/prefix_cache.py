"""A prefill worker's store of prefix blocks: its DRAM, its SSD, and the store that all workers share.

A prefix is read layer by layer while the prompt behind it is computed (arXiv Fig. 7), wherever it lies: a
`PrefixPlan` reads the worker's own tiers, and takes in what comes from another worker or from the shared store.
"""

import mmap
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Final, final

import numpy as np
import torch

from mooncake_lab.cluster import SHARED_STORE
from mooncake_lab.engine import KVSpan
from mooncake_lab.engine.kv_layout import KVLayout, bytes_of
from mooncake_lab.serving.kv_transfer import LayerStream
from mooncake_lab.serving.kv_transfer.fetch import PrefixSource
from mooncake_lab.serving.messages import CacheUpdate
from mooncake_lab.serving.pacer import PacedLink
from mooncake_lab.serving.spec import WorkerSpec
from mooncake_lab.serving.ssd_space import KEY_BYTES, ssd_bytes
from mooncake_lab.store.backends import (
    BlockNotFoundError,
    DramBackend,
    MooncakeClient,
    MooncakeStore,
    RemoteBackend,
    Reservation,
    SsdBackend,
    StorageBackend,
    StorageError,
)
from mooncake_lab.store.eviction import PolicyFactory, make_policy
from mooncake_lab.store.tiered_store import TieredStore, TierSettings
from mooncake_lab.store.tiers import TierChange

_QUEUED_SHARE: Final = 4
"""One part in four of a tier is for blocks on their way to the tier below."""
_TIMED_BLOCKS: Final = 8
_SHARED_STOP_S: Final = 1.0
"""How long a shared store that is left may take for the blocks that wait for it."""
SSD: Final = "ssd"
"""The name of the tier on the SSD."""


@final
class PrefixPlan:
    """Where the leading blocks of a prompt are: in this worker's own tiers, and on their way from elsewhere.

    It is the `LayerSource` of an engine, and of other workers. Blocks from elsewhere (FAST'25 Algorithm 1) come
    layer by layer: one thread takes them in while others read. Either all layers of such a block come, or it is
    lost, like all behind it; after `give_up` all that are not complete are. A block of this worker that is evicted
    or found damaged before its last layer is read is lost, too. Mutable.

    Args:
        cache: of this worker.
        keys: of the prompt.
    """

    def __init__(self, cache: "PrefixCache", keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.blocks = 0
        """How many can be loaded, by the last `match`."""
        self.ssd_bytes = 0
        """Bytes that were read from the SSD."""
        self.ssd_start_s = self.ssd_end_s = 0.0
        """When the first of them was asked for, and when the last came (monotonic clock)."""
        self.fetched_blocks = 0
        """How many come from elsewhere, as far as is known now; from the first layer on it only shrinks."""
        self.fetch_start_s = self.fetch_end_s = time.monotonic()
        """When they were asked for, and when the last byte came or they were given up (monotonic clock)."""
        self._cache = cache
        self._local = 0
        self._fetched_from = 0
        """Position of the first block from elsewhere in the prompt."""
        self._layers: list[torch.Tensor] = []
        self._shares: list[tuple[str, int]] = []
        """By source, how many blocks it has."""
        self._turn = threading.Condition()
        self._is_over = False

    def match(self, *, read_from_ssd: int | None = None) -> int:
        """How many of the leading blocks can be loaded: those that are here, and behind them those that come.

        Args:
            read_from_ssd: leading blocks behind which the first one on the SSD ends the prefix; None reads all.
        """
        self._local = self.blocks = self._cache.match(self.keys, read_from_ssd=read_from_ssd)
        if self.fetched_blocks and self._fetched_from <= self._local:
            self.blocks = max(self._local, self._fetched_from + self.fetched_blocks)
        return self.blocks

    def read(self, layer: int, block: int, into: torch.Tensor) -> bool:
        """Fill a CPU tensor with one layer of one block; see `LayerSource`."""
        if block < self._local:
            return self._read_local(layer, block, [into])
        block -= self._fetched_from
        with self._turn:
            self._turn.wait_for(lambda: len(self._layers) > layer or block >= self.fetched_blocks or self._is_over)
            if block >= self.fetched_blocks or len(self._layers) <= layer:
                return False
            into.copy_(self._layers[layer][block])
        return True

    def layers(self, blocks: int | None = None, *, together: int = 1) -> LayerStream:
        """Layer after layer of the blocks that are here, up to the first that is lost.

        Args:
            blocks: how many of the leading ones; None is what `match` found.
            together: layers that are read at once.
        """
        layout, blocks = self._cache.layout, self._local if blocks is None else blocks
        for first in range(0, layout.layers, together):
            layers = torch.empty((together, blocks, *layout.layer_shape), dtype=layout.dtype)
            for block in range(blocks):
                if not self._read_local(first, block, list(layers[:, block])):
                    blocks = block
                    break
            if not blocks:
                return
            yield from layers[:, :blocks]

    def fetch(self, blocks: int, sources: Mapping[str, PrefixSource], begun: Callable[[], None]) -> None:
        """Take in what these sources have of the leading blocks and this worker lacks, and keep it in the cache.

        Each source is asked for what the one before it lacks.

        Args:
            blocks: how many of the leading ones.
            sources: by name.
            begun: called when the first layer is here.
        """
        first = self._fetched_from = self._cache.match(self.keys[:blocks])
        keys = self.keys[first:blocks]
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
        complete = [tuple(layer[block] for layer in self._layers) for block in range(self.fetched_blocks)]
        self._cache.adopt(keys[: self.fetched_blocks], complete, first=first)

    def give_up(self) -> None:
        """Wait for no more from elsewhere: what is not complete is lost."""
        with self._turn:
            if not self._is_over:
                self.fetched_blocks, self._is_over, self.fetch_end_s = 0, True, time.monotonic()
                self._turn.notify_all()

    def bytes_by_source(self) -> dict[str, int]:
        """What is complete of the blocks from elsewhere, by their source."""
        found, left = dict[str, int](), self.fetched_blocks
        for name, share in self._shares:
            found[name] = min(share, left) * sum(layer[0].nbytes for layer in self._layers)
            left -= min(share, left)
        return found

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
        """Take in the next layer; whether more are wanted."""
        with self._turn:
            if not self._is_over:
                self._layers.append(layer)
                self.fetched_blocks, self.fetch_end_s = len(layer), time.monotonic()
                self._is_over = len(self._layers) == self._cache.layout.layers
                self._turn.notify_all()
            return not self._is_over

    def _read_local(self, first_layer: int, block: int, layers: Sequence[torch.Tensor]) -> bool:
        start_s = time.monotonic()
        tier = self._cache.read_into(self.keys[block], layers, first_layer=first_layer)
        if tier == SSD:
            self.ssd_start_s = self.ssd_start_s or start_s
            self.ssd_end_s = time.monotonic()
            self.ssd_bytes += sum(layer.nbytes for layer in layers)
        return tier is not None


@final
class PrefixCache:
    """Blocks by key in a `TieredStore`, and what the cluster was told of them.

    Blocks that DRAM evicts go to the SSD, and from there to the store that all workers share. What is in DRAM and
    on the SSD is the worker's own: a prompt is computed from that, and what is only in the shared store is copied
    to DRAM first. Blocks on the SSD stay when a worker fails; its replacement reads the same folder.

    Methods may be called from several threads, but `news`, `forget` and `close` from one only, and
    `use_shared_store` from one only. `use_shared_store` and `close` do not wait for a shared store that stalls.
    Mutable: it is a cache and owns its media.

    Args:
        spec: how much it holds, and where.
        layout: of its blocks.

    Raises:
        OSError: when the SSD's folder cannot be used.
        FolderInUseError: when another process has it open.
        ValueError: when the folder's slab is larger than `ssd_tokens` allow.
    """

    def __init__(self, spec: WorkerSpec, layout: KVLayout) -> None:
        self.layout = layout
        self._link = PacedLink(spec.network_bytes_per_s)  # in the other direction than what the worker sends
        self._shared_reads_layers = (
            spec.shared_store != "mooncake"
        )  # which reads the whole block for each of its layers
        self._dram_bytes = spec.cache_tokens * layout.bytes_per_token
        self._ssd = None if spec.ssd_dir is None else self._open_ssd(spec, spec.ssd_dir)
        self._dram = DramBackend(self._dram_bytes)
        self._shared: StorageBackend | None = None
        self._store = self._open_store(spec)
        self._damaged = 0
        """Damaged blocks that were reported."""

    def match(self, keys: Sequence[bytes], *, read_from_ssd: int | None = None) -> int:
        """How many of the leading keys are the worker's own; changes nothing.

        Args:
            keys: of a prompt.
            read_from_ssd: leading blocks behind which the first one on the SSD ends the prefix; None reads all.
        """
        limit = len(keys) if read_from_ssd is None else read_from_ssd
        tiers = map(self._store.tier_of, keys)
        own = takewhile(lambda found: found[1] not in {None, SHARED_STORE}, enumerate(tiers))
        return sum(1 for _ in takewhile(lambda found: found[1] != SSD or found[0] < limit, own))

    def prefix(self, keys: Sequence[bytes]) -> PrefixPlan:
        """The leading blocks that are here now, to be read layer by layer."""
        plan = PrefixPlan(self, keys)
        plan.match()
        return plan

    def read_into(self, key: bytes, layers: Sequence[torch.Tensor], *, first_layer: int = 0) -> str | None:
        """Fill tensors with layers of a block; the tier that had it, or None where no tier could deliver it."""
        return self._store.read_into(key, [bytes_of(layer) for layer in layers], first_layer=first_layer)

    def shared(self, keys: Sequence[bytes], first: int) -> LayerStream:
        """The leading blocks that are here or in the shared store, which is asked; see `PrefixSource`."""
        blocks = self._store.match_prefix(keys, first=first)
        together = 1 if self._shared_reads_layers else self.layout.layers
        for layer in PrefixPlan(self, keys).layers(blocks, together=together):
            self._link.hold(layer.nbytes)
            yield layer

    def time_ssd(self) -> tuple[tuple[int, float], ...]:
        """Bytes and seconds of reads from the SSD, a layer of a block each, as prompts read them.

        Blocks are written for it where too few can be read; without an SSD nothing is read. A damaged block is
        passed over: it is found again, and freed, when a prompt needs it.
        """
        ssd = self._ssd
        if ssd is None:
            return ()
        times = list[tuple[int, float]]()
        for block in list(ssd.blocks())[:_TIMED_BLOCKS]:
            times += self._time_block(ssd, block)
        reserved, written = list[Reservation](), list[Reservation]()
        with suppress(OSError, StorageError):  # a small SSD is full earlier
            for _ in range(_TIMED_BLOCKS - len(times) // self.layout.layers):
                block = ssd.reserve(secrets.token_bytes(KEY_BYTES), self.layout.block_bytes)
                reserved.append(block)
                # pages of their own, so that the SSD takes them without the page cache
                ssd.write(
                    block, [np.frombuffer(mmap.mmap(-1, size), np.uint8) for size in self.layout.block_bytes]
                )
                written.append(block)
        if written:
            with suppress(OSError, StorageError):
                ssd.commit(*written)  # one sync for all of them
                for block in written:
                    times += self._time_block(ssd, block)
        ssd.free(*reserved)
        return tuple(times)

    def _time_block(self, ssd: SsdBackend, block: Reservation) -> list[tuple[int, float]]:
        """Bytes and seconds of reading each layer; nothing where one cannot be read."""
        rows = list[tuple[int, float]]()
        try:
            for layer, size in enumerate(self.layout.block_bytes):
                start_s = time.perf_counter()
                ssd.read_into(block, [np.empty(size, np.uint8)], first_layer=layer)
                rows.append((size, time.perf_counter() - start_s))
        except (OSError, StorageError):
            return []
        return rows

    def promote(self, keys: Sequence[bytes]) -> None:
        """Copy blocks that are only on the SSD to DRAM."""
        self._store.promote(keys)

    def keep(self, keys: Sequence[bytes], kv: KVSpan) -> None:
        """Store the whole blocks that a span covers; `keys` are those of the whole prompt, front to back."""
        size = self.layout.block_tokens
        first = -(-kv.start // size)
        last = (kv.start + kv.tokens) // size
        for index in range(first, min(last, len(keys))):
            begin = index * size - kv.start
            block = [layer[:, begin : begin + size].cpu().contiguous() for layer in kv.layers]
            self._store.put(keys[index], [bytes_of(layer) for layer in block], position=index)

    def adopt(self, keys: Sequence[bytes], blocks: Sequence[tuple[torch.Tensor, ...]], *, first: int) -> None:
        """Store blocks that came from elsewhere; `first` is the position of the first of them."""
        for position, (key, block) in enumerate(zip(keys, blocks, strict=True), first):
            self._store.put(key, [bytes_of(layer) for layer in block], position=position)

    def news(self) -> CacheUpdate | None:
        """What came and what left since the cluster was last told, at first all; `None` where nothing did."""
        update = self._update(self._store.changes())
        return None if update == CacheUpdate() else update

    def forget(self) -> CacheUpdate:
        """Empty every tier, the shared store too; what the cluster has to forget."""
        changes = self._store.clear()
        if self._shared is not None:
            _empty(
                self._shared,
                [key for key, before, _, _ in changes if isinstance(key, bytes) and SHARED_STORE in before],
            )
        return self._update(changes)

    def _update(self, changes: Iterable[TierChange]) -> CacheUpdate:
        """Changes as the cluster counts them: of the worker's own blocks, and of those in the shared store."""
        added, removed, promoted, demoted, shared_added, shared_removed = (list[bytes]() for _ in range(6))
        for key, before, now, is_missing in changes:
            assert isinstance(key, bytes)  # noqa: S101  # all keys of a `TieredStore` are
            was, stays = (next((tier for tier in tiers if tier != SHARED_STORE), None) for tiers in (before, now))
            if was is None and stays is not None:
                added.append(key)
            if was is not None and stays is None:
                removed.append(key)
            if stays == SSD and was != SSD:
                demoted.append(key)
            if was == SSD and stays not in {SSD, None}:
                promoted.append(key)
            if SHARED_STORE in now and SHARED_STORE not in before:
                shared_added.append(key)
            if SHARED_STORE not in now and (SHARED_STORE in before or is_missing):
                shared_removed.append(key)
        damaged = self._store.damaged_blocks()
        newly_damaged, self._damaged = damaged - self._damaged, damaged
        return CacheUpdate(
            added=tuple(added),
            removed=tuple(removed),
            promoted=tuple(promoted),
            demoted=tuple(demoted),
            shared_added=tuple(shared_added),
            shared_removed=tuple(shared_removed),
            damaged_blocks=newly_damaged,
        )

    def use_shared_store(self, shared: StorageBackend | None) -> None:
        """Demote to this store from now on; None demotes to none. The next `news` reports what that changes.

        Raises:
            OSError: when the shared store does not answer; then none is used.
            StorageError: when it cannot be used; likewise.
        """
        if self._shared is not None:
            try:
                with self._hanging_up():
                    self._store.detach()
            finally:
                self._shared = None
        if shared is not None:
            self._shared = shared
            try:
                self._store.attach(TierSettings(medium=shared, promotes=False))
            except BaseException:
                self._shared = None
                shared.close()
                raise

    def close(self) -> None:
        """Save what DRAM holds on the SSD, then leave the shared store and close all; later calls are refused."""
        if self._ssd is not None:
            self._store.sink(self._ssd.name)  # first, because the shared store may stall
        with self._hanging_up():
            self._store.close()
        self._dram.close()
        if self._ssd is not None:
            self._ssd.close()

    @contextmanager
    def _hanging_up(self) -> Generator[None]:
        """Close the shared store at the end, or before that where those who use it wait too long."""
        shared = self._shared
        if shared is None:
            yield
            return
        late = threading.Timer(_SHARED_STOP_S, shared.close)
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()
            shared.close()

    def _open_ssd(self, spec: WorkerSpec, folder: str) -> SsdBackend:
        capacity_bytes = ssd_bytes(spec.ssd_tokens, self.layout.block_tokens, self.layout.block_bytes)
        return SsdBackend(Path(folder) / spec.name, capacity_bytes, fingerprint=self.layout.fingerprint)

    def _open_store(self, spec: WorkerSpec) -> TieredStore:
        media = [self._dram] if self._ssd is None else [self._dram, self._ssd]
        last, has_shared = media[-1], spec.shared_store is not None

        def policy(medium: StorageBackend) -> PolicyFactory:
            blocks = medium.capacity_bytes // sum(self.layout.block_bytes)
            return lambda _: make_policy(spec.eviction, max(1, blocks))

        return TieredStore(
            [
                TierSettings(
                    medium=medium,
                    eviction=policy(medium),
                    queue_bytes=medium.capacity_bytes // _QUEUED_SHARE if medium is not last or has_shared else 0,
                )
                for medium in media
            ],
            reports_changes=True,
        )


def open_shared_store(spec: WorkerSpec, layout: KVLayout, address: str) -> StorageBackend:
    """The shared store at an address, as a tier of a worker's cache.

    Raises:
        StorageError: when it refuses this worker, or Mooncake's wheel is missing.
        OSError: when it does not answer.
    """
    if spec.shared_store == "mooncake":
        capacity_bytes = spec.shared_store_tokens * layout.bytes_per_token
        client = MooncakeClient(address, 0)
        return MooncakeStore(
            client, capacity_bytes, layout.block_bytes, fingerprint=layout.fingerprint, name=SHARED_STORE
        )
    host, _, port = address.rpartition(":")
    return RemoteBackend(
        (host, int(port)),
        spec.token,
        fingerprint=layout.fingerprint,
        name=SHARED_STORE,
        timeout_s=spec.fetch_timeout_s,
    )


def _empty(shared: StorageBackend, known: Iterable[bytes]) -> None:
    """Free what a shared store holds of this model, as far as that is listed or known; the store may be gone."""
    with suppress(OSError, StorageError):
        for block in dict.fromkeys([*shared.blocks(), *shared.find(known)]):
            with suppress(BlockNotFoundError):
                shared.free(block)
