"""Iterations that repeat: each outlasts the one before by a constant, so that many of them are one formula."""

from math import sqrt
from typing import NamedTuple


class Steady(NamedTuple):
    """Iterations of an unchanged plan; iteration `k` from 0 lasts `first_s + k * growth_s`."""

    first_s: float
    growth_s: float = 0.0

    def seconds(self, steps: int) -> float:
        """Seconds of the first `steps` of them; exactly their sum."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_within(self, seconds: float) -> int:
        """How many of them end within `seconds`.

        Raises:
            ValueError: when they take no time, so that no number of them fills any.
        """
        if seconds < self.first_s:
            return 0
        slope = self.first_s - self.growth_s / 2
        root = slope + sqrt(slope * slope + 2 * self.growth_s * seconds)
        if root <= 0:
            raise ValueError(f"iterations of {self.first_s!r} s; a positive time is needed")
        steps = int(2 * seconds / root)
        while self.seconds(steps + 1) <= seconds:  # undo rounding
            steps += 1
        while self.seconds(steps) > seconds:
            steps -= 1
        return steps
