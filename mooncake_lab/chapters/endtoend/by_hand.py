"""Four requests whose every token can be computed with paper and pencil: what a prompt does to others' answers."""

from collections.abc import Iterable

import numpy as np

from mooncake_lab.conductor.placement import FewestRequests
from mooncake_lab.core import Record, Request, TracedRequest
from mooncake_lab.metrics import token_times_s
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import Cluster, ClusterSpec

PROMPT_TOKENS = 512
ARRIVALS_S = (0.0, 1.15, 2.45, 2.45)
ANSWER_TOKENS = 6


def round_numbers() -> LatencyModel:
    """A second a prompt, a tenth of a second a step whatever the batch, and links that take no time."""
    prefill = PrefillLatency(constant_s=0.0, per_token_s=1 / PROMPT_TOKENS, per_token_squared_s=0.0)
    decode = DecodeLatency(0.1, 0.0, 0.0)
    instant = LinkLatency(1e18)
    return LatencyModel(
        name="one second a prompt, a tenth a step",
        shape=model_shape("llama3-70b"),
        prefill=prefill,
        decode=decode,
        hybrid=HybridLatency.of(prefill, decode),
        transfer=instant,
        dram=instant,
    )


def coupled_log(nodes: int = 1) -> list[Record]:
    """The four on instances that do both stages, prompts first."""
    return Cluster(ClusterSpec.coupled(nodes=nodes, placement=FewestRequests()), round_numbers()).run(_four())


def split_log() -> list[Record]:
    """The four on a prefill and a decode node."""
    return Cluster(ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1), round_numbers()).run(_four())


def longest_gaps_s(log: Iterable[Record]) -> list[float]:
    """The longest gap between two tokens of each request, in order of id, to the millisecond."""
    found = dict(token_times_s(log))
    return [round(float(np.diff(found[i]).max()), 3) for i in sorted(found)]


def _four() -> list[TracedRequest]:
    return [
        TracedRequest(
            Request(id=i, arrival_s=at_s, input_tokens=PROMPT_TOKENS, block_keys=(i,)), output_tokens=ANSWER_TOKENS
        )
        for i, at_s in enumerate(ARRIVALS_S)
    ]
