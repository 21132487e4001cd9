"""Writing into tiers: an entry in the stack, space in the backend, the bytes, the commit; and write-back."""

import contextlib
import logging
import threading
from collections.abc import Generator, Iterable, Sequence
from itertools import chain
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
from mooncake_lab.store.interrupts import Uninterrupted
from mooncake_lab.store.tiers import Demote, Entry, Free, TierStack

_LOG: Final = logging.getLogger("mooncake_lab.store")
_BATCH_BLOCKS: Final = 8
"""Evicted blocks that are written and committed together."""


@final
class TierWriter:
    """Carries out writes, and the commands of a `TierStack`, on the backends.

    Args:
        stack: which block is in which tier.
        backends: one per tier.
        changed: guards the stack; notified when a demotion is due or has ended. Backends are called without it.
    """

    def __init__(
        self, stack: TierStack[Reservation], backends: Sequence[StorageBackend], changed: threading.Condition
    ) -> None:
        self.stack = stack
        self.backends = backends
        self.changed = changed

    def put(self, index: int, key: bytes, sizes: Sequence[int], layers: Sequence[Buffer], position: int) -> bool:
        """Write a whole block into one tier; whether the tier holds it now."""
        tier = self.stack.tiers[index]
        with Uninterrupted():
            with self.changed:
                if tier.has_intact(key):
                    tier.touch(key)
                    return True
            block = self.open(index, key, sizes, position)
            if block is not None:
                return block.write(layers) and block.commit()
            with self.changed:
                return tier.has_intact(key)  # another client of a pool has stored it

    def open(self, index: int, key: bytes, sizes: Sequence[int], position: int) -> "BlockWriter | None":
        """Space for a block in a tier; `None` where there is nothing to write.

        The tier does not take the block, or holds it now, because another client of a pool has stored it.

        Raises:
            ValueError: when the key or the layers are out of bounds.
        """
        check_block(key, sizes)
        size = self.backends[index].footprint_bytes(key, sizes)
        with self.changed:
            entry, commands = self.stack.begin_write(index, key, size, position)
            self._notify(commands)
        self.carry_out(commands)
        if entry is None:
            return None
        try:
            entry.handle = self._reserve(index, key, sizes, position)
        except BlockExistsError as error:
            if not self._take_over(index, key, entry, sizes):
                self._abort(index, key, error)
            return None
        except BaseException as error:
            self._abort(index, key, error)
            if isinstance(error, (StorageError, OSError)):
                return None
            raise
        return BlockWriter(self, index, entry.handle)

    def commit(self, blocks: Sequence["BlockWriter"]) -> bool:
        """Commit blocks of one tier together and make them readable; whether they are."""
        index = blocks[0].index
        tier = self.stack.tiers[index]
        with Uninterrupted(), self.ended_by_errors(blocks):
            self.backends[index].commit(*[block.space for block in blocks])
            for block in blocks:
                block.is_open = False
                with self.changed:
                    self.stack.end_write(index, block.space.key)
                    tier.counters.stored += 1
                    tier.counters.written_bytes += block.space.size_bytes
                    tier.writes.worked()
            self.free_again(index)
            return True
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
                    self._abort(block.index, block.space.key, error)
            if not isinstance(error, (StorageError, OSError)):
                raise

    def withdraw(self, index: int, key: bytes) -> None:
        """Remove an entry whose bytes will not come, and free its space."""
        with self.changed:
            commands = self.stack.abort_write(index, key)
        self.carry_out(commands)

    def evict_one(self, index: int) -> bool:
        """Evict one block of a tier; false when none can leave."""
        with Uninterrupted():
            with self.changed:
                commands = self.stack.evict_one(index)
                self._notify(commands or ())
            self.carry_out(commands or ())
            return commands is not None

    def carry_out(self, commands: Iterable[Free[Reservation] | Demote]) -> None:
        """Free what is to be freed, without the lock; the write-back threads take the demotions."""
        for command in commands:
            if isinstance(command, Free):
                self._free(command.tier, command.handle)

    def free_again(self, index: int) -> bool:
        """Free what could not be freed before, up to the first that fails again; whether something was freed."""
        freeing = self.stack.tiers[index].freeing
        failed = [handle for handle, has_failed in list(freeing.items()) if has_failed]
        for count, handle in enumerate(failed):
            self._free(index, handle)
            if handle in freeing:
                return count > 0
        return bool(failed)

    def _free(self, index: int, handle: Reservation) -> None:
        has_failed = False
        try:
            with contextlib.suppress(BlockNotFoundError):
                self.backends[index].free(handle)
        except (StorageError, OSError):
            has_failed = True
        self.stack.tiers[index].freed(handle, has_failed=has_failed)

    def _reserve(self, index: int, key: bytes, sizes: Sequence[int], position: int) -> Reservation:
        """Reserve; failed frees are tried again first, then blocks are evicted until a run is long enough."""
        freeing = self.stack.tiers[index].freeing
        while True:
            try:
                return self.backends[index].reserve(key, sizes, position=position)
            except (StorageFullError, BlockExistsError) as error:
                if self.free_again(index):
                    continue
                stuck = sum(list(freeing.values()))
                if isinstance(error, BlockExistsError) or not self.evict_one(index):
                    raise
                if sum(list(freeing.values())) > stuck:
                    raise  # the evicted block could not be freed: more evictions would be in vain

    def _take_over(self, index: int, key: bytes, entry: Entry[Reservation], sizes: Sequence[int]) -> bool:
        """Hold a placed block that another client of a shared backend has committed; false where none has."""
        freeing = list(self.stack.tiers[index].freeing)  # before asking: what is freed meanwhile is gone
        try:
            found = next(iter(self.backends[index].find([key])), None)
        except (StorageError, OSError):
            return False
        if found is None or found in freeing or found.layer_bytes != tuple(sizes):
            return False
        with self.changed:
            entry.handle = found
            self.stack.end_write(index, key)
        return True

    def _abort(self, index: int, key: bytes, error: BaseException) -> None:
        """Remove an entry whose bytes will not come; an error of the device counts against the tier.

        A suspect block is no second failure: the failed sync was counted.
        """
        is_refusal = isinstance(error, (StorageFullError, BlockExistsError, SuspectBlockError))
        with self.changed:
            tier = self.stack.tiers[index]
            if isinstance(error, (StorageError, OSError)) and not is_refusal:
                tier.writes.failed(error)
            else:
                tier.counters.refused += 1
        self.withdraw(index, key)

    def _notify(self, commands: Iterable[Free[Reservation] | Demote]) -> None:
        if any(isinstance(command, Demote) for command in commands):
            self.changed.notify_all()


@final
class BlockWriter:
    """Space for a block in one tier, whose layers come at once or one by one as a prefill computes them.

    When the backend fails the block is aborted, and later calls return false. Mutable.
    """

    __slots__ = ("_writer", "index", "is_open", "space")

    def __init__(self, writer: TierWriter, index: int, space: Reservation) -> None:
        self._writer = writer
        self.index = index
        self.space = space
        self.is_open: bool = True
        """Whether it was neither committed nor aborted."""

    def write(self, layers: Sequence[Buffer], *, first_layer: int = 0) -> bool:
        """Write consecutive layers; whether the block is still open.

        Raises:
            ValueError: when a buffer has not the bytes of its layer; the block is aborted then.
        """
        if self.is_open:
            with Uninterrupted(), self._writer.ended_by_errors([self]):
                self._writer.backends[self.index].write(self.space, layers, first_layer=first_layer)
        return self.is_open

    def commit(self) -> bool:
        """Make the block readable; whether it is.

        Raises:
            ValueError: when a layer was not written; the block is aborted then.
        """
        return self.is_open and self._writer.commit([self])

    def abandon(self) -> None:
        """Free the space, because the layers will not come; a block that has ended stays as it is."""
        with Uninterrupted():
            if self.is_open:
                self.is_open = False
                self._writer.withdraw(self.index, self.space.key)


@final
class WriteBack:
    """The thread that demotes evicted blocks of one tier, so that no request waits for it. Mutable."""

    def __init__(self, writer: TierWriter, index: int) -> None:
        self._writer = writer
        self._index = index
        self._tier = writer.stack.tiers[index]
        self._changed = writer.changed
        self._stopping = False
        self._is_moving = False
        self.crash: Exception | None = None
        """The unexpected error that ended the thread."""
        self._thread = threading.Thread(target=self._run, name=f"write-back-{index}", daemon=True)
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
            ended = [self._writer.stack.end_demotion(self._index, block.key) for block in leaving]
        self._writer.carry_out(chain.from_iterable(ended))
        with self._changed:
            self._is_moving = False
            self._changed.notify_all()
        return True

    def _write_batch(self, leaving: Sequence[Reservation]) -> None:
        """Write blocks into the tier below and commit them together; an error ends only the block it concerns."""
        below = self._writer.backends[self._index + 1].name
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
                self._writer.commit(written)
        except Exception:  # noqa: BLE001  # a batch less
            _LOG.exception("%d blocks are given up on their way into %s", len(written), below)

    def _write(self, block: Reservation) -> BlockWriter | None:
        """The block in the tier below, to be committed; `None` where there is nothing to commit."""
        target = self._writer.open(self._index + 1, block.key, block.layer_bytes, block.position)
        if target is None:
            return None
        try:
            layers = self._writer.backends[self._index].read(block, 0, len(block.layer_bytes))
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
