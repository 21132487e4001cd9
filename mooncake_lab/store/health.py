"""The state of one tier's device: what was counted, and whether to use it now."""

import logging
from dataclasses import dataclass
from typing import Final, final

_RETRY_EVERY: Final = 16
_LOG: Final = logging.getLogger("mooncake_lab.store")


@dataclass(slots=True, kw_only=True)
class Counters:
    """What a tier did so far. Mutable."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    """Blocks that left to make space; in a shared store, which evicts by itself, those found to be gone."""
    demoted: int = 0
    """Evicted blocks that reached the tier below."""
    dropped: int = 0
    """Evicted blocks that did not: the queue was full, or the tier below refused them."""
    promoted: int = 0
    """Blocks read here that were put into the first tier."""
    refused: int = 0
    damaged: int = 0
    """Blocks that were not what was written, or for which the device reported that twice; each was dropped."""
    read_bytes: int = 0
    read_s: float = 0.0
    """Time spent in successful reads."""
    written_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class TierStatistics(Counters):
    """What a tier did so far, and its state."""

    name: str
    capacity_bytes: int
    used_bytes: int
    queued_bytes: int
    """Evicted bytes on their way to the tier below."""
    blocks: int
    read_errors: int
    write_errors: int
    degraded: str | None
    """Why reading or writing is degraded; `None` while all is well."""


@final
class CircuitBreaker:
    """Guards one direction (reading or writing) of one tier. Mutable: it remembers failures.

    After `patience` failures in a row the direction is degraded: only every 16th operation is tried,
    until one succeeds. It has no clock; it counts operations.
    """

    def __init__(self, what: str, *, patience: int) -> None:
        self._what = what
        self._patience = patience
        self._failures = 0  # in a row
        self._refused = 0  # since the last attempt
        self.errors: int = 0
        """Failures so far."""
        self.reason: str | None = None
        """Why it is degraded; `None` while it is not."""

    def allows(self) -> bool:
        """Whether to try now. Counts the question: ask once per operation."""
        if self.reason is None:
            return True
        self._refused += 1
        if self._refused < _RETRY_EVERY:
            return False
        self._refused = 0
        return True

    def failed(self, error: Exception) -> None:
        """Record a failure."""
        self.errors += 1
        self._failures += 1
        if self._failures >= self._patience and self.reason is None:
            self.reason = f"{type(error).__name__}: {error}"
            _LOG.warning("%s is degraded: %s", self._what, self.reason)

    def worked(self) -> None:
        """Record a success, which ends a degradation."""
        self._failures = 0
        if self.reason is not None:
            _LOG.warning("%s works again; it was degraded: %s", self._what, self.reason)
            self.reason = None
            self._refused = 0
