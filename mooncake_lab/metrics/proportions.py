"""Shares of right answers, and their confidence intervals."""

import math

_NORMAL_95 = 1.959964
"""Two-sided 95 % of the normal distribution."""


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
