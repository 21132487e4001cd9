"""How programs are timed: rounds in which all of them take turns, the threads they compute on, and the clock."""

import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.bench.machine import describe_machine

Clock = Callable[[], float]
Way = TypeVar("Way")


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` took."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def paired_rounds(time_once: Callable[[], Mapping[Way, float]], rounds: int) -> dict[Way, list[float]]:
    """The seconds of each way, one entry per round, so that a busy machine slows all ways alike.

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


@contextmanager
def computing_threads(threads: int | None) -> Generator[None]:
    """Set the threads of torch for a while; `None` changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread(device: str = "cpu") -> Generator[Clock]:
    """Compute on one thread for a while, and read the seconds this process computes, not those it waits.

    On a GPU nothing is changed and the clock is the wall's, read when the device is idle.
    """
    if device != "cpu":

        def wall() -> float:
            torch.cuda.synchronize()
            return time.perf_counter()

        yield wall
        return
    numba_threads, torch_threads = numba.get_num_threads(), torch.get_num_threads()
    numba.set_num_threads(1)  # first: when numba starts its threads it resets how many torch uses
    torch.set_num_threads(1)
    try:
        yield time.process_time
    finally:
        numba.set_num_threads(numba_threads)
        torch.set_num_threads(torch_threads)


def measured_by(device: str = "cpu") -> str:
    """The machine and the clock, for footers; to be called inside `one_thread`."""
    clock = "processor" if device == "cpu" else "wall"
    return f"{describe_machine(device)}, {clock} clock"


def random_prompt(tokens: int, vocabulary: int, *, seed: int, number: int = 0) -> npt.NDArray[np.int32]:
    """Token ids that no other seed or number gives."""
    return np.random.default_rng([seed, number]).integers(0, vocabulary, tokens).astype(np.int32)
