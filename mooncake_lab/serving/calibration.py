"""What workers time at the start of a cluster, and the latency model that fits it: the Conductor's estimate.

The workers time themselves with `measuring`.
"""

from typing import Final

import numpy as np

from mooncake_lab.core import sum_in_order
from mooncake_lab.perf import HybridLatency, LatencyModel, LinkLatency, ModelShape
from mooncake_lab.perf.calibration import fit_decode, fit_link, fit_prefill
from mooncake_lab.serving.messages import Measured

PROMPTS: Final = (
    *((tokens, 0) for tokens in (16, 64, 128, 256, 512, 1024, 2048)),
    *((512, 256), (1024, 768), (2048, 1792)),
)
"""Tokens and how many of them are reused. The longest ones decide the quadratic term."""
BATCHES: Final = ((1, 32), (1, 512), (4, 128), (8, 64), (16, 32), (16, 128))
"""Requests of a batch and the context of each."""
LEAST_PROMPTS: Final = 3
LEAST_BATCHES: Final = 3
"""Prompts and batches that a latency model needs: it has three coefficients for each stage."""
STEPS: Final = 6
"""Timed decode steps of each batch."""
_LEAST_LIMIT_S: Final = 120.0
_MOST_LIMIT_S: Final = 3600.0
_SLOWEST_FLOPS: Final = 5e9
"""Far below one core: a thread that computes without vector instructions."""


def measuring_limit_s(shape: ModelShape) -> float:
    """How long a worker may take to time itself; after one slow round of prompts there is no second."""
    tokens = sum(tokens - reused for tokens, reused in PROMPTS)
    tokens += sum(batch * (STEPS + 2 + batch) for batch, _ in BATCHES)
    return min(_LEAST_LIMIT_S + 2 * shape.parameters * tokens / _SLOWEST_FLOPS, _MOST_LIMIT_S)


def latency_model(shape: ModelShape, measured: list[Measured], name: str) -> LatencyModel:
    """The latency model that fits what the workers of a cluster measured of themselves.

    Args:
        shape: of the model they run.
        measured: of one worker of each role, in any order.
        name: what it was fitted to.

    Raises:
        ValueError: when too little was measured to fit.
    """
    prefill = np.array([row for part in measured for row in part.prefill], dtype=np.float64)
    decode = np.array([row for part in measured for row in part.decode], dtype=np.float64)
    sent = np.array([row for part in measured for row in part.transfer], dtype=np.float64)
    loaded = [row for part in measured for row in part.load]
    if len(prefill) < LEAST_PROMPTS or len(decode) < LEAST_BATCHES:
        raise ValueError(
            f"{len(prefill)} prefills and {len(decode)} decode batches fit and were timed; at least"
            f" {LEAST_PROMPTS} and {LEAST_BATCHES} are needed: the longest context (that of the model, or"
            " max_model_len) or an engine's KVCache (max_total_tokens) is too small"
        )
    first = fit_prefill(prefill[:, 0], prefill[:, 1], prefill[:, 2]).model
    second = fit_decode(decode[:, 0], decode[:, 1], decode[:, 2]).model
    # coupled workers move nothing: their KVCache is where it is needed
    transfer = fit_link(sent[:, 0], sent[:, 1]).model if sent.size else LinkLatency(float("inf"))
    read = [row for part in measured for row in part.ssd]
    return LatencyModel(
        name=name,
        shape=shape,
        prefill=first,
        decode=second,
        hybrid=HybridLatency.of(first, second),
        transfer=transfer,
        dram=_link(loaded),
        ssd=_link(read) if read else None,
    )


def _link(moves: list[tuple[int, float]]) -> LinkLatency:
    """The bandwidth of loads that are too short for a latency to be told apart."""
    seconds = sum_in_order(row[1] for row in moves)
    return LinkLatency(sum(row[0] for row in moves) / seconds if seconds else float("inf"))
