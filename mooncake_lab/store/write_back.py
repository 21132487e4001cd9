"""Write-back: evicted blocks sink into the tier below, and no request waits for it."""

import logging
import threading
from collections.abc import Sequence
from typing import Final, final

from mooncake_lab.store.arrivals import Arrivals, free_quietly
from mooncake_lab.store.backends import Reservation
from mooncake_lab.store.interrupts import Uninterrupted
from mooncake_lab.store.tier import Slot, Tier

_LOG: Final = logging.getLogger("mooncake_lab.store")
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
        self._sink(leaving)
        with self._books:
            below = self._tiers[self._index + 1]
            sunk = sum(below.holds(block.key) and not below.doubts(block.key) for block in leaving)
            tier.tally.demoted += sunk
            tier.tally.dropped += len(leaving) - sunk
            unwanted = [tier.left(reservation.key) for reservation in leaving]
        free_quietly(tier, *unwanted)
        with self._books:
            self.moving = False
            self._books.notify_all()
        return True

    def _sink(self, leaving: Sequence[Reservation]) -> None:
        """Write blocks into the tier below and commit them together; what goes wrong with one ends that one."""
        below = self._tiers[self._index + 1].medium.name
        written: list[tuple[Slot, Reservation]] = []
        for old in leaving:
            try:
                written += self._write(old)
            except Exception:  # noqa: BLE001  # one block less; the thread has others to carry
                _LOG.exception("block %s is given up on its way into %s", old.key.hex(), below)
        if not written:
            return  # nothing to commit, and the device may be one that does not answer
        try:
            self._arrivals.commit(self._index + 1, written)
        except Exception:  # noqa: BLE001  # a batch less
            _LOG.exception("%d blocks are given up on their way into %s", len(written), below)

    def _write(self, old: Reservation) -> list[tuple[Slot, Reservation]]:
        """The block in the tier below, to be committed; nothing where it cannot go there, or is there already."""
        index, arrivals = self._index + 1, self._arrivals
        slot = arrivals.place(index, old.key, old.layer_bytes, old.position)
        room = arrivals.reserve(index, old.key, slot, old.layer_bytes, old.position) if slot else None
        if slot is None or room is None:
            return []
        layers = None
        try:
            layers = arrivals.read_leaving(self._tiers[self._index], old)
        finally:
            if layers is None:
                free_quietly(self._tiers[index], arrivals.withdraw(self._tiers[index], old.key))
        if layers is None:
            return []
        room = arrivals.write(index, slot, room, layers, Uninterrupted())
        return [] if room is None else [(slot, room)]
