"""What only a simulated cluster has: instances that fail at set times, old views, and clients of a trace."""

from dataclasses import dataclass
from math import isfinite
from typing import Final

from mooncake_lab.cluster import CoupledPool
from mooncake_lab.core import TracedRequest

DEFAULT_MAX_TOKENS: Final = 2000
"""What a client that states no max_tokens is taken to allow (assumption B52)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance fails and loses all KVCache that it holds. Its requests are placed again.

    Raises:
        ValueError: when the time is negative or not finite.
    """

    instance: str
    at_s: float

    def __post_init__(self) -> None:
        if not (isfinite(self.at_s) and self.at_s >= 0):
            raise ValueError(f"{self.instance!r} should fail at {self.at_s!r} s; allowed are finite times from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """How a cluster is simulated.

    Raises:
        ValueError: when views would be of the future, or a default is not positive.
    """

    failures: tuple[Failure, ...] = ()
    view_age_s: float = 0.0
    """How old the loads may be on which the Conductor decides; 0 is always the present."""
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    """What a request that states no max_tokens is taken to allow, or the smallest doubling of it that its recorded
    answer fits into. Policies that reserve for the worst case reserve prompt and max_tokens."""
    keep_decisions: bool = False
    """Whether `Cluster.decisions` has every decision, with the view that it was made on."""

    def __post_init__(self) -> None:
        if not (isfinite(self.view_age_s) and self.view_age_s >= 0):
            raise ValueError(
                f"SimulationOptions.view_age_s is {self.view_age_s!r}; allowed are finite times from 0"
            )
        if self.default_max_tokens < 1:
            raise ValueError(
                f"SimulationOptions.default_max_tokens is {self.default_max_tokens!r}; at least 1 is needed"
            )

    def max_tokens_of(self, pool: CoupledPool, traced: TracedRequest) -> int:
        """The most tokens of an answer; a default leaves room for the prompt, as servers' defaults do."""
        most = traced.max_tokens_or(self.default_max_tokens)
        if traced.request.max_tokens is None:
            longest = min(pool.max_request_tokens, pool.device_tokens)
            most = max(1, min(most, longest - traced.request.input_tokens + 1))
        return most
