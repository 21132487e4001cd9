"""One tier with its backend: an entry, space, the bytes, the commit; reads; and write-back into the tier below."""

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Final, final

from mooncake_lab.store.backends import (
    BlockExistsError,
    BlockNotFoundError,
    Buffer,
    DamagedBlockError,
    Reservation,
    StorageBackend,
    StorageError,
    StorageFullError,
    SuspectBlockError,
)
from mooncake_lab.store.backends.base import check_block
from mooncake_lab.store.calls import Calls
from mooncake_lab.store.tiers import Entry, Tier

_CHECKSUM_ERRORS: Final = frozenset({errno.EBADMSG, errno.EILSEQ, errno.ENODATA})
"""Errors of file systems and devices that compared the bytes with a checksum of their own."""
_LOG: Final = logging.getLogger("mooncake_lab.store")
_BATCH_BLOCKS: Final = 8
"""Evicted blocks that are written and committed together."""


@final
class BackedTier:
    """Moves the bytes of the blocks of a `Tier` into, out of and within its backend.

    Args:
        tier: which blocks are there.
        backend: where their bytes are.
        calls: of the store that it belongs to; its lock guards all tiers. Backends are called without it.
    """

    def __init__(self, tier: Tier[Reservation], backend: StorageBackend, calls: Calls) -> None:
        self.tier = tier
        self.backend = backend
        self.calls = calls
        self.changed = calls.changed
        """Notified when a demotion is due or has ended."""
        self.lock = calls.lock

    def put(self, key: bytes, sizes: Sequence[int], layers: Sequence[Buffer], position: int) -> bool:
        """Write a whole block; whether the tier holds it now."""
        with self.lock:
            if self.tier.has_intact(key):
                self.tier.touch(key)
                return True
        block = self.open(key, sizes, position)
        if block is not None:
            return block.write_within_call(layers, 0) and self.commit([block])
        with self.lock:
            return self.tier.has_intact(key)  # another client of a shared tier has stored it

    def open(self, key: bytes, sizes: Sequence[int], position: int) -> "BlockWriter | None":
        """Space for a block; `None` where there is nothing to write.

        The tier does not take the block, or holds it now, because another client of a shared tier has stored it.

        Raises:
            ValueError: when the key or the layers are out of bounds.
        """
        check_block(key, sizes)
        size = self.backend.footprint_bytes(key, sizes)
        with self.lock:
            entry, unused = self.tier.begin_write(key, size, position)
            self._notify()
        self.free(unused)
        if entry is None:
            return None
        try:
            entry.handle = self._reserve(key, sizes, position)
        except BlockExistsError as error:
            if not self._take_over(key, entry, sizes):
                self._abort(key, error)
            return None
        except BaseException as error:
            self._abort(key, error)
            if isinstance(error, (StorageError, OSError)):
                return None
            raise
        return BlockWriter(self, entry.handle)

    def commit(self, blocks: Sequence["BlockWriter"]) -> bool:
        """Commit blocks together and make them readable; whether they are."""
        with self.ended_by_errors(blocks):
            self.backend.commit(*[block.space for block in blocks])
            are_readable = True
            for block in blocks:
                block.is_open = False
                with self.lock:
                    unused = self.tier.end_write(block.space.key)
                    are_readable &= self.tier.holds(block.space.key)
                    self.tier.counters.stored += 1
                    self.tier.counters.written_bytes += block.space.size_bytes
                    self.tier.writes.worked()
                self.free(unused)
            self.free_again()
            return are_readable
        return False

    @contextlib.contextmanager
    def ended_by_errors(self, blocks: Sequence["BlockWriter"]) -> Generator[None]:
        """An error inside ends these blocks and frees their space; an error of the device is not raised."""
        try:
            yield
        except BaseException as error:
            for block in blocks:
                if block.is_open:
                    block.is_open = False
                    self._abort(block.space.key, error)
            if not isinstance(error, (StorageError, OSError)):
                raise

    def withdraw(self, key: bytes) -> None:
        """Remove an entry whose bytes will not come, and free its space."""
        with self.lock:
            unused = self.tier.abort_write(key)
        self.free(unused)

    def read_into(
        self, key: bytes, buffers: Sequence[Buffer], first_layer: int
    ) -> tuple[tuple[int, ...], int] | None:
        """Fill buffers; bytes per layer and position, or `None` where the block was not read as it was written."""
        tier = self.tier
        with self.lock:
            block = tier.begin_read(key)
            position = tier.position_of(key)
        if block is None:
            return None
        started_s = time.perf_counter()
        try:
            self.backend.read_into(block, buffers, first_layer=first_layer)
        except BaseException as error:
            self._end_failed_read(block, error)
            if isinstance(error, (StorageError, OSError)):
                return None
            raise
        seconds = time.perf_counter() - started_s
        with self.lock:
            layers = block.layer_bytes[first_layer : first_layer + len(buffers)]
            tier.counters.hits += 1
            tier.counters.read_bytes += sum(layers)
            tier.counters.read_s += seconds
            tier.reads.worked()
            if len(layers) == len(block.layer_bytes):
                tier.mark_read(block.key, block, has_failed=False)
            unused = tier.end_read(block.key, block)
        self.free(unused)
        return block.layer_bytes, position

    def ask(self, positions: Mapping[bytes, int]) -> None:
        """Learn which of these keys a shared backend has; none, where it does not answer.

        Positions are those in the prompt: a Mooncake Store does not keep them.
        """
        with self.lock:
            is_tried = self.tier.reads.allows()
        found: list[Reservation] = []
        error: Exception | None = None
        try:
            found = self.backend.find(positions) if is_tried else []
        except (StorageError, OSError) as raised:
            error = raised
        with self.lock:
            if error is not None:
                self.tier.reads.failed(error)
            elif is_tried:
                self.tier.reads.worked()
            self.tier.learn(
                positions, {block.key: (block, block.size_bytes, positions[block.key]) for block in found}
            )

    def recover(self) -> None:
        """Hold what the backend holds, oldest first; what does not fit is freed unless the backend is shared."""
        for block in list(self.backend.blocks()):
            size = self.backend.footprint_bytes(block.key, block.layer_bytes)
            with self.lock:
                unwanted = self.tier.recover(block.key, block, size_bytes=size, position=block.position)
            if unwanted and not self.backend.is_shared:
                self.backend.free(*unwanted)

    def evict_one(self) -> bool:
        """Evict one block; false when none can leave."""
        with self.lock:
            unused = self.tier.evict_one()
            self._notify()
        self.free(unused or ())
        return unused is not None

    def free(self, blocks: Iterable[Reservation]) -> None:
        """Free the space of blocks that the tier does not hold any more; what fails is tried again later."""
        for block in blocks:
            has_failed = False
            try:
                with contextlib.suppress(BlockNotFoundError):
                    self.backend.free(block)
            except (StorageError, OSError):
                has_failed = True
            self.tier.freed(block, has_failed=has_failed)

    def free_again(self) -> bool:
        """Free what could not be freed before, up to the first that fails again; whether something was freed."""
        freeing = self.tier.freeing
        failed = [block for block, has_failed in list(freeing.items()) if has_failed]
        for count, block in enumerate(failed):
            self.free([block])
            if block in freeing:
                return count > 0
        return bool(failed)

    def leaked_bytes(self) -> int:
        """Bytes in an own backend that the tier does not know, or bytes that a shared one did not free."""
        if self.backend.is_shared:  # its used bytes include those of other clients
            return sum(self.backend.footprint_bytes(block.key, block.layer_bytes) for block in self.tier.freeing)
        return self.backend.used_bytes - self.tier.blocks.used_bytes - self.tier.pending_bytes

    def _reserve(self, key: bytes, sizes: Sequence[int], position: int) -> Reservation:
        """Reserve; failed frees are tried again first, then blocks are evicted until a run is long enough."""
        freeing = self.tier.freeing
        while True:
            try:
                return self.backend.reserve(key, sizes, position=position)
            except (StorageFullError, BlockExistsError) as error:
                if self.free_again():
                    continue
                stuck = sum(list(freeing.values()))
                if isinstance(error, BlockExistsError) or not self.evict_one():
                    raise
                if sum(list(freeing.values())) > stuck:
                    raise  # the evicted block could not be freed: more evictions would be in vain

    def _take_over(self, key: bytes, entry: Entry[Reservation], sizes: Sequence[int]) -> bool:
        """Hold a placed block that another client of a shared backend has committed; false where none has."""
        freeing = list(self.tier.freeing)  # before asking: what is freed meanwhile is gone
        try:
            found = next(iter(self.backend.find([key])), None)
        except (StorageError, OSError):
            return False
        if found is None or found in freeing or found.layer_bytes != tuple(sizes):
            return False
        with self.lock:
            entry.handle = found
            for forgotten in self.tier.end_write(key):  # by an emptied tier; it is the other client's
                self.tier.freed(forgotten)
        return True

    def _abort(self, key: bytes, error: BaseException) -> None:
        """Remove an entry whose bytes will not come; an error of the device counts against the tier.

        A suspect block is no second failure: the failed sync was counted.
        """
        is_refusal = isinstance(error, (StorageFullError, BlockExistsError, SuspectBlockError))
        with self.lock:
            if isinstance(error, (StorageError, OSError)) and not is_refusal:
                self.tier.writes.failed(error)
            else:
                self.tier.counters.refused += 1
        self.withdraw(key)

    def _end_failed_read(self, block: Reservation, error: BaseException) -> None:
        """Drop a block that is not what was written, or whose bytes the device finds wrong twice in a row.

        After other errors of the device it stays. Where its sector may be bad, intact bytes may replace it. EIO
        may come from a sector or the whole device, and other clients of a shared backend may still read the block.
        """
        is_gone = isinstance(error, (DamagedBlockError, BlockNotFoundError))
        number = error.errno if isinstance(error, OSError) else None
        may_be_bad = number in _CHECKSUM_ERRORS or (number == errno.EIO and not self.backend.is_shared)
        tier = self.tier
        with self.lock:
            has_failed_before = may_be_bad and tier.mark_read(block.key, block, has_failed=True)
            is_bad = has_failed_before and number in _CHECKSUM_ERRORS
            unused = tier.end_read(block.key, block, is_damaged=is_gone or is_bad)
            if isinstance(error, (StorageError, OSError)):
                tier.counters.misses += 1
                tier.counters.damaged += is_bad or isinstance(error, DamagedBlockError)
                if not (is_gone or has_failed_before):  # a second failure says nothing new of the device
                    tier.reads.failed(error)
        self.free(unused)

    def _notify(self) -> None:
        """Wake the thread that demotes, where it has something to do."""
        if self.tier.queue:
            self.changed.notify_all()


@final
class BlockWriter:
    """Space for a block, whose layers come at once or one by one as a prefill computes them.

    When the backend fails the block is aborted, and later calls return false. Mutable.
    """

    __slots__ = ("_tier", "is_open", "space")

    def __init__(self, tier: BackedTier, space: Reservation) -> None:
        self._tier = tier
        self.space = space
        self.is_open: bool = True
        """Whether it was neither committed nor aborted."""

    def write(self, layers: Sequence[Buffer], *, first_layer: int = 0) -> bool:
        """Write consecutive layers; whether the block is still open.

        Raises:
            ValueError: when a buffer has not the bytes of its layer; the block is aborted then.
        """
        with self._tier.calls:
            return self.write_within_call(layers, first_layer)

    def write_within_call(self, layers: Sequence[Buffer], first_layer: int) -> bool:
        """As `write`, within another call of the store."""
        if self.is_open:
            with self._tier.ended_by_errors([self]):
                self._tier.backend.write(self.space, layers, first_layer=first_layer)
        return self.is_open

    def commit(self) -> bool:
        """Make the block readable; whether it is.

        Raises:
            ValueError: when a layer was not written; the block is aborted then.
        """
        with self._tier.calls:
            return self.is_open and self._tier.commit([self])

    def abandon(self) -> None:
        """Free the space, because the layers will not come; a block that has ended stays as it is."""
        with self._tier.calls:
            if self.is_open:
                self.is_open = False
                self._tier.withdraw(self.space.key)


@final
class WriteBack:
    """The thread that demotes evicted blocks of one tier, so that no request waits for it. Mutable."""

    def __init__(self, source: BackedTier, target: BackedTier) -> None:
        self._source = source
        self._target = target
        self._tier = source.tier
        self._changed = source.changed
        self._stopping = False
        self._is_moving = False
        self.crash: Exception | None = None
        """The unexpected error that ended the thread."""
        self._thread = threading.Thread(target=self._run, name=f"write-back-{source.tier.index}", daemon=True)
        self._thread.start()

    def is_idle(self) -> bool:
        """Whether no block waits or moves, or none ever will."""
        return self.crash is not None or not (self._is_moving or self._tier.queue)

    def stop(self) -> None:
        """End the thread when its queue is empty."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._demote_batch():
                pass
        except Exception as error:  # noqa: BLE001  # raised by `flush` and `close`
            with self._changed:
                self.crash = error
                self._changed.notify_all()

    def _demote_batch(self) -> bool:
        """Write one batch into the tier below; false when it is time to stop."""
        tier = self._tier
        with self._changed:
            self._changed.wait_for(lambda: tier.queue or self._stopping)
            if not tier.queue:
                return False
            batch = [tier.queue.popleft() for _ in range(min(_BATCH_BLOCKS, len(tier.queue)))]
            leaving = [tier.pending[key].handle for key in batch]
            self._is_moving = True
        self._write_batch(leaving)
        with self._changed:
            unused = [free for block in leaving for free in tier.end_demotion(block.key)]
        self._source.free(unused)
        with self._changed:
            self._is_moving = False
            self._changed.notify_all()
        return True

    def _write_batch(self, leaving: Sequence[Reservation]) -> None:
        """Write blocks into the tier below and commit them together; an error ends only the block it concerns."""
        below = self._target.backend.name
        written: list[BlockWriter] = []
        for block in leaving:
            try:
                target = self._write(block)
            except Exception:  # noqa: BLE001  # one block less; the thread has others to demote
                _LOG.exception("block %s is given up on its way into %s", block.key.hex(), below)
            else:
                written += [target] if target is not None else []
        try:
            if written:  # else there is nothing to commit, and the device may not answer
                self._target.commit(written)
        except Exception:  # noqa: BLE001  # a batch less
            _LOG.exception("%d blocks are given up on their way into %s", len(written), below)

    def _write(self, block: Reservation) -> BlockWriter | None:
        """The block in the tier below, to be committed; `None` where there is nothing to commit."""
        target = self._target.open(block.key, block.layer_bytes, block.position)
        if target is None:
            return None
        try:
            layers = self._source.backend.read(block, 0, len(block.layer_bytes))
        except (StorageError, OSError) as error:
            target.abandon()
            with self._changed:
                if isinstance(error, DamagedBlockError):
                    self._tier.counters.damaged += 1
                else:
                    self._tier.reads.failed(error)
            return None
        except BaseException:
            target.abandon()
            raise
        return target if target.write(layers) else None
