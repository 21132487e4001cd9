"""The nodes of FAST'25 as latency models, calibrated to what it prints, and other nodes derived from them."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_lab import perf
from mooncake_lab.book.paper import points

BREAKDOWN: Final = "fast_fig14_latency_breakdown"
NORMALISED: Final = "arxiv_fig02_prefill_decode"
DECODED_TOKENS: Final = 128
"""Output tokens of every decode bar (FAST'25 §5.4.3)."""
REUSED_SHARE: Final = 0.95
"""Share of the prompt that is reused in Fig. 14b."""

PACKED_TOKENS: Final = 131_072
"""The longest prompt of LLaMA3-70B in the papers: waiting prompts packed up to it are an alternative to
assumption B56."""

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


@cache
def paper_node_latency() -> perf.LatencyModel:
    """The latency model of the paper's node, fitted once: the clock of the simulated clusters."""
    return calibrate_paper_node().latency


def normalised(series: str) -> tuple[Array, Array]:
    """One series of arXiv Fig. 2: lengths or batch sizes, and values relative to the largest."""
    return _series(NORMALISED, series)


def _bars(series: str) -> tuple[Array, Array]:
    return _series(BREAKDOWN, series)


def _series(name: str, series: str) -> tuple[Array, Array]:
    x, y = points(name, series)
    return np.array(x), np.array(y)


MEMORY_SHARE = 0.9
"""Share of device memory that weights and KVCache may fill, as serving engines leave by default."""


@cache
def node_latency(node: str = "a800-node", model: str = "llama3-70b") -> perf.LatencyModel:
    """The latency model of a node running a model: the paper's own, or that one scaled.

    Raises:
        ValueError: when the node is unknown (the message lists all); when the model is unknown or does not fit.
    """
    nodes = [name for name in perf.HARDWARE if _is_node(perf.hardware(name))]
    if node not in nodes:
        raise ValueError(f"no node {node!r}; allowed is hardware with a network card: {', '.join(nodes)}")
    fitted = paper_node_latency()
    machine, shape = perf.hardware(node), perf.model_shape(model)
    device_tokens(machine, shape)
    if (node, model) == ("a800-node", fitted.shape.name):
        return fitted
    scaled = _scaled(fitted, machine, shape)
    perf.check_floor(scaled, machine)
    return scaled


def device_tokens(node: perf.Hardware, shape: perf.ModelShape) -> int:
    """KVCache tokens that fit into a node's device memory beside the weights.

    Raises:
        ValueError: when the weights alone do not fit.
    """
    left = MEMORY_SHARE * node.memory_bytes - shape.weight_bytes
    if left < shape.kv_bytes_per_token:
        raise ValueError(
            f"model {shape.name!r} has {shape.weight_bytes:,} bytes of weights;"
            f" {MEMORY_SHARE:.0%} of the memory of {node.name!r} is {MEMORY_SHARE * node.memory_bytes:,.0f}"
        )
    return int(left // shape.kv_bytes_per_token)


def _is_node(machine: perf.Hardware) -> bool:
    return machine.nic_bytes_per_s is not None and machine.host_to_device_bytes_per_s is not None


def _scaled(fitted: perf.LatencyModel, node: perf.Hardware, shape: perf.ModelShape) -> perf.LatencyModel:
    base, own = perf.hardware("a800-node"), fitted.shape
    compute = base.flops_per_s("bfloat16") / node.flops_per_s("bfloat16")
    memory = base.memory_bytes_per_s / node.memory_bytes_per_s
    host = (base.host_to_device_bytes_per_s or 1.0) / (node.host_to_device_bytes_per_s or 1.0)
    card = (node.nic_bytes_per_s or 1.0) / (base.nic_bytes_per_s or 1.0)
    linear = compute * shape.layers * shape.layer_parameters / (own.layers * own.layer_parameters)
    attention = compute * shape.layers * shape.query_width / (own.layers * own.query_width)
    kvcache = shape.kv_bytes_per_token / own.kv_bytes_per_token
    prefill = perf.PrefillLatency(
        constant_s=fitted.prefill.constant_s,
        per_token_s=fitted.prefill.per_token_s * linear,
        per_token_squared_s=fitted.prefill.per_token_squared_s * attention,
        load_s_per_token=fitted.prefill.load_s_per_token * kvcache * host,
    )
    decode = perf.DecodeLatency(
        fitted.decode.constant_s * memory * shape.weight_bytes / own.weight_bytes,
        fitted.decode.per_request_s * linear,
        fitted.decode.per_context_token_s * memory * kvcache,
    )
    return replace(
        fitted,
        name=f"{node.name} with {shape.name}, scaled from the {fitted.name}",
        shape=shape,
        prefill=prefill,
        decode=decode,
        hybrid=perf.HybridLatency.of(prefill, decode),
        transfer=perf.LinkLatency(fitted.transfer.bytes_per_s * card, fitted.transfer.latency_s),
        dram=perf.LinkLatency(fitted.dram.bytes_per_s / host, fitted.dram.latency_s),
    )
