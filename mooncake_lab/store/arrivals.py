"""Arrivals: how a block gets into a tier, and what becomes of those that leave for it."""

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import final

from mooncake_lab.store.backends import (
    BlockExistsError,
    BlockNotFoundError,
    Buffer,
    DamagedBlockError,
    Reservation,
    StorageError,
    StorageFullError,
    SuspectBlockError,
)
from mooncake_lab.store.backends.base import check_block
from mooncake_lab.store.interrupts import Uninterrupted
from mooncake_lab.store.tier import Departure, Slot, Tier


@final
class Arrivals:
    """Brings blocks into tiers: a place in the books, room in the medium, the bytes, the commit.

    The books of all tiers are guarded by one condition; devices are only asked outside of it. Whatever ends an
    arrival early takes the block out of the books and gives its room back, errors that are raised included. In
    the main thread callers hold Ctrl-C off with `Uninterrupted`, from the place to the commit.

    Args:
        tiers: the fastest first.
        books: guards every tier; notified when a block begins or ends its way down.
    """

    __slots__ = ("_books", "_tiers")

    def __init__(self, tiers: Sequence[Tier], books: threading.Condition) -> None:
        self._tiers = tiers
        self._books = books

    def store(self, index: int, key: bytes, sizes: Sequence[int], layers: Sequence[Buffer], position: int) -> bool:
        """Place, reserve, write, commit; whether the tier holds the block now.

        Raises:
            ValueError: when the key or the layers are out of bounds, or media cannot copy such memory.
        """
        tier = self._tiers[index]
        with Uninterrupted() as section:
            with self._books:
                if tier.holds(key) and not tier.doubts(key):
                    if key in tier.blocks:
                        tier.blocks.touch(key)
                    return True
            slot = self.place(index, key, sizes, position)
            if slot is None:
                return False
            room = self.reserve(index, key, slot, sizes, position)
            if room is None:
                return slot.ready
            room = self.write(index, slot, room, layers, section)
            return room is not None and self.commit(index, [(slot, room)])

    def place(self, index: int, key: bytes, sizes: Sequence[int], position: int) -> Slot | None:
        """A slot in the tier's books, others leaving for it; `None` where there is none to be had.

        A block that could not be read makes way for the same block, since its bytes are at hand now.
        """
        check_block(key, sizes)
        tier = self._tiers[index]
        with self._books:
            is_stale = tier.doubts(key)
            if (key in tier.blocks and not is_stale) or key in tier.leaving or not tier.writes.allows():
                return None
            stale = tier.let_go(tier.blocks.remove(key).payload.reservation) if is_stale else None
            slot, departures = tier.place(key, sizes, position)
            unwanted = self._send_off(index, departures)
        free_quietly(tier, stale, *unwanted)
        return slot

    def reserve(
        self, index: int, key: bytes, slot: Slot, sizes: Sequence[int], position: int
    ) -> Reservation | None:
        """Room in the medium for a placed block; `None` where there is nothing to write into.

        The tier holds the block then, by another client of a shared medium that was faster, and its slot is ready;
        or it was refused.
        """
        tier = self._tiers[index]
        try:
            slot.reservation = self._room(index, key, sizes, position)
        except BlockExistsError as error:
            if not self._take_over(tier, key, slot, sizes):
                self.give_up(tier, key, error)
            return None
        except StorageFullError:
            self._refuse(tier, key)
            return None
        except (StorageError, OSError) as error:
            self.give_up(tier, key, error)
            return None
        except BaseException:
            self._refuse(tier, key)
            raise
        return slot.reservation

    def write(
        self, index: int, slot: Slot, room: Reservation, layers: Sequence[Buffer], section: Uninterrupted
    ) -> Reservation | None:
        """Write a block into its room; where it lies now, `None` where it was given up.

        A medium that learns only now that it is full gets a second chance, after one more block has left. Ctrl-C
        ends the copy, and no other part of `section`.
        """
        tier = self._tiers[index]
        try:
            try:
                with section.interruptible():
                    tier.medium.write(room, layers)
            except StorageFullError:
                room = self._other_room(index, slot, room)
                with section.interruptible():
                    tier.medium.write(room, layers)
        except (StorageError, OSError) as error:
            self.give_up(tier, room.key, error)
            return None
        except BaseException:
            self._refuse(tier, room.key)
            raise
        return room

    def commit(self, index: int, written: Sequence[tuple[Slot, Reservation]]) -> bool:
        """Commit blocks together and let them be read; whether they can be."""
        tier = self._tiers[index]
        try:
            tier.medium.commit(*(room for _, room in written))
        except (StorageError, OSError) as error:
            for _, room in written:
                self.give_up(tier, room.key, error)
            return False
        except BaseException:
            for _, room in written:
                self._refuse(tier, room.key)
            raise
        for slot, room in written:
            self.settle(tier, room.key, slot)
        free_again(tier)
        return True

    def squeeze(self, index: int) -> bool:
        """Let one more block leave a tier; false when none can."""
        tier = self._tiers[index]
        with Uninterrupted():
            with self._books:
                departures = tier.squeeze()
                unwanted = self._send_off(index, departures or [])
            free_quietly(tier, *unwanted)
            return departures is not None

    def settle(self, tier: Tier, key: bytes, slot: Slot) -> None:
        """The block is committed: let it be read."""
        with self._books:
            tier.arrived(key, slot)
            tier.tally.stored += 1
            tier.tally.written_bytes += slot.reservation.size_bytes if slot.reservation else 0
            tier.writes.worked()

    def withdraw(self, tier: Tier, key: bytes) -> Reservation | None:
        """Take a placed block out of the books, whoever's fault it is; what is returned is to be freed."""
        with self._books:
            return tier.withdraw(key)

    def read_leaving(self, tier: Tier, block: Reservation) -> Sequence[Buffer] | None:
        """The layers of a departing block, where possible not a copy; `None` where they cannot be had."""
        try:
            return tier.medium.read(block, 0, len(block.layer_bytes))
        except (StorageError, OSError) as error:
            with self._books:
                if isinstance(error, DamagedBlockError):
                    tier.tally.damaged += 1
                else:
                    tier.reads.failed(error)
            return None

    def give_up(self, tier: Tier, key: bytes, error: Exception) -> None:
        """Take a block that cannot come out of the books; where the medium failed, think less of the tier.

        Where it is full and said so late, one more block leaves, so that the next one finds room. A doubtful block
        is no second failure: the tier was told of the first.
        """
        if not isinstance(error, (StorageFullError, BlockExistsError, SuspectBlockError)):
            with self._books:
                tier.writes.failed(error)
                unwanted = tier.withdraw(key)
            free_quietly(tier, unwanted)
            return
        self._refuse(tier, key)
        if isinstance(error, StorageFullError):
            self.squeeze(self._tiers.index(tier))

    def _room(self, index: int, key: bytes, sizes: Sequence[int], position: int) -> Reservation:
        """Reserve; what should be free already is freed first, then others leave until a run is long enough."""
        tier = self._tiers[index]
        while True:
            try:
                return tier.medium.reserve(key, sizes, position=position)
            except (StorageFullError, BlockExistsError) as error:
                if free_again(tier):
                    continue
                stuck = sum(list(tier.going.values()))
                if isinstance(error, BlockExistsError) or not self.squeeze(index):
                    raise
                if sum(list(tier.going.values())) > stuck:
                    raise  # what left could not be freed: others would leave for nothing

    def _other_room(self, index: int, slot: Slot, room: Reservation) -> Reservation:
        """Give the room of a block back, let another block leave, and reserve anew."""
        tier = self._tiers[index]
        with self._books:
            slot.reservation = None
            tier.let_go(room)
        free_quietly(tier, room)
        self.squeeze(index)
        slot.reservation = tier.medium.reserve(room.key, room.layer_bytes, position=room.position)
        return slot.reservation

    def _take_over(self, tier: Tier, key: bytes, slot: Slot, sizes: Sequence[int]) -> bool:
        """Hold a placed block that another client of a shared medium has committed; false where none has."""
        going = list(tier.going)  # before asking: what is freed meanwhile must not be believed
        try:
            found = next((block for block in tier.medium.blocks() if block.key == key), None)
        except (StorageError, OSError):
            return False
        if found is None or found in going or found.layer_bytes != tuple(sizes):
            return False
        with self._books:
            slot.reservation = found
            tier.arrived(key, slot)
        return True

    def _refuse(self, tier: Tier, key: bytes) -> None:
        with self._books:
            tier.tally.refused += 1
            unwanted = tier.withdraw(key)
        free_quietly(tier, unwanted)

    def _send_off(self, index: int, departures: Iterable[Departure]) -> list[Reservation]:
        """Queue what the tier below lacks, or could not read; the rest is to be freed now."""
        tier = self._tiers[index]
        below = self._tiers[index + 1] if tier.has_tier_below else None
        unwanted: list[Reservation] = []
        for departure in departures:
            key = departure.reservation.key
            if below is not None and below.holds(key) and not below.doubts(key):
                if key in below.blocks:
                    below.blocks.touch(key)
            elif below is not None and tier.enqueue(departure):
                self._books.notify_all()
                continue
            else:
                tier.tally.dropped += below is not None
            tier.let_go(departure.reservation)
            unwanted.append(departure.reservation)
        return unwanted


def free_quietly(tier: Tier, *unwanted: Reservation | None) -> None:
    """Free what no one wants; what is gone is free, and what cannot be freed now is left to `free_again`."""
    for reservation in unwanted:
        if reservation is None:
            continue
        try:
            with contextlib.suppress(BlockNotFoundError):
                tier.medium.free(reservation)
        except (StorageError, OSError):
            tier.going.pop(reservation, None)
            tier.going[reservation] = True  # behind all others, which may be luckier
        else:
            tier.going.pop(reservation, None)


def free_again(tier: Tier) -> bool:
    """Free what could not be freed before; whether something was. It ends with the first that fails once more."""
    failed = [reservation for reservation, has_failed in list(tier.going.items()) if has_failed]
    for count, reservation in enumerate(failed):
        free_quietly(tier, reservation)
        if reservation in tier.going:
            return count > 0
    return bool(failed)
