"""Writing into tiers: an entry in the stack, space in the backend, the bytes, the commit."""

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import final

from mooncake_lab.store.backends import (
    BlockExistsError,
    BlockNotFoundError,
    Buffer,
    Reservation,
    StorageBackend,
    StorageError,
    StorageFullError,
    SuspectBlockError,
)
from mooncake_lab.store.backends.base import check_block
from mooncake_lab.store.interrupts import Uninterrupted
from mooncake_lab.store.tier import Demote, Entry, Free
from mooncake_lab.store.tier_stack import TierStack


@final
class TierWriter:
    """Carries out writes, and the commands of a `TierStack`, on the backends.

    A write that ends early, by whatever error, removes its entry and frees its space. In the main thread callers
    hold Ctrl-C off with `Uninterrupted` from the entry to the commit.

    Args:
        stack: which block is in which tier.
        backends: one per tier.
        lock: guards the stack; notified when a demotion is due or has ended. Backends are called without it.
    """

    __slots__ = ("_lock", "backends", "stack")

    def __init__(
        self, stack: TierStack[Reservation], backends: Sequence[StorageBackend], lock: threading.Condition
    ) -> None:
        self.stack = stack
        self.backends = backends
        self._lock = lock

    def put(self, index: int, key: bytes, sizes: Sequence[int], layers: Sequence[Buffer], position: int) -> bool:
        """Write a whole block into one tier; whether the tier holds it now.

        Raises:
            ValueError: when the key or the layers are out of bounds, or backends cannot copy such memory.
        """
        tier = self.stack.tiers[index]
        with Uninterrupted() as section:
            with self._lock:
                if tier.has_intact(key):
                    tier.touch(key)
                    return True
            entry = self.place(index, key, sizes, position)
            if entry is None:
                return False
            space = self.reserve(index, key, entry, sizes, position)
            if space is None:
                return entry.is_ready
            space = self.write(index, entry, space, layers, section)
            return space is not None and self.commit(index, [space])

    def place(self, index: int, key: bytes, sizes: Sequence[int], position: int) -> Entry[Reservation] | None:
        """An entry for the block in a tier; `None` where the tier does not take it."""
        check_block(key, sizes)
        size = self.backends[index].footprint_bytes(key, sizes)
        with self._lock:
            entry, commands = self.stack.begin_write(index, key, size, position)
            self._notify(commands)
        self.carry_out(commands)
        return entry

    def reserve(
        self, index: int, key: bytes, entry: Entry[Reservation], sizes: Sequence[int], position: int
    ) -> Reservation | None:
        """Space in the backend for a placed block; `None` where there is nothing to write.

        Another client of a shared backend has committed the block, and its entry is ready; or it was refused.
        """
        try:
            entry.handle = self._space(index, key, sizes, position)
        except BlockExistsError as error:
            if not self._take_over(index, key, entry, sizes):
                self.abort(index, key, error)
            return None
        except StorageFullError:
            self._refuse(index, key)
            return None
        except (StorageError, OSError) as error:
            self.abort(index, key, error)
            return None
        except BaseException:
            self._refuse(index, key)
            raise
        return entry.handle

    def write(
        self,
        index: int,
        entry: Entry[Reservation],
        space: Reservation,
        layers: Sequence[Buffer],
        section: Uninterrupted,
    ) -> Reservation | None:
        """Write a block into its space; where it is now, `None` where the write was aborted.

        A backend that turns out to be full only now gets a second try after one more eviction. Ctrl-C ends the
        copy and no other part of `section`.
        """
        backend = self.backends[index]
        try:
            try:
                with section.interruptible():
                    backend.write(space, layers)
            except StorageFullError:
                space = self._other_space(index, entry, space)
                with section.interruptible():
                    backend.write(space, layers)
        except (StorageError, OSError) as error:
            self.abort(index, space.key, error)
            return None
        except BaseException:
            self._refuse(index, space.key)
            raise
        return space

    def commit(self, index: int, written: Sequence[Reservation]) -> bool:
        """Commit blocks together and make them readable; whether they are."""
        try:
            self.backends[index].commit(*written)
        except (StorageError, OSError) as error:
            for space in written:
                self.abort(index, space.key, error)
            return False
        except BaseException:
            for space in written:
                self._refuse(index, space.key)
            raise
        for space in written:
            self.committed(index, space)
        self.free_again(index)
        return True

    def committed(self, index: int, space: Reservation) -> None:
        """Record that a block was committed."""
        tier = self.stack.tiers[index]
        with self._lock:
            self.stack.end_write(index, space.key)
            tier.counters.stored += 1
            tier.counters.written_bytes += space.size_bytes
            tier.writes.worked()

    def abort(self, index: int, key: bytes, error: Exception) -> None:
        """Remove an entry whose bytes will not come; an error of the device counts against the tier.

        A backend that was full evicts one more block, so that the next one finds space. A suspect block is no
        second failure: the failed sync was counted.
        """
        if not isinstance(error, (StorageFullError, BlockExistsError, SuspectBlockError)):
            with self._lock:
                self.stack.tiers[index].writes.failed(error)
            self.withdraw(index, key)
            return
        self._refuse(index, key)
        if isinstance(error, StorageFullError):
            self.evict_one(index)

    def withdraw(self, index: int, key: bytes) -> None:
        """Remove an entry whose bytes will not come, and free its space."""
        with self._lock:
            commands = self.stack.abort_write(index, key)
        self.carry_out(commands)

    def evict_one(self, index: int) -> bool:
        """Evict one block of a tier; false when all are pinned."""
        with Uninterrupted():
            with self._lock:
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

    def _space(self, index: int, key: bytes, sizes: Sequence[int], position: int) -> Reservation:
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

    def _other_space(self, index: int, entry: Entry[Reservation], space: Reservation) -> Reservation:
        """Free the space of a block, evict another block, and reserve again."""
        with self._lock:
            entry.handle = None
            commands = self.stack.tiers[index].free(space)
        self.carry_out(commands)
        self.evict_one(index)
        entry.handle = self.backends[index].reserve(space.key, space.layer_bytes, position=space.position)
        return entry.handle

    def _take_over(self, index: int, key: bytes, entry: Entry[Reservation], sizes: Sequence[int]) -> bool:
        """Hold a placed block that another client of a shared backend has committed; false where none has."""
        freeing = list(self.stack.tiers[index].freeing)  # before asking: what is freed meanwhile is gone
        try:
            found = next(iter(self.backends[index].find([key])), None)
        except (StorageError, OSError):
            return False
        if found is None or found in freeing or found.layer_bytes != tuple(sizes):
            return False
        with self._lock:
            entry.handle = found
            self.stack.end_write(index, key)
        return True

    def _refuse(self, index: int, key: bytes) -> None:
        with self._lock:
            self.stack.tiers[index].counters.refused += 1
        self.withdraw(index, key)

    def _notify(self, commands: Iterable[Free[Reservation] | Demote]) -> None:
        if any(isinstance(command, Demote) for command in commands):
            self._lock.notify_all()


@final
class BlockWriter:
    """Space for a block in one tier, whose layers come one by one as a prefill computes them.

    When the backend fails the block is aborted, and later calls return false. Mutable.
    """

    __slots__ = ("_index", "_is_open", "_space", "_writer", "tier")

    def __init__(self, writer: TierWriter, index: int, space: Reservation) -> None:
        self._writer = writer
        self._index = index
        self._space = space
        self._is_open = True
        self.tier: str = writer.backends[index].name
        """The tier it goes into."""

    def write(self, layers: Sequence[Buffer], *, first_layer: int) -> bool:
        """Write consecutive layers; whether the block is still open.

        Raises:
            ValueError: when a buffer has not the bytes of its layer.
        """
        if self._is_open:
            with Uninterrupted() as section:
                try:
                    with section.interruptible():
                        self._writer.backends[self._index].write(self._space, layers, first_layer=first_layer)
                except (StorageError, OSError) as error:
                    self._fail(error)
        return self._is_open

    def commit(self) -> bool:
        """Make the block readable; whether it is.

        Raises:
            ValueError: when a layer was not written.
        """
        if not self._is_open:
            return False
        with Uninterrupted():
            try:
                self._writer.backends[self._index].commit(self._space)
            except (StorageError, OSError) as error:
                self._fail(error)
                return False
            self._is_open = False
            self._writer.committed(self._index, self._space)
            self._writer.free_again(self._index)
            return True

    def abandon(self) -> None:
        """Free the space, because the layers will not come; a block that has ended stays as it is."""
        if not self._is_open:
            return
        with Uninterrupted():
            self._is_open = False
            self._writer.withdraw(self._index, self._space.key)

    def _fail(self, error: Exception) -> None:
        self._is_open = False
        self._writer.abort(self._index, self._space.key, error)
