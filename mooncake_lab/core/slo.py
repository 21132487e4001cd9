"""Service level objectives."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SLO:
    """The latency limits a request must meet to count as effective (FAST'25 §5.1: 30 s and 0.1, 0.2, 0.3 s).

    Raises:
        ValueError: when a limit is not a positive number of seconds; `math.inf` means no limit.
    """

    ttft_s: float = 30.0
    """Longest allowed time to first token (s)."""
    tbt_s: float = 0.1
    """Longest allowed time between tokens (s)."""

    def __post_init__(self) -> None:
        for name, value in (("ttft_s", self.ttft_s), ("tbt_s", self.tbt_s)):
            if math.isnan(value) or value <= 0:
                raise ValueError(f"SLO.{name} is {value!r}; it must be a positive number of seconds")

    def met_by(self, *, ttft_s: float, tbt_s: float) -> bool:
        """Whether a request with these latencies is effective."""
        return ttft_s <= self.ttft_s and tbt_s <= self.tbt_s
