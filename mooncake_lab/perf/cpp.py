"""Chunked pipeline parallelism (CPP): one long prompt over a group of prefill nodes, as Mooncake describes it.

Node `j` of a group holds an equal run of layers. The prompt is cut into chunks; chunk `i` runs on node `j` once
node `j` is done with chunk `i-1` and the activations of chunk `i` have arrived from node `j-1`. Only activations
cross the network, and only between neighbours. Neither edition prints a figure or a number of it: this is a model.

It competes with tensor and sequence parallelism over the same nodes. Both share every layer of every token evenly
and have no ramp. They pay in every layer: tensor parallelism adds up partial sums twice, sequence parallelism
passes all keys and values around. All bytes are those that leave nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, Literal

from mooncake_lab.perf.latency import LatencyModel, LinkLatency, PrefillLatency
from mooncake_lab.perf.roofline import exact_prefill_flops
from mooncake_lab.perf.specs import Hardware, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class CppGroup:
    """Nodes that prefill one prompt together, each with a run of the layers.

    Raises:
        ValueError: when there are no nodes, more nodes than layers, no tokens in a chunk, or a negative constant.
    """

    prefill: PrefillLatency
    """Latency of one such node that holds all layers; a share of the layers takes that share of the time."""
    shape: ModelShape
    nodes: int
    chunk_tokens: int
    """`prefill_chunk` of the paper, which states no value (assumption B14)."""
    link: LinkLatency
    """From a node to the next: chunks queue for it, and it works while both nodes compute."""
    chunk_constant_s: float = 0.0
    """Paid for every chunk by all nodes together: launching the kernels of all layers once more."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.shape.layers:
            raise ValueError(
                f"a group of {self.nodes} nodes for {self.shape.layers} layers;"
                f" 1 to {self.shape.layers} can share them"
            )
        if self.chunk_tokens < 1 or self.chunk_constant_s < 0:
            raise ValueError(
                f"chunks of {self.chunk_tokens} tokens that cost {self.chunk_constant_s} s more each;"
                " at least 1 token and 0 s are needed"
            )

    @classmethod
    def of(cls, latency: LatencyModel, *, nodes: int, chunk_tokens: int) -> "CppGroup":
        """A group of nodes like this one; activations move as KVCache does."""
        return cls(
            prefill=latency.prefill,
            shape=latency.shape,
            nodes=nodes,
            chunk_tokens=chunk_tokens,
            link=latency.transfer,
        )

    @property
    def layer_shares(self) -> tuple[float, ...]:
        """The share of the layers on each node: as even as whole layers allow, the first ones holding one more."""
        each, more = divmod(self.shape.layers, self.nodes)
        return tuple((each + (index < more)) / self.shape.layers for index in range(self.nodes))

    def hop_bytes(self, tokens: int) -> int:
        """Bytes of the activations of `tokens` tokens at one boundary: 16 KiB a token for a 70B Llama."""
        return tokens * self.shape.width * self.shape.bytes_per_element


def chunk_sizes(tokens: int, chunk_tokens: int) -> list[int]:
    """Whole chunks, and what is left.

    Raises:
        ValueError: when there is nothing to cut or to cut it to.
    """
    if min(tokens, chunk_tokens) < 1:
        raise ValueError(f"{tokens} tokens in chunks of {chunk_tokens}; both must be at least 1")
    whole, rest = divmod(tokens, chunk_tokens)
    return [chunk_tokens] * whole + [rest] * (rest > 0)


def chunk_seconds(group: CppGroup, sizes: Sequence[int], reused_tokens: int = 0) -> list[float]:
    """Seconds of each chunk over all layers; without constants they add up to the prompt, however it is cut."""
    ends = list(accumulate(sizes, initial=reused_tokens))
    constant = group.prefill.constant_s  # of a prompt, not of a chunk
    return [
        group.chunk_constant_s + group.prefill.compute_s(end, start) - constant for start, end in pairwise(ends)
    ]


def cpp_finish_s(
    group: CppGroup,
    tokens: int,
    reused_tokens: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    free_s: Sequence[float] = (),
) -> list[list[float]]:
    """When each node is done with each chunk: `[node][chunk]` seconds from now.

    The recurrence is `F[i,j] = max(F[i-1,j], A[i,j]) + t[i,j]`, with `A[i,j] = max(F[i,j-1], A[i-1,j]) + h[i]`
    the arrival of chunk `i` over a link that sends one chunk at a time. Every node loads its own layers of a
    reused prefix before its first chunk, all nodes at once; the constant of a prompt is paid on the first.

    Args:
        group: the nodes.
        tokens: of the prompt, reused ones included.
        reused_tokens: leading tokens whose KVCache exists; node `j` has to load only its own layers of it.
        sizes: tokens of each chunk, where they are not all `chunk_tokens`; they must add up to the rest.
        free_s: when each node is free, all now where it is not given; with the last column of the prompt before,
            the pipeline stays full.

    Raises:
        ValueError: when nothing is left to compute, sizes do not add up, or `free_s` names not every node.
    """
    cut = list(sizes) if sizes is not None else chunk_sizes(tokens - reused_tokens, group.chunk_tokens)
    if sum(cut) != tokens - reused_tokens or min(cut) < 1:
        raise ValueError(f"chunks of {cut} tokens; they must be positive and add up to {tokens - reused_tokens}")
    free = list(free_s) or [0.0] * group.nodes
    if len(free) != group.nodes:
        raise ValueError(f"free_s names {len(free)} nodes; the group has {group.nodes}")
    seconds, load_s = chunk_seconds(group, cut, reused_tokens), group.prefill.load_s_per_token * reused_tokens
    hops = [group.hop_bytes(size) / group.link.bytes_per_s for size in cut]
    finish: list[list[float]] = []
    for node, share in enumerate(group.layer_shares):
        done_s = free[node] + share * load_s + (0.0 if finish else group.prefill.constant_s)
        arrived = _arrivals(finish[-1], hops, group.link.latency_s) if finish else [0.0] * len(cut)
        finish.append([])
        for each_s, arrived_s in zip(seconds, arrived, strict=True):
            done_s = max(done_s, arrived_s) + share * each_s
            finish[-1].append(done_s)
    return finish


def _arrivals(done: Sequence[float], hops: Sequence[float], latency_s: float) -> list[float]:
    """When chunks that are done at these times have arrived: one at a time, each after the one before."""
    sent_s, arrived = 0.0, list[float]()
    for done_s, hop_s in zip(done, hops, strict=True):
        sent_s = max(sent_s, done_s) + hop_s
        arrived.append(sent_s + latency_s)
    return arrived


def cpp_prefill_s(
    group: CppGroup, tokens: int, reused_tokens: int = 0, *, sizes: Sequence[int] | None = None
) -> float:
    """Seconds of a prefill over an idle group; with one node exactly that node's `PrefillLatency.seconds`.

    Args:
        group: the nodes.
        tokens: of the prompt, reused ones included.
        reused_tokens: leading tokens whose KVCache exists.
        sizes: of the chunks, where they are not all `chunk_tokens`.
    """
    return cpp_finish_s(group, tokens, reused_tokens, sizes=sizes)[-1][-1]


def cpp_network_bytes(group: CppGroup, tokens: int, reused_tokens: int = 0) -> int:
    """Bytes between nodes for one prompt: its activations once at each boundary, whatever the chunks."""
    return (group.nodes - 1) * group.hop_bytes(tokens - reused_tokens)


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
