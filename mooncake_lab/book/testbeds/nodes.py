"""The nodes of FAST'25 as latency models, calibrated to what it prints, and other nodes derived from them."""

from dataclasses import replace
from functools import cache
from typing import Final

import msgspec

from mooncake_lab import perf
from mooncake_lab.core import carried_folder

PACKED_TOKENS: Final = 131_072
"""The longest prompt of LLaMA3-70B in the papers: waiting prompts packed up to it are an alternative to
assumption B56."""


@cache
def paper_node_latency() -> perf.LatencyModel:
    """The latency model of the paper's node, as `fit_nodes` recorded it: the clock of the simulated clusters."""
    recorded = (carried_folder("measured") / "paper_node.json").read_bytes()
    return msgspec.json.decode(recorded, type=perf.LatencyModel)


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
