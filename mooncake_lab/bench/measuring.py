"""The threads that measured programs compute on, and the clock that times them."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numba
import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.bench.machine import describe_machine

Clock = Callable[[], float]


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
