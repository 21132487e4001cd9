"""Which blocks a failed sync made doubtful: the next one says nothing of pages that are lost."""

from typing import final

from mooncake_lab.store.media.medium import DoubtfulBlockError, Reservation


@final
class Doubts:
    """What had begun to be written when a sync failed. Mutable: it counts; whoever calls it holds a lock."""

    __slots__ = ("_lost", "_lost_before", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._lost = 0
        self._lost_before: dict[Reservation, int] = {}  # the first write of an open reservation

    def begin(self, reservation: Reservation) -> None:
        """The reservation is about to be written, for the first time or again."""
        self._lost_before.setdefault(reservation, self._lost)

    def lost(self) -> None:
        """A sync failed."""
        self._lost += 1

    def refuse(self, *reservations: Reservation) -> None:
        """Let only those pass that began after the last failure.

        Raises:
            DoubtfulBlockError: naming the first other one.
        """
        for reservation in reservations:
            if self._lost_before[reservation] < self._lost:
                raise DoubtfulBlockError(
                    f"{self._name} could not sync after block {reservation.key.hex()} had begun to be written;"
                    " free it and write it anew"
                )

    def forget(self, reservation: Reservation) -> None:
        """The reservation was committed or freed."""
        self._lost_before.pop(reservation, None)

    def __len__(self) -> int:
        return len(self._lost_before)
