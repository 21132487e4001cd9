"""When requests come: a Poisson process, as both papers use for datasets without timestamps."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mooncake_lab.workload.trace import Trace


def poisson_arrivals_s(requests: int, requests_per_s: float, *, seed: int = 0) -> npt.NDArray[np.float64]:
    """Shape (requests,): arrival times with independent exponential gaps, the first one after a gap too.

    Raises:
        ValueError: when there are fewer than 0 requests, or the rate is not a positive number.
    """
    if requests < 0:
        raise ValueError(f"cannot draw {requests} arrivals; at least 0 are needed")
    if not 0 < requests_per_s < np.inf:
        raise ValueError(f"requests_per_s is {requests_per_s!r}; it must be a positive number")
    gaps_s = np.random.default_rng(seed).exponential(1 / requests_per_s, requests)
    return np.cumsum(gaps_s)


def with_poisson_arrivals(trace: Trace, requests_per_s: float, *, seed: int = 0) -> Trace:
    """The same requests in the same order, arriving as a Poisson process.

    Raises:
        ValueError: when the rate is not a positive number.
    """
    return replace(
        trace,
        arrival_s=poisson_arrivals_s(len(trace), requests_per_s, seed=seed),
        source=f"{trace.source}, Poisson arrivals at {requests_per_s:g}/s, seed {seed}",
    )
