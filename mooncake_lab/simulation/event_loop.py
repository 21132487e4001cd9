"""Virtual time: simpy's environment, with callbacks in place of processes."""

from collections.abc import Callable
from typing import final

import simpy


@final
class EventLoop:
    """Runs callbacks in order of their times; those of one time run first in, first out. Mutable: time passes.

    A callback costs half of the CPU time of a simpy process that waits once; a simulated hour has about 100,000.
    """

    def __init__(self) -> None:
        self.scheduled = 0
        """How many callbacks were ever scheduled."""
        self._env = simpy.Environment()

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return self._env.now

    def call_later(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Let a callback run `delay_s` seconds from now; after 0 s it runs after all that is due now.

        Raises:
            ValueError: when the delay is negative or not a number.
        """
        if not delay_s >= 0.0:
            raise ValueError(f"a callback {delay_s!r} s from now; allowed are delays from 0")
        self.scheduled += 1

        def call(_: simpy.Event) -> None:
            callback(*arguments)

        simpy.Timeout(self._env, delay_s).callbacks = [call]

    def run(self, until_s: float | None = None) -> None:
        """Run callbacks until none is left, or all that are due before a moment, which is the present then."""
        if until_s is None or until_s > self.now_s:
            self._env.run(until_s)
