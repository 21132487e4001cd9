"""How fast may a trace be replayed before too many requests miss their limits? A goodput search by bisection."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mooncake_lab.experiments.endtoend import LIMITS_MS, EndToEnd, SystemName
from mooncake_lab.metrics import highest_passing


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The highest replay speed at which a share of requests keeps TTFT and TBT limits, at three TBT limits."""

    workload: str = "conversation"
    system: SystemName = "mooncake"
    attained: float = 0.9
    """Share of requests that must be effective."""
    slowest: float = 0.05
    fastest: float = 8.0
    relative_tolerance: float = 0.1
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a TBT limit: the speed, requests a second at that speed, and how many runs the search took."""
        seen: dict[float, dict[str, Any]] = {}
        for limit_ms in LIMITS_MS:
            speed = highest_passing(
                lambda speed, column=f"capacity_{limit_ms}_ms": self._at(speed, seen)[column] >= self.attained,
                self.slowest,
                self.fastest,
                relative_tolerance=self.relative_tolerance,
            )
            run = seen[min(seen)]
            yield {
                "tbt_limit_ms": limit_ms,
                "speed": speed or 0.0,
                "requests_per_s": (speed or 0.0) * run["trace_requests_per_s"],
                "runs": len(seen),
                "source": run["source"],
            }

    def _at(self, speed: float, seen: dict[float, dict[str, Any]]) -> dict[str, Any]:
        """The run at a speed; three searches share what they look at."""
        if speed not in seen:
            (seen[speed],) = EndToEnd(
                workload=self.workload,
                system=self.system,
                first=self.first,
                seed=self.seed,
                speed=speed,
            ).rows()
        return seen[speed]
