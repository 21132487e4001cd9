"""A run in one row: the numbers that comparisons of clusters start from, without numpy and pandas."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import sub
from typing import Any, Literal

from mooncake_lab.core import (
    SLO,
    Arrived,
    CacheChanged,
    DecodeStretch,
    Finished,
    FirstToken,
    Prefilled,
    Record,
    Rejected,
)
from mooncake_lab.core.averages import mean, percentile
from mooncake_lab.metrics.latency import step_ends_s, tbt_of_gaps_s


@dataclass(slots=True, eq=False)
class PrefillTime:
    """Node-seconds of prefill over all instances (FAST'25 Fig. 8). Mutable: it counts.

    A span in which several prompts, or prompts and decodes, are computed together counts once, and so does the
    time in which prompts overlap. Each second counts once per node of the instance.

    Args:
        prefill_group: nodes of each prefill instance, all of which a prefill occupies.
    """

    prefill_group: int = 1
    seconds: float = field(init=False, default=0.0)
    _until_s: dict[str, float] = field(init=False, default_factory=dict)

    def add(self, record: Prefilled) -> None:
        """Count the next span of the log; those of an instance end one after the other."""
        spent_s = record.at_s - max(record.start_s, self._until_s.get(record.instance, 0.0))
        self.seconds += self.prefill_group * spent_s
        self._until_s[record.instance] = record.at_s


def prefill_gpu_s(records: Iterable[Record], prefill_group: int = 1) -> float:
    """The `PrefillTime` of a run's log, whose prefill instances have `prefill_group` nodes each."""
    time = PrefillTime(prefill_group)
    for record in records:
        if isinstance(record, Prefilled):
            time.add(record)
    return time.seconds


def reused_share(records: Iterable[Record]) -> float | None:
    """Prompt tokens that needed no computation, over all of prefills (token hit rate); None without a prefill."""
    reused = computed = 0
    for record in records:
        if isinstance(record, Prefilled):
            reused += record.reused_tokens
            computed += record.computed_tokens
    return reused / (reused + computed) if reused + computed else None


@dataclass(slots=True, eq=False)
class _Received:
    """The tokens that a running request has received so far. Mutable: it grows."""

    ttft_s: float
    first_s: float
    last_s: float
    gaps_s: list[float] = field(default_factory=list[float])

    def tbt_s(self, tbt: Literal["fast", "arxiv"]) -> float | None:
        """TBT by a paper's definition; None for a single token."""
        if tbt == "fast" or not self.gaps_s:
            return tbt_of_gaps_s(self.gaps_s)
        return (self.last_s - self.first_s) / len(self.gaps_s)


@dataclass(slots=True, eq=False)
class RunningSummary:
    """Reads records as they come; its numbers are those of `run_summary`.

    It keeps the latencies of each request that has ended and the token gaps of each request that runs, so that
    memory grows by at most 16 bytes per request and does not grow with the log. Mutable: it counts.

    Args:
        slo: the limits of an effective request.
        tbt: the paper whose definition of the time between tokens is used.
        prefill_group: nodes of each prefill instance, all of which a prefill occupies.
    """

    slo: SLO
    tbt: Literal["fast", "arxiv"] = "fast"
    prefill_group: int = 1
    _arrivals_s: dict[int, float] = field(init=False, default_factory=dict)
    _running: dict[int, _Received] = field(init=False, default_factory=dict)
    _ttfts_s: "array[float]" = field(init=False, default_factory=lambda: array("d"))
    _tbts_s: "array[float]" = field(init=False, default_factory=lambda: array("d"))
    _counts: dict[str, int] = field(init=False)
    _prefill: PrefillTime = field(init=False)
    _now_s: float = field(init=False, default=0.0)
    _learn: dict[type, Callable[[Any], None]] = field(init=False)

    def __post_init__(self) -> None:
        names = ("requests", "finished", "rejected", "effective", "output_tokens", "reused", "computed")
        self._counts = dict.fromkeys(names, 0)
        self._prefill = PrefillTime(self.prefill_group)
        self._learn = {
            Arrived: self._arrived,
            Prefilled: self._prefilled,
            FirstToken: self._first_token,
            DecodeStretch: self._decoded,
            Finished: self._ended,
            Rejected: self._ended,
        }

    def read(self, record: Record) -> None:
        """Learn from the next record of the log."""
        kind = type(record)
        if kind is not CacheChanged:  # an instance may fail after the last request has ended
            self._now_s = record.at_s
        if (learn := self._learn.get(kind)) is not None:
            learn(record)

    def ttfts_s(self) -> list[float]:
        """The time to first token of each request that got one so far, from the shortest."""
        return sorted([*self._ttfts_s, *(received.ttft_s for received in self._running.values())])

    def numbers(self) -> dict[str, float | int | None]:
        """The summary so far, under the names of `run_summary`.

        Raises:
            ValueError: when no request arrived.
        """
        counts = self._counts
        if not counts["requests"]:
            raise ValueError("the summary of 0 requests is undefined; at least 1 is needed")
        running = [received.tbt_s(self.tbt) for received in self._running.values()]
        ttft = self.ttfts_s()
        tbt = sorted([*self._tbts_s, *(tbt_s for tbt_s in running if tbt_s is not None)])
        prompt_tokens = counts["reused"] + counts["computed"]
        return {
            "requests": counts["requests"],
            "finished": counts["finished"],
            "rejected": counts["rejected"],
            "ttft_mean_s": mean(ttft) if ttft else None,
            **{f"ttft_p{p}_s": percentile(ttft, p) if ttft else None for p in (50, 90, 99)},
            "tbt_mean_s": mean(tbt) if tbt else None,
            "tbt_p90_s": percentile(tbt, 90) if tbt else None,
            "effective_request_capacity": counts["effective"] / counts["requests"],
            "token_hit_rate": counts["reused"] / prompt_tokens if prompt_tokens else None,
            "prefill_gpu_s_per_request": self._prefill.seconds / counts["requests"],
            "output_tokens": counts["output_tokens"] + sum(1 + len(r.gaps_s) for r in self._running.values()),
            "simulated_s": self._now_s,
        }

    def _arrived(self, record: Arrived) -> None:
        self._counts["requests"] += 1
        self._arrivals_s[record.request_id] = record.at_s

    def _prefilled(self, record: Prefilled) -> None:
        self._counts["reused"] += record.reused_tokens
        self._counts["computed"] += record.computed_tokens
        self._prefill.add(record)

    def _first_token(self, record: FirstToken) -> None:
        ttft_s = record.at_s - self._arrivals_s[record.request_id]
        self._running[record.request_id] = _Received(ttft_s, record.at_s, record.at_s)

    def _decoded(self, stretch: DecodeStretch) -> None:
        """Add a stretch to each of its requests; its inner gaps are computed once for all of them."""
        ends_s = step_ends_s(stretch)
        first_s, last_s = ends_s[0], ends_s[-1]
        gaps_s, running = list(map(sub, ends_s[1:], ends_s)), self._running
        for request_id in stretch.request_ids:
            if (received := running.get(request_id)) is not None:
                received.gaps_s.append(first_s - received.last_s)
                received.gaps_s += gaps_s
                received.last_s = last_s

    def _ended(self, record: Finished | Rejected) -> None:
        request_id, end = record.request_id, "finished" if isinstance(record, Finished) else "rejected"
        self._counts[end] += 1
        if (received := self._running.pop(request_id, None)) is not None:
            tbt_s = received.tbt_s(self.tbt)
            self._ttfts_s.append(received.ttft_s)
            if tbt_s is not None:
                self._tbts_s.append(tbt_s)
            self._counts["output_tokens"] += 1 + len(received.gaps_s)
            within = received.ttft_s <= self.slo.ttft_s and (tbt_s is None or tbt_s <= self.slo.tbt_s)
            self._counts["effective"] += within and end == "finished"
        self._arrivals_s.pop(request_id, None)


def run_summary(
    records: Iterable[Record], slo: SLO, *, tbt: Literal["fast", "arxiv"] = "fast", prefill_group: int = 1
) -> dict[str, float | int | None]:
    """Counts, latencies and hit rate of a run, by name.

    None stands for what nothing decides: TTFT where no request received a token, TBT where none received two, and
    the hit rate where no prompt was computed or reused.

    Raises:
        ValueError: when no request arrived.
    """
    summary = RunningSummary(slo, tbt, prefill_group)
    for record in records:
        summary.read(record)
    return summary.numbers()
