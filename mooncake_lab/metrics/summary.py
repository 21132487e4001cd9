"""A run in one row: the numbers every comparison of clusters starts from."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mooncake_lab.core import SLO, CacheChanged, Prefilled, Record
from mooncake_lab.metrics.latency import request_table
from mooncake_lab.metrics.service import effective_request_capacity


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


def reused_share(records: Iterable[Record]) -> float:
    """Prompt tokens that needed no computation, over all prompt tokens of prefills (token hit rate)."""
    reused = computed = 0
    for record in records:
        if isinstance(record, Prefilled):
            reused += record.reused_tokens
            computed += record.computed_tokens
    return reused / (reused + computed) if reused + computed else 0.0


def run_summary(
    records: Iterable[Record], slo: SLO, *, tbt: Literal["fast", "arxiv"] = "fast", prefill_group: int = 1
) -> dict[str, float | int | None]:
    """Counts, latencies and hit rate of a run, by name; a latency of a run without any token is None.

    Args:
        records: the run's log.
        slo: the limits of an effective request.
        tbt: whose definition of the time between tokens.
        prefill_group: nodes of each prefill instance, all of which a prefill occupies.

    Raises:
        ValueError: when no request arrived.
    """
    log = list(records)
    table = request_table(log)
    capacity = effective_request_capacity(table, slo, tbt=tbt)
    ends = table["end"].to_numpy()
    served = ~np.isnan(table["ttft_s"].to_numpy(dtype=np.float64))
    ttft = table["ttft_s"].to_numpy(dtype=np.float64)[served]
    gap = table[f"tbt_{tbt}_s"].to_numpy(dtype=np.float64)[served]
    return {
        "requests": len(table),
        "finished": int((ends == "finished").sum()),
        "rejected": int((ends == "rejected").sum()),
        "ttft_mean_s": float(ttft.mean()) if served.any() else None,
        **{f"ttft_p{p}_s": float(np.percentile(ttft, p)) if served.any() else None for p in (50, 90, 99)},
        "tbt_mean_s": float(gap.mean()) if served.any() else None,
        "tbt_p90_s": float(np.percentile(gap, 90)) if served.any() else None,
        "effective_request_capacity": capacity,
        "token_hit_rate": reused_share(log),
        "prefill_gpu_s_per_request": prefill_gpu_s(log, prefill_group) / len(table),
        "output_tokens": int(table["output_tokens"].to_numpy().sum()),
        "simulated_s": next(record.at_s for record in reversed(log) if type(record) is not CacheChanged),
    }
