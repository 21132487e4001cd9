"""From a short measurement of the workers to the latency model that the Conductor believes in."""

import numpy as np

from mooncake_lab.perf import HybridLatency, LatencyModel, LinkLatency, ModelShape
from mooncake_lab.perf.calibration import fit_decode, fit_link, fit_prefill
from mooncake_lab.serving.messages import Measured


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
    if not prefill.size or not decode.size:
        raise ValueError(
            f"{len(prefill)} prefills and {len(decode)} decode steps were timed; some of each are needed"
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
    seconds = sum(row[1] for row in moves)
    return LinkLatency(sum(row[0] for row in moves) / seconds if seconds else float("inf"))
