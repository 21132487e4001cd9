"""The nodes of the arXiv edition: those of FAST'25 with a slower prefill and a decode step that grows faster."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Final, Literal

import msgspec

from mooncake_lab import perf
from mooncake_lab.book.testbeds.nodes import paper_node_latency
from mooncake_lab.core import carried_folder

CONSTANT_S: Final = 0.025
"""A decode step without requests on the node of FAST'25, rounded."""


def arxiv_testbed(prefill: float, decode: float, constant_s: float = CONSTANT_S) -> perf.LatencyModel:
    """The node of FAST'25, made slower.

    Args:
        prefill: by how much each coefficient of prefill is larger; loading a reused prefix stays as it is.
        decode: by how much more a decode step grows with each request and each token of context.
        constant_s: a decode step without requests.

    Raises:
        ValueError: when a number is negative or not finite.
    """
    fast = paper_node_latency()
    slower = replace(
        fast.prefill,
        constant_s=fast.prefill.constant_s * prefill,
        per_token_s=fast.prefill.per_token_s * prefill,
        per_token_squared_s=fast.prefill.per_token_squared_s * prefill,
    )
    steeper = replace(
        fast.decode,
        constant_s=constant_s,
        per_request_s=fast.decode.per_request_s * decode,
        per_context_token_s=fast.decode.per_context_token_s * decode,
    )
    return replace(
        fast,
        name=f"arXiv testbed: prefill x{prefill:g}, decode slope x{decode:g}, constant {1e3 * constant_s:g} ms",
        prefill=slower,
        decode=steeper,
        hybrid=perf.HybridLatency.of(slower, steeper),
    )


@dataclass(frozen=True, slots=True, order=True)
class Slower:
    """The three numbers of an `arxiv_testbed`."""

    prefill: float
    decode: float
    constant_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArxivFit:
    """What `python -m mooncake_lab.book.testbeds.fit_arxiv` recorded: `data/measured/arxiv_testbed.json`."""

    optimum: Slower
    error: float
    """Sum of the squared log errors at the optimum."""
    region: tuple[Slower, ...]
    """All points of the grid whose error is at most a tenth larger."""


@cache
def arxiv_fit() -> ArxivFit:
    """The fit of the testbed to arXiv Figs. 8 and 13."""
    return msgspec.json.decode((carried_folder("measured") / "arxiv_testbed.json").read_bytes(), type=ArxivFit)


@cache
def arxiv_testbed_latency() -> perf.LatencyModel:
    """The latency model of the testbed as it was fitted: the clock of the clusters of the arXiv edition."""
    found = arxiv_fit().optimum
    return arxiv_testbed(found.prefill, found.decode, found.constant_s)


TestbedName = Literal["fast", "arxiv", "arxiv_point_a", "arxiv_steepest"]
"""The nodes of FAST'25; those of the arXiv edition as they were fitted; as a point that meets its Table 3; or with
the steepest decode slope in the region of the fit."""


def steepest() -> Slower:
    """Of the settings in the region of the fit, the one with the steepest decode slope."""
    return max(arxiv_fit().region, key=lambda each: (each.decode, -each.constant_s))


def latency_of(testbed: TestbedName) -> perf.LatencyModel:
    """The latency model of the nodes of a name."""
    if testbed == "fast":
        return paper_node_latency()
    if testbed == "arxiv_steepest":
        end = steepest()
        return arxiv_testbed(end.prefill, end.decode, end.constant_s)
    return arxiv_testbed_latency() if testbed == "arxiv" else arxiv_testbed(1.7, 6.5)
