"""How fast may a trace be replayed before too many requests miss their limits? A goodput search by bisection."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mooncake_lab.chapters.endtoend.experiment import LIMITS_MS, EndToEnd, SystemName
from mooncake_lab.metrics import highest_passing


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The highest replay speed at which a share of requests keeps TTFT and TBT limits, at three TBT limits."""

    workload: str = "conversation"
    system: SystemName = "mooncake"
    prefill_nodes: int = 8
    decode_nodes: int = 8
    attained: float = 0.9
    """Share of requests that must be effective."""
    slowest: float = 0.25
    fastest: float = 4.0
    relative_tolerance: float = 0.1
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per TBT limit: the speed found, its rate, and how much above the capacity it may be."""
        seen: dict[float, dict[str, Any]] = {}
        for limit_ms in LIMITS_MS:
            speed = highest_passing(
                lambda speed, column=f"capacity_{limit_ms}_ms": self._at(speed, seen)[column] >= self.attained,
                self.slowest,
                self.fastest,
                relative_tolerance=self.relative_tolerance,
            )
            run = seen[speed or self.slowest]
            rate = (speed or 0.0) * run["trace_requests_per_s"]
            lasts_s = run["requests"] / rate if rate else float("nan")
            yield {
                "tbt_limit_ms": limit_ms,
                "speed": speed or 0.0,
                "requests_per_s": rate,
                "lasts_s": lasts_s,
                "hidden_overload": hidden_overload(lasts_s, run["ttft_limit_s"], self.attained),
                "prefill_gpu_s": run["prefill_gpu_s"],
                "runs": len(seen),
                "source": run["source"],
            }

    def _at(self, speed: float, seen: dict[float, dict[str, Any]]) -> dict[str, Any]:
        """The run at a speed; three searches share what they look at."""
        if speed not in seen:
            point = EndToEnd(
                workload=self.workload,
                system=self.system,
                prefill_nodes=self.prefill_nodes,
                decode_nodes=self.decode_nodes,
                first=self.first,
                seed=self.seed,
                speed=speed,
            )
            (row,) = point.rows()
            seen[speed] = {**row, "ttft_limit_s": point.ttft_limit_s}
        return seen[speed]


def hidden_overload(lasts_s: float, ttft_limit_s: float, attained: float) -> float:
    """By what share a rate may exceed what a cluster sustains and still pass, because the arrivals end too soon.

    At (1 + e) times the sustained rate, a request that arrives after t seconds waits e t. It misses a limit L when
    t > L / e. Of arrivals that last D seconds at most the share 1 - a may miss it as long as e <= L / (a D).
    """
    return ttft_limit_s / (attained * lasts_s)
