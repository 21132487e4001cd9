"""Distributions: empirical CDFs, percentiles, histograms over a paper's bins, and intervals of shares."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pandas as pd


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


def ecdf(values: npt.ArrayLike) -> "pd.DataFrame":
    """The empirical distribution: columns `x`, the distinct values in order, and `share`, of values <= x.

    Raises:
        ValueError: when there is no value, or one is not a number.
    """
    import pandas as pd  # not above: it takes a second, and `mooncake-lab simulate` does without

    x, counts = np.unique(_numbers(values), return_counts=True)
    return pd.DataFrame({"x": x, "share": np.cumsum(counts) / counts.sum()})


def percentile_table(
    groups: Mapping[str, npt.ArrayLike], percents: Sequence[float] = (50, 90, 99)
) -> "pd.DataFrame":
    """Mean, percentiles and maximum of each group of values, one row a group.

    Percentiles interpolate linearly between order statistics. Columns are `mean`, `p50`, ..., `max`.

    Raises:
        ValueError: when a group has no value or one that is not a number, or a percent is outside 0 to 100.
    """
    import pandas as pd  # not above: it takes a second, and `mooncake-lab simulate` does without

    rows: dict[str, dict[str, float]] = {}
    for name, values in groups.items():
        numbers = _numbers(values)
        ranks = {f"p{percent:g}": float(np.percentile(numbers, percent)) for percent in percents}
        rows[name] = {"mean": float(numbers.mean()), **ranks, "max": float(numbers.max())}
    return pd.DataFrame.from_dict(rows, orient="index")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histogram:
    """Counts over bins, and how many values lie outside them."""

    edges: npt.NDArray[np.float64]
    """Shape (bins + 1,)."""
    counts: npt.NDArray[np.int64]
    """Shape (bins,): values in [edge, next edge), the last bin including its right edge."""
    below: int
    above: int


def equal_bins(left_edges: Iterable[float]) -> npt.NDArray[np.float64]:
    """The edges, shape (bins + 1,), of equally wide bins whose left edges were read off a figure.

    The width is that between the first and the last left edge, so rounding of single edges cancels.

    Raises:
        ValueError: when there are fewer than two edges, or a bin differs from the mean width by over 5 %.
    """
    left = np.asarray(list(left_edges), dtype=np.float64)
    if left.size < 2:
        raise ValueError(f"{left.size} left edges give no bin width; at least 2 are needed")
    width = (left[-1] - left[0]) / (left.size - 1)
    if not width > 0 or np.abs(np.diff(left) / width - 1).max() > 0.05:
        raise ValueError(f"the left edges {left.tolist()} are not equally spaced and ascending")
    return left[0] + width * np.arange(left.size + 1)


def histogram(values: npt.ArrayLike, edges: npt.NDArray[np.float64]) -> Histogram:
    """Values counted over the bins of a figure; none is dropped in silence.

    Raises:
        ValueError: when there is no value, or one is not a number.
    """
    numbers = _numbers(values)
    counts, _ = np.histogram(numbers, bins=edges)
    return Histogram(
        edges=edges,
        counts=counts.astype(np.int64),
        below=int((numbers < edges[0]).sum()),
        above=int((numbers > edges[-1]).sum()),
    )


def _numbers(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0 or np.isnan(numbers).any():
        raise ValueError(
            f"{int(np.isnan(numbers).sum())} of {numbers.size} values are not numbers;"
            " a distribution needs at least one value, and every value to be a number"
        )
    return numbers
