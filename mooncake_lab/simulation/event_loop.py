"""Virtual time: callbacks, each with the moment at which it is due."""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any, final


@final
class EventLoop:
    """Runs callbacks in order of their times; those of one time run first in, first out. Mutable: time passes.

    A simulated hour has about 100,000 of them; an event of simpy costs twice as much CPU time as an entry here.
    """

    def __init__(self) -> None:
        self.now_s: float = 0
        self.scheduled = 0
        """How many callbacks were ever scheduled."""
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def call_later(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Let a callback run `delay_s` seconds from now; after 0 s it runs after all that is due now.

        Raises:
            ValueError: when the delay is negative or not a number.
        """
        if not delay_s >= 0.0:
            raise ValueError(f"a callback {delay_s!r} s from now; allowed are delays from 0")
        self.scheduled += 1
        heappush(self._due, (self.now_s + delay_s, self.scheduled, callback, arguments))

    def run(self, until_s: float | None = None) -> None:
        """Run callbacks until none is left, or all that are due before a moment, which is the present then."""
        due, end_s = self._due, inf if until_s is None else until_s
        while due and due[0][0] < end_s:
            self.now_s, _, callback, arguments = heappop(due)
            callback(*arguments)
        if until_s is not None:
            self.now_s = until_s
