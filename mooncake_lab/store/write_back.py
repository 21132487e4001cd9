"""Write-back: evicted blocks sink into the tier below, and no request waits for it."""

import threading
from collections.abc import Sequence
from typing import Final, final

from mooncake_lab.store.arrivals import Arrivals, free_quietly
from mooncake_lab.store.media import MediumError, Reservation
from mooncake_lab.store.tier import Slot, Tier

_BATCH_BLOCKS: Final = 8
"""Evicted blocks that are written and committed together."""


@final
class WriteBack:
    """The thread between one tier and the next. Mutable: it runs until `stop`.

    Args:
        tiers: the fastest first.
        index: of the upper one of the two.
        books: guards every tier.
        arrivals: brings blocks into the lower one.
    """

    __slots__ = ("_arrivals", "_books", "_index", "_stopping", "_thread", "_tiers", "crash", "moving")

    def __init__(self, tiers: Sequence[Tier], index: int, books: threading.Condition, arrivals: Arrivals) -> None:
        self._tiers = tiers
        self._index = index
        self._books = books
        self._arrivals = arrivals
        self._stopping = False
        self.moving = False
        """Whether a batch is on its way."""
        self.crash: Exception | None = None
        """What ended the thread, if something did that should not happen."""
        self._thread = threading.Thread(target=self._run, name=f"write-back-{index}", daemon=True)
        self._thread.start()

    def is_idle(self) -> bool:
        """Whether nothing waits or moves, or nothing ever will."""
        return self.crash is not None or not (self.moving or self._tiers[self._index].queue)

    def stop(self) -> None:
        """End the thread once nothing waits."""
        with self._books:
            self._stopping = True
            self._books.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._move_down():
                pass
        except Exception as error:  # noqa: BLE001  # handed to whoever flushes or closes
            with self._books:
                self.crash = error
                self._books.notify_all()

    def _move_down(self) -> bool:
        """Carry one batch into the tier below; false when it is time to stop."""
        tier = self._tiers[self._index]
        with self._books:
            self._books.wait_for(lambda: tier.queue or self._stopping)
            if not tier.queue:
                return False
            batch = [tier.queue.popleft() for _ in range(min(_BATCH_BLOCKS, len(tier.queue)))]
            leaving = [tier.leaving[key].reservation for key in batch]
            self.moving = True
        sunk = self._sink(leaving)
        with self._books:
            tier.tally.demoted += sunk
            tier.tally.dropped += len(leaving) - sunk
            unwanted = [tier.left(reservation.key) for reservation in leaving]
        free_quietly(tier, *unwanted)
        with self._books:
            self.moving = False
            self._books.notify_all()
        return True

    def _sink(self, leaving: Sequence[Reservation]) -> int:
        """Write blocks into the tier below and commit them together; how many are there now."""
        above, below = self._tiers[self._index], self._tiers[self._index + 1]
        placed = [
            (old, self._arrivals.place(self._index + 1, old.key, old.layer_bytes, old.position)) for old in leaving
        ]
        written: list[tuple[bytes, Slot, Reservation]] = []
        for old, slot in placed:
            new = self._arrivals.reserve(self._index + 1, old.key, old.layer_bytes, old.position) if slot else None
            if slot is None or new is None:
                continue
            slot.reservation = new
            layers = self._arrivals.read_leaving(above, old)
            if layers is None:
                free_quietly(below, self._arrivals.withdraw(below, old.key))
                continue
            try:
                below.medium.write(new, layers)
            except (MediumError, OSError) as error:
                self._arrivals.give_up(below, old.key, error)
            else:
                written.append((old.key, slot, new))
        try:
            below.medium.commit(*(new for _, _, new in written))
        except (MediumError, OSError) as error:
            for key, _, _ in written:
                self._arrivals.give_up(below, key, error)
            return 0
        for key, slot, _ in written:
            self._arrivals.settle(below, key, slot)
        return len(written)
