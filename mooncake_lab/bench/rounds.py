"""Paired rounds: each round times every way once, so that a busy machine slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Way = TypeVar("Way")


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` took."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def paired_rounds(time_once: Callable[[], Mapping[Way, float]], rounds: int) -> dict[Way, list[float]]:
    """The seconds of each way, one entry per round.

    Args:
        time_once: runs every way once and returns its seconds.
        rounds: counted rounds; one more goes before them to warm up.
    """
    taken: dict[Way, list[float]] = {}
    for turn in range(rounds + 1):
        for way, seconds in time_once().items():
            taken.setdefault(way, [])
            if turn:
                taken[way].append(seconds)
    return taken


def alternate(works: Sequence[Callable[[], float]], turns: range) -> list[list[float]]:
    """Run each work once per turn, in alternating order; the results of each work by turn."""
    given: list[list[float]] = [[] for _ in works]
    for turn in turns:
        for index in range(len(works)) if turn % 2 else reversed(range(len(works))):
            given[index].append(works[index]())
    return given


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
