"""Write-back: a thread demotes evicted blocks, so that no request waits for it."""

import logging
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Final, final

from mooncake_lab.store.backends import Buffer, DamagedBlockError, Reservation, StorageError
from mooncake_lab.store.interrupts import Uninterrupted
from mooncake_lab.store.tier_writer import TierWriter

_LOG: Final = logging.getLogger("mooncake_lab.store")
_BATCH_BLOCKS: Final = 8
"""Evicted blocks that are written and committed together."""


@final
class WriteBack:
    """The thread that demotes evicted blocks of one tier, so that no request waits for it. Mutable.

    Args:
        writer: writes into the tier below.
        index: of the tier that evicts.
        lock: guards the stack.
    """

    __slots__ = ("_index", "_is_moving", "_lock", "_stopping", "_thread", "_tier", "_writer", "crash")

    def __init__(self, writer: TierWriter, index: int, lock: threading.Condition) -> None:
        self._writer = writer
        self._index = index
        self._tier = writer.stack.tiers[index]
        self._lock = lock
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
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._demote_batch():
                pass
        except Exception as error:  # noqa: BLE001  # raised by `flush` and `close`
            with self._lock:
                self.crash = error
                self._lock.notify_all()

    def _demote_batch(self) -> bool:
        """Write one batch into the tier below; false when it is time to stop."""
        tier = self._tier
        with self._lock:
            self._lock.wait_for(lambda: tier.queue or self._stopping)
            if not tier.queue:
                return False
            batch = [tier.queue.popleft() for _ in range(min(_BATCH_BLOCKS, len(tier.queue)))]
            leaving = [tier.pending[key].handle for key in batch]
            self._is_moving = True
        self._write_batch(leaving)
        with self._lock:
            ended = [self._writer.stack.end_demotion(self._index, block.key) for block in leaving]
            commands = list(chain.from_iterable(ended))
        self._writer.carry_out(commands)
        with self._lock:
            self._is_moving = False
            self._lock.notify_all()
        return True

    def _write_batch(self, leaving: Sequence[Reservation]) -> None:
        """Write blocks into the tier below and commit them together; an error ends only the block it concerns."""
        below = self._writer.backends[self._index + 1].name
        written: list[Reservation] = []
        for block in leaving:
            try:
                written += self._write(block)
            except Exception:  # noqa: BLE001  # one block less; the thread has others to demote
                _LOG.exception("block %s is given up on its way into %s", block.key.hex(), below)
        if not written:
            return  # nothing to commit, and the device may not answer
        try:
            self._writer.commit(self._index + 1, written)
        except Exception:  # noqa: BLE001  # a batch less
            _LOG.exception("%d blocks are given up on their way into %s", len(written), below)

    def _write(self, block: Reservation) -> list[Reservation]:
        """The block in the tier below, to be committed; nothing where that tier has it or does not take it."""
        index, writer = self._index + 1, self._writer
        entry = writer.place(index, block.key, block.layer_bytes, block.position)
        space = writer.reserve(index, block.key, entry, block.layer_bytes, block.position) if entry else None
        if entry is None or space is None:
            return []
        layers = None
        try:
            layers = self._read(block)
        finally:
            if layers is None:
                writer.withdraw(index, block.key)
        space = None if layers is None else writer.write(index, entry, space, layers, Uninterrupted())
        return [] if space is None else [space]

    def _read(self, block: Reservation) -> Sequence[Buffer] | None:
        """The layers of a leaving block; `None` where they cannot be read."""
        try:
            return self._writer.backends[self._index].read(block, 0, len(block.layer_bytes))
        except (StorageError, OSError) as error:
            with self._lock:
                if isinstance(error, DamagedBlockError):
                    self._tier.counters.damaged += 1
                else:
                    self._tier.reads.failed(error)
            return None
