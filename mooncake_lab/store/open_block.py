"""An open block: its layers come one by one, as a prefill computes them; once committed, it can be read."""

from collections.abc import Sequence
from typing import final

from mooncake_lab.store.arrivals import Arrivals, free_again, free_quietly
from mooncake_lab.store.backends import Buffer, Reservation, StorageError
from mooncake_lab.store.interrupts import Uninterrupted
from mooncake_lab.store.tier import Slot, Tier


@final
class OpenBlock:
    """Room for a block in one tier; the tier's statistics say what became of it.

    A medium that fails takes the block with it: later calls do nothing then, and say so. Mutable: it fills.
    """

    __slots__ = ("_arrivals", "_is_open", "_reservation", "_slot", "_tier")

    def __init__(self, arrivals: Arrivals, tier: Tier, slot: Slot, reservation: Reservation) -> None:
        self._arrivals = arrivals
        self._tier = tier
        self._slot = slot
        self._reservation = reservation
        self._is_open = True

    @property
    def tier(self) -> str:
        """Which tier it goes into."""
        return self._tier.medium.name

    def write(self, layers: Sequence[Buffer], *, first_layer: int) -> bool:
        """Write consecutive layers; whether the block is still open.

        Raises:
            ValueError: when a buffer has not the bytes of its layer.
        """
        if self._is_open:
            with Uninterrupted() as section:
                try:
                    with section.interruptible():
                        self._tier.medium.write(self._reservation, layers, first_layer=first_layer)
                except (StorageError, OSError) as error:
                    self._fail(error)
        return self._is_open

    def commit(self) -> bool:
        """Let the block be read; whether it can be.

        Raises:
            ValueError: when a layer was not written.
        """
        if not self._is_open:
            return False
        with Uninterrupted():
            try:
                self._tier.medium.commit(self._reservation)
            except (StorageError, OSError) as error:
                self._fail(error)
                return False
            self._is_open = False
            self._arrivals.settle(self._tier, self._reservation.key, self._slot)
            free_again(self._tier)
            return True

    def abandon(self) -> None:
        """Give the room back, because the layers will not come; an ended block is left as it is."""
        if not self._is_open:
            return
        with Uninterrupted():
            self._is_open = False
            free_quietly(self._tier, self._arrivals.withdraw(self._tier, self._reservation.key))

    def _fail(self, error: Exception) -> None:
        self._is_open = False
        self._arrivals.give_up(self._tier, self._reservation.key, error)
