"""Means and percentiles of a run's latencies, without numpy."""

import math
from collections.abc import Collection, Sequence


def mean(values: Collection[float]) -> float:
    """The mean, with a sum that is rounded once, so that the order of the values does not matter.

    Raises:
        ValueError: when there is no value.
    """
    if not values:
        raise ValueError("the mean of 0 values is undefined; at least 1 is needed")
    return math.fsum(values) / len(values)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile, interpolated linearly between order statistics; the same bits as `numpy.percentile`.

    Args:
        ordered: the values, none of them NaN, in ascending order.
        percent: from 0 to 100.

    Raises:
        ValueError: when there is no value, or the percent is out of range.
    """
    if not ordered:
        raise ValueError("a percentile of 0 values is undefined; at least 1 is needed")
    if not 0 <= percent <= 100:
        raise ValueError(f"the percent is {percent!r}; allowed are numbers from 0 to 100")
    rank = (len(ordered) - 1) * (percent / 100)
    below = int(rank)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    weight, span = rank - below, high - low
    # from the nearer neighbour, as numpy does: this rounds differently from one form for both halves
    return high - span * (1 - weight) if weight >= 0.5 else low + span * weight
