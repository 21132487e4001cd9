"""What a tier did so far: its counters, and the summary of them that callers get."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """What a tier did so far, and how it is."""

    name: str
    capacity_bytes: int
    used_bytes: int
    queued_bytes: int
    blocks: int
    hits: int
    misses: int
    stored: int
    evicted: int
    demoted: int
    """Evicted blocks that reached the tier below."""
    dropped: int
    """Evicted blocks that were given up: the queue was full, or the tier below refused them."""
    promoted: int
    """Blocks read here that were put into the first tier."""
    refused: int
    damaged: int
    """Blocks that were not what was written, or of which the device said so twice; each was dropped."""
    read_errors: int
    write_errors: int
    read_bytes: int
    read_s: float
    """Time spent in successful reads."""
    written_bytes: int
    degraded: str | None
    """Why reading or writing is degraded; `None` while all is well."""


@dataclass(slots=True)
class Tally:
    """The counters behind `TierStatistics`. Mutable: they count."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    demoted: int = 0
    dropped: int = 0
    promoted: int = 0
    refused: int = 0
    damaged: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    written_bytes: int = 0
