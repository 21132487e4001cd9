"""The harness of all comparisons: rounds in which the compared ways take turns, and the ratios within rounds.

A machine drifts: another program starts, a processor becomes warm. Within one round all ways meet the same
machine, so ratios are taken round by round. Every second round goes backwards, so that no way is always the first.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Way = TypeVar("Way")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class RoundRatio:
    """One way over another, round by round: the median, and the range."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Rounds(Generic[Way]):
    """The seconds of ways that took turns, one entry per counted round."""

    seconds: Mapping[Way, Sequence[float]]
    load_average: float
    """Processes that wanted to compute in the minute before the first round."""

    def median_s(self, way: Way) -> float:
        """The median of one way."""
        return statistics.median(self.seconds[way])

    def ratio(self, numerator: Way, denominator: Way) -> RoundRatio:
        """How many times as long one way takes as another."""
        ratios = [a / b for a, b in zip(self.seconds[numerator], self.seconds[denominator], strict=True)]
        return RoundRatio(statistics.median(ratios), min(ratios), max(ratios))

    def extra_s(self, way: Way, base: Way) -> float:
        """What one way takes beyond another, the median of the rounds."""
        pairs = zip(self.seconds[way], self.seconds[base], strict=True)
        return statistics.median(mine - alone for mine, alone in pairs)


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` took."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def same(work: Callable[[], Found]) -> Callable[[int], Found]:
    """A work that is the same in each round."""
    return lambda _: work()


def in_order(ways: Iterable[Way], number: int) -> list[Way]:
    """The order of a round: every second one goes backwards."""
    forwards = list(ways)
    return forwards if number % 2 else forwards[::-1]


def in_turns(
    works: Mapping[Way, Callable[[int], Found]], rounds: int, *, warm_up: int = 1
) -> dict[Way, list[Found]]:
    """What each way found, one entry per counted round.

    Args:
        works: called once per round with its number, from 0 on.
        rounds: that count.
        warm_up: rounds before them, which do not count.
    """
    found: dict[Way, list[Found]] = {way: [] for way in works}
    for number in range(warm_up + rounds):
        for way in in_order(works, number):
            one = works[way](number)
            if number >= warm_up:
                found[way].append(one)
    return found


def alternating_rounds(
    works: Mapping[Way, Callable[[int], float]], rounds: int, *, warm_up: int = 1
) -> Rounds[Way]:
    """The seconds of each way in rounds in which they take turns; the arguments are those of `in_turns`."""
    load = os.getloadavg()[0]
    return Rounds(in_turns(works, rounds, warm_up=warm_up), load)


def paired_rounds(
    time_once: Callable[[int], Mapping[Way, float]], rounds: int, *, warm_up: int = 1
) -> Rounds[Way]:
    """The same for ways that one function times together, because one leaves to the next what that needs.

    Args:
        time_once: called with the number of the round; runs every way once, in the order of `in_order` if it can.
        rounds: that count.
        warm_up: rounds before them, which do not count.
    """
    load = os.getloadavg()[0]
    (found,) = in_turns({"all": time_once}, rounds, warm_up=warm_up).values()
    return Rounds({way: [one[way] for one in found] for way in found[0]}, load)
