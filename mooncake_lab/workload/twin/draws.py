"""How a twin draws: named random streams, quantile tables, and draws spread evenly."""

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The random stream of this seed and these names, independent of every other one.

    A stream belongs to one purpose ("conversation", "hour", 0), so that a new purpose changes no old draw.

    Raises:
        ValueError: when the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"a twin cannot be drawn with seed {seed}; allowed are integers from 0")
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution as a table of its quantiles, straight lines between them.

    Raises:
        ValueError: when the two columns do not fit, or one of them falls.
    """

    percent: tuple[float, ...]
    """From 0 to 100."""
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a <= b for column in (self.percent, self.values) for a, b in pairwise(column))
        if len(self.percent) != len(self.values) or not rising or self.percent[:1] + self.percent[-1:] != (0, 100):
            raise ValueError(
                f"the quantile table {self.percent} -> {self.values} is broken;"
                " needed are two rising columns of one length, from 0 to 100 percent"
            )

    def at(self, u: Floats) -> Floats:
        """The values at the probabilities `u` (0 to 1), any shape."""
        return np.interp(100 * u, self.percent, self.values)


def spread(rng: np.random.Generator, points: int, columns: int) -> Floats:
    """Evenly spread points in the unit cube, shape (columns, points), moved together by a random shift.

    Independent draws leave gaps and clusters: the mean prompt of 7,000 sessions would miss its value by more
    than a percent, for no reason but luck. These points are a random shift plus multiples of irrational steps,
    so every run of neighbours covers the whole range. Sort what you draw for (prompts by length, say), and
    the long ones get as fair a share of every outcome as the short ones.
    """
    root = 2.0
    for _ in range(64):  # the root of x^(columns+1) = x + 1, whose powers are hard to approximate by fractions
        root = (1 + root) ** (1 / (columns + 1))
    steps = root ** -np.arange(1.0, columns + 1)
    return (rng.random((columns, 1)) + steps[:, None] * np.arange(points)) % 1.0
