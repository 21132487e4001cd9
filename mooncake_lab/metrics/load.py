"""Load over time as arXiv §7.1 defines it, wasted prefills, and how two loads move together."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import SLO, Arrived, DecodeStretch, Placed, Prefilled, Record, Rejected
from mooncake_lab.metrics.summary import prefill_gpu_s

Array = npt.NDArray[np.float64]


def prefill_load_series(records: Iterable[Record], times_s: Array, instances: int, slo: SLO) -> Array:
    """Load of the prefill pool at given times: the largest TTFT of those waiting, over its limit.

    For each instance, it takes the largest time from arrival to the end of prefill among requests queued or
    running there, and then the mean over instances. The ends are those in the log, not predictions.

    Args:
        records: a log.
        times_s: shape (times,), rising.
        instances: of the pool; those without work count as 0.
        slo: the limits.

    Returns:
        Shape (times,); 1 is full.
    """
    log = list(records)
    arrived = {r.request_id: r.at_s for r in log if isinstance(r, Arrived)}
    computed = {r.request_id: r for r in log if isinstance(r, Prefilled)}
    loads: dict[str, Array] = {}
    for record in log:
        end = computed.get(record.request_id) if isinstance(record, Placed) else None
        if end is None:
            continue
        load = loads.setdefault(end.instance, np.zeros(len(times_s)))
        first, last = np.searchsorted(times_s, [record.at_s, end.at_s])
        ttft_s = end.at_s - arrived[end.request_id]
        np.maximum(load[first:last], ttft_s / slo.ttft_s, out=load[first:last])
    return np.sum(list(loads.values()), axis=0) / instances if loads else np.zeros(len(times_s))


def decode_load_series(records: Iterable[Record], times_s: Array, instances: int, slo: SLO) -> Array:
    """Load of the decode pool at given times: the step under way over the limit of TBT, averaged over instances.

    Args:
        records: a log.
        times_s: shape (times,), rising.
        instances: of the pool; those without work count as 0.
        slo: the limits.

    Returns:
        Shape (times,); 1 is full.
    """
    load = np.zeros(len(times_s))
    for record in records:
        if isinstance(record, DecodeStretch):
            first, last = np.searchsorted(times_s, [record.start_s, record.at_s])
            done = (times_s[first:last] - record.start_s) / max(record.at_s - record.start_s, 1e-12)
            load[first:last] += record.first_step_s + record.step_growth_s * record.steps * done
    return load / (slo.tbt_s * instances)


def wasted_prefill_gpu_s(records: Iterable[Record]) -> float:
    """Seconds of prefill spent on requests that were rejected in the end."""
    log = list(records)
    rejected = {r.request_id for r in log if isinstance(r, Rejected)}
    return prefill_gpu_s(r for r in log if isinstance(r, Prefilled) and r.request_id in rejected)


def lagged_correlation(leader: Array, follower: Array, most: int) -> Array:
    """Correlation of `leader[t]` with `follower[t + k]` for k = 0 ... most, shape (most + 1,).

    Raises:
        ValueError: when a series does not vary, or is not longer than the largest lag by at least three.
    """
    if len(leader) != len(follower) or len(leader) < most + 3:
        raise ValueError(
            f"series of {len(leader)} and {len(follower)} samples; equal lengths from {most + 3} are needed"
        )
    if not (np.ptp(leader) and np.ptp(follower)):
        raise ValueError("one of the series is constant; a correlation needs two that vary")
    n = len(leader)
    return np.array([np.corrcoef(leader[: n - k], follower[k:])[0, 1] for k in range(most + 1)])


def swing(load: Array) -> float:
    """How far a load swings: from its 10th to its 90th percentile."""
    low, high = np.percentile(load, [10, 90])
    return float(high - low)


def period_s(load: Array, every_s: float) -> float:
    """The period of a fluctuating load (s): of the largest peak of its spectrum, the trend taken off.

    Args:
        load: shape (samples,), evenly spaced.
        every_s: the spacing.

    Raises:
        ValueError: when there are fewer than eight samples.
    """
    if len(load) < 8:
        raise ValueError(f"a load of {len(load)} samples; at least 8 are needed for a period")
    at = np.arange(len(load))
    rest = load - np.polyval(np.polyfit(at, load, 1), at)
    power = np.abs(np.fft.rfft(rest * np.hanning(len(rest)))) ** 2
    peak = 2 + int(np.argmax(power[2:]))  # slower than half the record is a trend, not a period
    return float(len(load) * every_s / peak)
