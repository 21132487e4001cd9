"""Arrivals: how a block gets into a tier, and what becomes of those that leave for it."""

import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import final

import numpy as np

from mooncake_lab.store.media import (
    AlreadyHeldError,
    Buffer,
    DamagedBlockError,
    DramMedium,
    MediumError,
    MediumFullError,
    Reservation,
    check_block,
)
from mooncake_lab.store.tier import Departure, Slot, Tier


@final
class Arrivals:
    """Brings blocks into tiers: a place in the books, room in the medium, the bytes, the commit.

    The books of all tiers are guarded by one condition; devices are only asked outside of it.

    Args:
        tiers: the fastest first.
        books: guards every tier; notified when a block begins or ends its way down.
    """

    __slots__ = ("_books", "_tiers")

    def __init__(self, tiers: Sequence[Tier], books: threading.Condition) -> None:
        self._tiers = tiers
        self._books = books

    def store(self, index: int, key: bytes, sizes: Sequence[int], layers: Sequence[Buffer], position: int) -> bool:
        """Place, reserve, write, commit; whether the tier holds the block now."""
        tier = self._tiers[index]
        with self._books:
            if tier.holds(key):
                if key in tier.blocks:
                    tier.blocks.touch(key)
                return True
        slot = self.place(index, key, sizes, position)
        if slot is None:
            return False
        reservation = self.reserve(index, key, sizes, position)
        if reservation is None:
            return False
        slot.reservation = reservation
        try:
            tier.medium.write(reservation, layers)
            tier.medium.commit(reservation)
        except (MediumError, OSError) as error:
            self.give_up(tier, key, error)
            return False
        self.settle(tier, key, slot)
        return True

    def place(self, index: int, key: bytes, sizes: Sequence[int], position: int) -> Slot | None:
        """A slot in the tier's books, others leaving for it; `None` where there is none to be had."""
        check_block(key, sizes)
        tier = self._tiers[index]
        with self._books:
            if key in tier.blocks or key in tier.leaving or not tier.writes.allows():
                return None
            slot, departures = tier.place(key, sizes, position)
            unwanted = self._send_off(index, departures)
        free_quietly(tier, *unwanted)
        return slot

    def reserve(self, index: int, key: bytes, sizes: Sequence[int], position: int) -> Reservation | None:
        """Room in the medium for a placed block; others leave until a run of bytes is long enough."""
        tier = self._tiers[index]
        while True:
            try:
                return tier.medium.reserve(key, sizes, position=position)
            except MediumFullError:
                if not self.squeeze(index):
                    self._refuse(tier, key)
                    return None
            except AlreadyHeldError:  # another client of a shared medium was faster
                self._refuse(tier, key)
                return None
            except (MediumError, OSError) as error:
                self.give_up(tier, key, error)
                return None

    def squeeze(self, index: int) -> bool:
        """Let one more block leave a tier; false when none can."""
        tier = self._tiers[index]
        with self._books:
            departures = tier.squeeze()
            unwanted = self._send_off(index, departures or [])
        free_quietly(tier, *unwanted)
        return departures is not None

    def settle(self, tier: Tier, key: bytes, slot: Slot) -> None:
        """The block is committed: let it be read."""
        with self._books:
            tier.arrived(key, slot)
            tier.writes.worked()

    def withdraw(self, tier: Tier, key: bytes) -> Reservation | None:
        """Take a placed block out of the books, whoever's fault it is; what is returned is to be freed."""
        with self._books:
            return tier.withdraw(key)

    def read_leaving(self, tier: Tier, block: Reservation) -> Sequence[Buffer] | None:
        """The layers of a departing block, where possible not a copy; `None` where they cannot be had."""
        try:
            if isinstance(tier.medium, DramMedium):
                return tier.medium.layers(block)
            copies = [np.empty(size, np.uint8) for size in block.layer_bytes]
            tier.medium.read_into(block, copies)
        except (MediumError, OSError) as error:
            with self._books:
                if isinstance(error, DamagedBlockError):
                    tier.tally.damaged += 1
                else:
                    tier.reads.failed(error)
            return None
        return copies

    def _refuse(self, tier: Tier, key: bytes) -> None:
        with self._books:
            tier.tally.refused += 1
            unwanted = tier.withdraw(key)
        free_quietly(tier, unwanted)

    def give_up(self, tier: Tier, key: bytes, error: Exception) -> None:
        """Take a block that cannot come out of the books; where the medium failed, think less of the tier."""
        if isinstance(error, (MediumFullError, AlreadyHeldError)):  # some media learn it only when they write
            self._refuse(tier, key)
            return
        with self._books:
            tier.writes.failed(error)
            unwanted = tier.withdraw(key)
        free_quietly(tier, unwanted)

    def _send_off(self, index: int, departures: Iterable[Departure]) -> list[Reservation]:
        """Queue what the tier below lacks; the rest is to be freed now."""
        tier = self._tiers[index]
        below = self._tiers[index + 1] if tier.has_tier_below else None
        unwanted: list[Reservation] = []
        for departure in departures:
            key = departure.reservation.key
            if below is not None and below.holds(key):
                if key in below.blocks:
                    below.blocks.touch(key)
            elif below is not None and tier.enqueue(departure):
                self._books.notify_all()
                continue
            else:
                tier.tally.dropped += below is not None
            unwanted.append(departure.reservation)
        return unwanted


def free_quietly(tier: Tier, *unwanted: Reservation | None) -> None:
    """Free what no one wants; a device that is gone frees nothing, and a block that is gone is free."""
    for reservation in unwanted:
        if reservation is not None:
            with contextlib.suppress(MediumError, OSError):
                tier.medium.free(reservation)
