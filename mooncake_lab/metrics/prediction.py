"""How far a prediction is from what was measured, request by request, with intervals."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

STATISTICS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "mean": lambda values: np.mean(values, axis=-2),
    "median": lambda values: np.median(values, axis=-2),
    "P90": lambda values: np.percentile(values, 90, axis=-2),
}
"""What is compared of a distribution: of columns, over the axis before the last."""
_RESAMPLES: Final = 500


class PredictionError(NamedTuple):
    """A statistic of what was measured and of what was predicted."""

    statistic: str
    real: float
    simulated: float
    error: float
    """Simulated over real, less one."""
    low: float
    high: float
    """Its 95 % interval, of a bootstrap over requests."""


def prediction_errors(pairs: npt.NDArray[np.float64], *, seed: int = 0) -> Iterator[PredictionError]:
    """Errors of each of `STATISTICS` over all requests and repetitions.

    The interval says nothing of how another run on the same machine would have gone.

    Args:
        pairs: shape (requests, repetitions, 2), measured and predicted; a request is drawn with all of its
            repetitions.
        seed: of the bootstrap.
    """
    requests = len(pairs)
    draws = np.random.default_rng(seed).integers(0, requests, (_RESAMPLES, requests))
    drawn = pairs[draws].reshape(_RESAMPLES, -1, 2)
    for statistic, of in STATISTICS.items():
        real, simulated = of(pairs.reshape(-1, 2)).tolist()
        resampled = of(drawn)  # (resamples, 2)
        low, high = np.percentile(resampled[:, 1] / resampled[:, 0] - 1, [2.5, 97.5])
        yield PredictionError(statistic, real, simulated, simulated / real - 1, float(low), float(high))
