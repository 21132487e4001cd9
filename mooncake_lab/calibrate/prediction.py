"""A server's run beside the simulator's: the same requests, one latency model, and the errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mooncake_lab.calibrate.fit import Fitted
from mooncake_lab.calibrate.observations import CalibrationError, Reply
from mooncake_lab.calibrate.settings import ServerSettings
from mooncake_lab.calibrate.workload import as_observed, shareable_tokens
from mooncake_lab.core import Prefilled, Record, TracedRequest
from mooncake_lab.metrics import mean, request_table, tbt_mean_gap_s
from mooncake_lab.metrics.prediction import STATISTICS, prediction_errors
from mooncake_lab.simulation import Cluster

QUANTITIES: Final = ("TTFT", "TBT", "E2E")
"""Of each request: until its first token, the mean gap between its tokens, until its last token."""
Latencies = npt.NDArray[np.float64]
"""Shape (requests, 3): TTFT, TBT and E2E (s); NaN where there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class ServedRun:
    """One run of a slice at one rate."""

    rate_per_s: float
    share: float
    """Of the measured saturation; 0 for the slice that serves the fit."""
    requests: tuple[TracedRequest, ...]
    replies: tuple[Reply, ...]
    """In the order of the requests."""
    reused_tokens: float | None = None
    """Prompt tokens that the server found in its cache, by its metrics or by its answers."""

    @property
    def answered(self) -> list[int]:
        """Requests that have an answer."""
        return [k for k, reply in enumerate(self.replies) if reply.failure is None]

    @property
    def spread_tokens(self) -> int:
        """Tokens that came several in one event."""
        return sum(reply.spread_tokens for reply in self.replies)

    @property
    def late_s(self) -> float:
        """How long after its time the latest request was sent: a client that cannot keep up."""
        pairs = zip(self.requests, self.replies, strict=True)
        return max((reply.sent_s - traced.request.arrival_s for traced, reply in pairs), default=0.0)

    @property
    def foreign_tokens(self) -> float:
        """Prompt tokens that were found and that no request of this run can have left."""
        if self.reused_tokens is None:
            return 0.0
        return max(0.0, self.reused_tokens - shareable_tokens([self.requests[k] for k in self.answered]))


def measured(run: ServedRun) -> Latencies:
    """What the clients saw."""
    found = np.full((len(run.requests), 3), np.nan)
    for k in run.answered:
        reply = run.replies[k]
        gap_s = tbt_mean_gap_s(reply.times_s)
        found[k] = reply.ttft_s, np.nan if gap_s is None else gap_s, reply.e2e_s
    return found


def simulated(run: ServedRun, fitted: Fitted, settings: ServerSettings) -> tuple[Latencies, dict[str, float]]:
    """What the simulator says of the requests that were answered, with the lengths that the server counted.

    Raises:
        CalibrationError: when the simulated server cannot serve what the real one served.
    """
    requests = [as_observed(run.requests[k], run.replies[k]) for k in run.answered]
    found = np.full((len(run.requests), 3), np.nan)
    try:
        spec = settings.spec(requests[0].request.block_size_tokens)
        log = Cluster(spec, fitted.model).run(requests)
    except ValueError as error:
        raise CalibrationError(f"these settings cannot be simulated: {error}") from None
    table = request_table(log)
    refused = len(table) - list(table["end"]).count("finished")
    if refused:
        raise CalibrationError(
            f"the simulated server refuses {refused} of {len(requests)} requests that the real one answered; its"
            f" settings differ ({settings.kv_tokens} tokens of KVCache, {settings.max_model_len} a request)"
        )
    columns = table[["ttft_s", "tbt_arxiv_s", "finish_s", "arrival_s", "output_tokens"]].to_numpy(np.float64)
    found[table.index.to_numpy()] = np.stack([columns[:, 0], columns[:, 1], columns[:, 2] - columns[:, 3]], axis=1)
    return found, _totals(log, float(columns[:, 4].sum()), float(columns[:, 2].max()))


def _totals(log: Sequence[Record], output_tokens: float, end_s: float) -> dict[str, float]:
    reused = sum(record.reused_tokens for record in log if isinstance(record, Prefilled))
    return {"tokens_per_s": output_tokens / end_s, "reused_tokens": float(reused)}


def throughput_per_s(run: ServedRun) -> float:
    """Output tokens of a run over the time until the last one."""
    replies = [run.replies[k] for k in run.answered]
    return sum(len(reply.times_s) for reply in replies) / max(reply.times_s[-1] for reply in replies)


def at_one_rate(
    runs: Sequence[ServedRun], fitted: Fitted, settings: ServerSettings, *, seed: int
) -> dict[str, Any]:
    """Repetitions of one rate beside their predictions: errors with intervals, and the server's own repetition.

    The repetition error of a statistic is half its range over the repetitions, relative to their mean; null for
    one repetition.
    """
    real = np.stack([measured(run) for run in runs], axis=1)  # (requests, repetitions, 3)
    told = [simulated(run, fitted, settings) for run in runs]
    other = np.stack([latencies for latencies, _ in told], axis=1)
    rows = list[dict[str, Any]]()
    for number, quantity in enumerate(QUANTITIES):
        pairs = np.stack([real[:, :, number], other[:, :, number]], axis=2)
        pairs = pairs[~np.isnan(pairs).any(axis=(1, 2))]
        if not len(pairs):
            continue
        for found in prediction_errors(pairs, seed=seed):
            each = STATISTICS[found.statistic](np.moveaxis(pairs, 1, 0))[:, 0]  # of each repetition
            row = {"quantity": quantity, "unit": "s", **found._asdict(), "repetition": half_range(each.tolist())}
            rows.append(row | {"requests": len(pairs)})
    rates = [throughput_per_s(run) for run in runs]
    predicted = mean([totals["tokens_per_s"] for _, totals in told])
    ratios = sorted(totals["tokens_per_s"] / rate - 1 for (_, totals), rate in zip(told, rates, strict=True))
    rows.append(
        {"quantity": "throughput", "unit": "tokens/s", "statistic": "mean", "real": mean(rates)}
        | {"simulated": predicted, "error": predicted / mean(rates) - 1, "low": ratios[0], "high": ratios[-1]}
        | {"repetition": half_range(rates), "requests": len(runs[0].requests)}
    )
    seen = [run.reused_tokens for run in runs if run.reused_tokens is not None]
    return {
        "share": runs[0].share,
        "requests_per_s": runs[0].rate_per_s,
        "repetitions": len(runs),
        "unanswered": sum(len(run.replies) - len(run.answered) for run in runs),
        "latest_sent_s": max(run.late_s for run in runs),
        "spread_tokens": sum(run.spread_tokens for run in runs),
        "reused_tokens": mean(seen) if seen else None,
        "predicted_reused_tokens": mean([totals["reused_tokens"] for _, totals in told]),
        "foreign_tokens": max(run.foreign_tokens for run in runs),
        "errors": rows,
        "points": _points(real, other),
    }


def half_range(values: Sequence[float]) -> float | None:
    """Half of the distance from the least to the largest value, over their mean; None for a single one."""
    return (max(values) - min(values)) / 2 / mean(values) if len(values) > 1 else None


def _points(real: Latencies, other: Latencies) -> list[list[float | None]]:
    """Rows of a scatter: measured TTFT, TBT and E2E of each request in the first repetition, then predicted."""
    both = np.concatenate([real[:, 0], other[:, 0]], axis=1)
    return [[None if np.isnan(v) else round(v, 6) for v in row] for row in both.tolist()]
