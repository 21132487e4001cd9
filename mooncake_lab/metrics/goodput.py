"""Goodput search: the highest load that still meets its objectives, by bisection."""

import math
from collections.abc import Callable


def highest_passing(
    passes: Callable[[float], bool], low: float, high: float, *, relative_tolerance: float = 0.05
) -> float | None:
    """The highest load between `low` and `high` that passes, down to a relative tolerance; None where none does.

    Loads are halved on a logarithmic scale, since a rate of 0.2 against 0.4 matters as much as 2 against 4. It
    presumes that what passes at some load passes at every lower one. A simulation may break this near the limit;
    the answer is then a load that passed, and a load that failed lies no farther above it than the tolerance.

    Args:
        passes: whether a load, such as requests a second or a replay speed, meets the objectives.
        low: tried first; lower loads are not tried.
        high: tried second; higher loads are not tried, and it is the answer if it passes.
        relative_tolerance: how far above the answer the lowest failing load may be, as a share of the answer.

    Raises:
        ValueError: when the bounds are not positive and rising, or the tolerance is not positive.
    """
    if not (0 < low < high < math.inf):
        raise ValueError(f"the loads to search run from {low!r} to {high!r}; both must be positive and rising")
    if not relative_tolerance > 0:
        raise ValueError(f"the relative tolerance is {relative_tolerance!r}; it must be positive")
    if not passes(low):
        return None
    if passes(high):
        return high
    while high > low * (1 + relative_tolerance):
        middle = math.sqrt(low * high)
        if not low < middle < high:  # as close as floating point allows
            break
        if passes(middle):
            low = middle
        else:
            high = middle
    return low
