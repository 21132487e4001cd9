"""The decisions of the Conductor: values that a runtime can act on, each with its reason."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Serve this request here."""

    request_id: int
    prefill: str
    """Name of the prefill instance."""
    decode: str
    """Name of the decode instance."""
    reused_tokens: int
    """Prefix tokens that need no computation, fetched ones included."""
    fetch_from: str | None = None
    """The prefill instance to copy missing prefix blocks from; the copy stays (hot-block replication)."""
    fetched_tokens: int = 0
    """Prefix tokens to copy from there."""
    expected_ttft_s: float
    """The Conductor's estimate of the time to first token (s)."""
    expected_tbt_s: float
    """Its estimate of the time between tokens on the decode instance (s); infinite if the KVCache does not fit."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Do not serve this request (HTTP 429)."""

    request_id: int
    stage: str
    """Where it was refused: `capacity` if it cannot fit, `admission` on arrival, `decode` after prefill."""
    reason: str


Decision: TypeAlias = Placement | Rejection
"""A placement, or a rejection."""
