"""What chunked pipeline parallelism competes with: tensor and sequence parallelism over the same nodes.

Both share every layer of every token evenly and have no ramp. They pay in every layer: tensor parallelism adds up
partial sums twice, sequence parallelism passes all keys and values around. All bytes are those that leave nodes.
"""

from dataclasses import dataclass
from typing import Final, Literal

from mooncake_lab.perf.cpp import CppGroup, cpp_network_bytes, cpp_prefill_s
from mooncake_lab.perf.flops import exact_prefill_flops
from mooncake_lab.perf.hardware import Hardware

Way = Literal["CPP", "tensor parallel", "sequence parallel"]
WAYS: Final[tuple[Way, ...]] = ("CPP", "tensor parallel", "sequence parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefill:
    """One prompt over the nodes of a group: how long it took, and what the network carried."""

    seconds: float
    network_bytes: float
    """That leave nodes, all together."""
    flops: float

    def mfu(self, node: Hardware, nodes: int) -> float:
        """Model FLOPs over what the nodes could have computed meanwhile."""
        return self.flops / (self.seconds * nodes * node.flops_per_s())


def shared_prefill(group: CppGroup, way: Way, tokens: int) -> SharedPrefill:
    """One prompt over a group of nodes, in one of three ways.

    Raises:
        ValueError: naming the ways there are.
    """
    flops = exact_prefill_flops(group.shape, float(tokens))
    if way == "CPP":
        return SharedPrefill(
            seconds=cpp_prefill_s(group, tokens), network_bytes=cpp_network_bytes(group, tokens), flops=flops
        )
    if way not in WAYS:
        raise ValueError(f"no way {way!r} to share a prefill; allowed are {', '.join(WAYS)}")
    seconds = {"tensor parallel": tensor_parallel_s, "sequence parallel": sequence_parallel_s}[way](group, tokens)
    moved = {"tensor parallel": tensor_parallel_bytes, "sequence parallel": sequence_parallel_bytes}[way]
    return SharedPrefill(seconds=seconds, network_bytes=moved(group, tokens), flops=flops)


def tensor_parallel_bytes(group: CppGroup, tokens: int) -> float:
    """Two all-reduces a layer over rings of nodes: each node sends `2 (X-1)/X` of the activations in each."""
    return 2 * group.shape.layers * 2 * (group.nodes - 1) * group.hop_bytes(tokens)


def tensor_parallel_s(group: CppGroup, tokens: int) -> float:
    """Every matrix cut over all nodes; no node computes while partial sums are added up."""
    compute_s = (
        group.prefill.constant_s + (group.prefill.compute_s(tokens) - group.prefill.constant_s) / group.nodes
    )
    steps = 2 * group.shape.layers * 2 * (group.nodes - 1)  # of all rings, each with the latency of a message
    exchange_s = tensor_parallel_bytes(group, tokens) / group.nodes / group.link.bytes_per_s
    return compute_s + exchange_s + steps * group.link.latency_s


def sequence_parallel_bytes(group: CppGroup, tokens: int) -> float:
    """Keys and values of every layer go once around the ring: each reaches all other nodes."""
    return (group.nodes - 1) * float(tokens) * group.shape.kv_bytes_per_token


def sequence_parallel_s(group: CppGroup, tokens: int) -> float:
    """Tokens dealt out so that all attend equally much, keys and values passed on while they are attended to.

    In each layer, the slower of attention and passing on counts, and everything else after it.
    """
    prefill, nodes = group.prefill, group.nodes
    attention_s = prefill.per_token_squared_s * tokens * tokens / nodes
    linear_s = prefill.per_token_s * tokens / nodes
    ring_s = sequence_parallel_bytes(group, tokens) / nodes / group.link.bytes_per_s
    ring_s += group.shape.layers * (nodes - 1) * group.link.latency_s
    return prefill.constant_s + linear_s + max(attention_s, ring_s)
