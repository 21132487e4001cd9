"""A run in one row while it runs: `run_summary` for a log that nobody keeps."""

from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

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
from mooncake_lab.metrics.latency import tbt_longest_gaps_s, tbt_mean_gap_s
from mooncake_lab.metrics.summary import PrefillTime
from mooncake_lab.metrics.tokens import step_ends_s


@dataclass(slots=True, eq=False)
class RunningSummary:
    """Reads records as they come, and has the numbers of `run_summary` at the end.

    Of a request that has ended it keeps two numbers, of one that runs the times of its tokens; so memory grows by
    16 bytes a request, and not with the log. Mutable: it counts.

    Args:
        slo: the limits of an effective request.
        tbt: whose definition of the time between tokens.
        prefill_group: nodes of each prefill instance, all of which a prefill occupies.
    """

    slo: SLO
    tbt: Literal["fast", "arxiv"] = "fast"
    prefill_group: int = 1
    _arrivals_s: dict[int, float] = field(init=False, default_factory=dict)
    _tokens: defaultdict[int, list[npt.NDArray[np.float64]]] = field(
        init=False, default_factory=lambda: defaultdict(list)
    )
    _first_s: dict[int, float] = field(init=False, default_factory=dict)
    _ttfts_s: "array[float]" = field(init=False, default_factory=lambda: array("d"))
    _tbts_s: "array[float]" = field(init=False, default_factory=lambda: array("d"))
    _counts: dict[str, int] = field(init=False)
    _prefill: PrefillTime = field(init=False)
    _now_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        names = ("requests", "finished", "rejected", "effective", "output_tokens", "reused", "computed")
        self._counts = dict.fromkeys(names, 0)
        self._prefill = PrefillTime(self.prefill_group)

    def read(self, record: Record) -> None:
        """Learn from the next record of the log."""
        if type(record) is not CacheChanged:  # a node may die when all is served
            self._now_s = record.at_s
        match record:
            case DecodeStretch():
                ends, tokens = step_ends_s(record), self._tokens
                for request_id in record.request_ids:
                    tokens[request_id].append(ends)
            case Arrived():
                self._counts["requests"] += 1
                self._arrivals_s[record.request_id] = record.at_s
            case Prefilled():
                self._counts["reused"] += record.reused_tokens
                self._counts["computed"] += record.computed_tokens
                self._prefill.add(record)
            case FirstToken():
                self._first_s[record.request_id] = record.at_s - self._arrivals_s[record.request_id]
                self._tokens[record.request_id].append(np.array([record.at_s]))
            case Finished() | Rejected():
                self._ended(record.request_id, "finished" if isinstance(record, Finished) else "rejected")
            case _:
                pass

    def numbers(self) -> dict[str, float | int | None]:
        """The summary so far, under the names of `run_summary`.

        Raises:
            ValueError: when no request arrived.
        """
        counts = self._counts
        if not counts["requests"]:
            raise ValueError("the summary of 0 requests is undefined; at least 1 is needed")
        running = [self._latencies(request_id) for request_id in self._first_s]
        ttft = np.concatenate([self._ttfts_s, [row[0] for row in running]])
        gap = np.concatenate([self._tbts_s, [row[1] for row in running]])
        prompt_tokens = counts["reused"] + counts["computed"]
        return {
            "requests": counts["requests"],
            "finished": counts["finished"],
            "rejected": counts["rejected"],
            "ttft_mean_s": float(ttft.mean()) if ttft.size else None,
            **{f"ttft_p{p}_s": float(np.percentile(ttft, p)) if ttft.size else None for p in (50, 90, 99)},
            "tbt_mean_s": float(gap.mean()) if gap.size else None,
            "tbt_p90_s": float(np.percentile(gap, 90)) if gap.size else None,
            "effective_request_capacity": counts["effective"] / counts["requests"],
            "token_hit_rate": counts["reused"] / prompt_tokens if prompt_tokens else 0.0,
            "prefill_gpu_s_per_request": self._prefill.seconds / counts["requests"],
            "output_tokens": counts["output_tokens"] + sum(row[2] for row in running),
            "simulated_s": self._now_s,
        }

    def _ended(self, request_id: int, end: str) -> None:
        self._counts[end] += 1
        if request_id in self._first_s:
            ttft_s, tbt_s, tokens = self._latencies(request_id)
            del self._first_s[request_id], self._tokens[request_id]
            self._ttfts_s.append(ttft_s)
            self._tbts_s.append(tbt_s)
            self._counts["output_tokens"] += tokens
            within = ttft_s <= self.slo.ttft_s and tbt_s <= self.slo.tbt_s
            self._counts["effective"] += within and end == "finished"
        self._arrivals_s.pop(request_id, None)

    def _latencies(self, request_id: int) -> tuple[float, float, int]:
        """TTFT, TBT and tokens of a request that received some."""
        times_s = np.concatenate(self._tokens[request_id])
        gap_s = tbt_longest_gaps_s(times_s) if self.tbt == "fast" else tbt_mean_gap_s(times_s)
        return self._first_s[request_id], gap_s, times_s.size
