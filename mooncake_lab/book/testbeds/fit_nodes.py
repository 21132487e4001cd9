"""The fit of the node of FAST'25 to Fig. 14 and arXiv Fig. 2: `data/measured/paper_node.json`.

    python -m mooncake_lab.book.testbeds.fit_nodes

The record is the latency model, which the simulated clusters read; they need no linear algebra then.
"""

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab import perf
from mooncake_lab.book.paper import points
from mooncake_lab.core import carried_folder, complete_file

BREAKDOWN: Final = "fast_fig14_latency_breakdown"
NORMALISED: Final = "arxiv_fig02_prefill_decode"
DECODED_TOKENS: Final = 128
"""Output tokens of every decode bar (FAST'25 §5.4.3)."""
REUSED_SHARE: Final = 0.95
"""Share of the prompt that is reused in Fig. 14b."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NodeCalibration:
    """What was fitted to what, and the latency model that came of it."""

    tokens: Array
    """Prompt lengths of the ten prefill bars: five without reuse, then five with."""
    reused_tokens: Array
    prefill: perf.Calibration[perf.PrefillLatency]
    """All ten prefill bars, the load of the reused prefix included."""
    prefill_alone: perf.Calibration[perf.PrefillLatency]
    """The five bars without reuse."""
    decode_alone: perf.Calibration[perf.DecodeLatency]
    """One decode step of one request: the five decode bars without reuse, a 128th each."""
    decode: perf.Calibration[perf.DecodeLatency]
    """Decode steps of growing batches: arXiv Fig. 2 in the unit that Fig. 14 gives it."""
    transfer: perf.Calibration[perf.LinkLatency]
    """Between nodes."""
    dram: perf.Calibration[perf.LinkLatency]
    """From host memory into the GPUs of the decode node."""
    latency: perf.LatencyModel
    """All of it as one model; it passed the floor check of the node."""


def calibrate_paper_node() -> NodeCalibration:
    """Fit the paper's node.

    Raises:
        ValueError: when the fitted model would beat the node's peaks (then the data are wrong).
    """
    shape = perf.model_shape("llama3-70b")
    lengths, prefill_s = _bars("prefix 0%/prefill")
    none = np.zeros_like(lengths)
    tokens = np.tile(lengths, 2)
    reused = np.concatenate([none, np.floor(REUSED_SHARE * lengths)])
    prefill = perf.fit_prefill(tokens, reused, np.concatenate([prefill_s, _bars("prefix 95%/prefill")[1]]))
    step_s = _bars("prefix 0%/decode")[1] / DECODED_TOKENS
    decode_alone = perf.fit_decode(np.ones_like(lengths), lengths + DECODED_TOKENS / 2, step_s)
    batch, relative = normalised("decode latency")
    decode = perf.per_request_cost_s(batch, relative, lengths[0], decode_alone.model)
    moved_bytes = lengths * shape.kv_bytes_per_token
    transfer = perf.fit_link(moved_bytes, _bars("prefix 0%/transfer")[1])
    dram = perf.fit_link(moved_bytes, _bars("prefix 0%/load cache")[1])
    latency = perf.LatencyModel(
        name="8xA800 node fitted to FAST'25 Fig. 14 and arXiv Fig. 2",
        shape=shape,
        prefill=prefill.model,
        decode=decode.model,
        hybrid=perf.HybridLatency.of(prefill.model, decode.model),
        transfer=transfer.model,
        dram=dram.model,
        schedule_s=float(np.mean(np.concatenate([_bars(f"prefix {share}%/schedule")[1] for share in (0, 95)]))),
    )
    perf.check_floor(latency, perf.hardware("a800-node"))
    return NodeCalibration(
        tokens=tokens,
        reused_tokens=reused,
        prefill=prefill,
        prefill_alone=perf.fit_prefill(lengths, none, prefill_s),
        decode_alone=decode_alone,
        decode=decode,
        transfer=transfer,
        dram=dram,
        latency=latency,
    )


def normalised(series: str) -> tuple[Array, Array]:
    """One series of arXiv Fig. 2: lengths or batch sizes, and values relative to the largest."""
    return _series(NORMALISED, series)


def _bars(series: str) -> tuple[Array, Array]:
    return _series(BREAKDOWN, series)


def _series(name: str, series: str) -> tuple[Array, Array]:
    x, y = points(name, series)
    return np.array(x), np.array(y)


def main() -> None:
    """Write the record anew."""
    latency = msgspec.json.encode(calibrate_paper_node().latency)
    with complete_file(carried_folder("measured") / "paper_node.json") as file:
        file.write(msgspec.json.format(latency, indent=1) + b"\n")


if __name__ == "__main__":
    main()
