"""Means, percentiles and intervals of shares, without numpy."""

import math
from collections.abc import Collection, Sequence
from typing import Final

_NORMAL_95: Final = 1.959964
"""Two-sided 95 % of the normal distribution."""


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


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share after E. B. Wilson (1927): sensible at 0 and 1 too.

    Raises:
        ValueError: when there is no trial, or there are more successes than trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials} is no share; trials from 1 and successes up to them are needed")
    share, z = successes / trials, _NORMAL_95
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # the interval ends at the share itself where no trial went the other way
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == trials else (centre + spread) / scale
    return low, high
