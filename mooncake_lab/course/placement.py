"""How much shorter requests wait under a placement policy of one's own than under Algorithm 1."""

import random
from collections.abc import Sequence
from typing import Final

from mooncake_lab.book.chapters.placement.experiment import mean_ttft_s
from mooncake_lab.conductor import KVCacheCentric, PlacementPolicy
from mooncake_lab.core import sum_in_order
from mooncake_lab.workload import Trace
from mooncake_lab.workload.twin import make_twin

PREFILL_NODES: Final = 4
"""Few enough that queues form."""
_REQUESTS: Final = 500
_TRACES: Final = 6
"""On a single trace, one long prompt more or less decides."""


def busy_traces(seed: int | random.Random) -> list[Trace]:
    """Traces like the conversation trace, drawn with a seed, or with the draws themselves.

    They are synthetic, so that a grade does not depend on whether the released trace is on this machine.
    """
    draw = seed if isinstance(seed, random.Random) else random.Random(seed)  # noqa: S311  # a workload
    return [make_twin("conversation", seed=draw.getrandbits(32), requests=_REQUESTS) for _ in range(_TRACES)]


def ttft_saved_share(policy: PlacementPolicy, seed: int | random.Random = 0) -> float:
    """The share of the mean TTFT of Algorithm 1 that a policy saves, in the mean over traces.

    It is negative where requests wait longer than with Algorithm 1.
    """
    traces = busy_traces(seed)
    theirs, ours = (_mean_ttfts_s(each, traces) for each in (policy, KVCacheCentric()))
    return sum_in_order(1 - mine / best for mine, best in zip(theirs, ours, strict=True)) / len(traces)


def _mean_ttfts_s(policy: PlacementPolicy, traces: Sequence[Trace]) -> list[float]:
    return [mean_ttft_s(policy, first=_REQUESTS, prefill_nodes=PREFILL_NODES, whole=trace) for trace in traces]
