"""Reading a block of a tier: borrowed, copied, given back, and what the outcome says of block and device."""

import threading
import time
from collections.abc import Sequence

from mooncake_lab.store.arrivals import free_quietly
from mooncake_lab.store.backends import BlockNotFoundError, Buffer, DamagedBlockError, Reservation, StorageError
from mooncake_lab.store.health import failed_checksum, may_be_one_sector
from mooncake_lab.store.interrupts import Uninterrupted
from mooncake_lab.store.tier import Tier


def deliver(
    books: threading.Condition, tier: Tier, key: bytes, buffers: Sequence[Buffer], first_layer: int
) -> Reservation | None:
    """Borrow a block, read it and give it back; `None` where it could not be read as it was written."""
    trouble: BaseException | None = None
    started_s = time.perf_counter()
    with Uninterrupted() as section:
        lent = _borrow(books, tier, key)
        if lent is None:
            return None
        try:
            with section.interruptible():
                tier.medium.read_into(lent, buffers, first_layer=first_layer)
        except BaseException as error:  # noqa: BLE001  # what is not the medium's fault is raised again below
            trouble = error
        seconds = time.perf_counter() - started_s
        _note(books, tier, key, lent, len(buffers), first_layer, trouble, seconds)
    if trouble is not None and not isinstance(trouble, (StorageError, OSError)):
        raise trouble
    return lent if trouble is None else None


def _note(
    books: threading.Condition,
    tier: Tier,
    key: bytes,
    lent: Reservation,
    layers: int,
    first_layer: int,
    trouble: BaseException | None,
    seconds: float,
) -> None:
    """Give back what was read; a block that is not what was written is dropped, a device that fails is not."""
    is_gone = isinstance(trouble, (DamagedBlockError, BlockNotFoundError))
    with books:
        failed_before = may_be_one_sector(trouble, is_shared=tier.is_shared) and tier.read(key, lent, failed=True)
        is_bad = failed_before and failed_checksum(trouble)
        unwanted = tier.give_back(key, lent, damaged=is_gone or is_bad)
        if trouble is None:
            tier.tally.hits += 1
            tier.tally.read_bytes += sum(lent.layer_bytes[first_layer : first_layer + layers])
            tier.tally.read_s += seconds
            tier.reads.worked()
            if layers == len(lent.layer_bytes):
                tier.read(key, lent, failed=False)
        elif isinstance(trouble, (StorageError, OSError)):
            tier.tally.misses += 1
            tier.tally.damaged += is_bad or isinstance(trouble, DamagedBlockError)
            if not (is_gone or failed_before):  # a block that failed before says nothing new of its device
                tier.reads.failed(trouble)
    free_quietly(tier, unwanted)


def _borrow(books: threading.Condition, tier: Tier, key: bytes) -> Reservation | None:
    with books:
        lent = tier.borrow(key) if tier.holds(key) and tier.reads.allows() else None
        if lent is None:
            tier.tally.misses += 1
        return lent
