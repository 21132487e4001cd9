"""What an instance runs next: a pure policy plans each iteration, and `Instance` acts on the plan."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from mooncake_lab.batching.chunked_prefill import Sarathi, SarathiServe, SplitFuse, VLLMChunked
from mooncake_lab.batching.instance import BlockSpace, CountedBlocks, Instance
from mooncake_lab.batching.one_stage import DecodeOnly, DecodingRequest, PrefillOnly, SteadyDecodeOnly
from mooncake_lab.batching.paged_blocks import PagedBlocks
from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress, Refusal, Segment, check_plan
from mooncake_lab.batching.replay import Iteration, gantt, trace_plans
from mooncake_lab.batching.vllm_v1 import VLLMToday
from mooncake_lab.batching.whole_prompts import VLLM, Orca, RequestLevel, TensorRTLLM

__all__ = [
    "BATCHING_POLICIES",
    "CHUNKED_POLICIES",
    "VLLM",
    "BatchingPolicy",
    "BlockSpace",
    "CountedBlocks",
    "DecodeOnly",
    "DecodingRequest",
    "Instance",
    "Iteration",
    "Limits",
    "Orca",
    "PagedBlocks",
    "Plan",
    "PrefillOnly",
    "Progress",
    "Refusal",
    "RequestLevel",
    "Sarathi",
    "SarathiServe",
    "Segment",
    "SplitFuse",
    "SteadyDecodeOnly",
    "TensorRTLLM",
    "VLLMChunked",
    "VLLMToday",
    "check_plan",
    "gantt",
    "named_policy",
    "trace_plans",
]

BATCHING_POLICIES: Final[Mapping[str, Callable[..., BatchingPolicy]]] = MappingProxyType(
    {
        "request_level": RequestLevel,
        "orca": Orca,
        "vllm": VLLM,
        "vllm_chunked": VLLMChunked,
        "vllm_today": VLLMToday,
        "splitfuse": SplitFuse,
        "tensorrt_llm": TensorRTLLM,
        "sarathi": Sarathi,
        "sarathi_serve": SarathiServe,
        "prefill_only": PrefillOnly,
        "decode_only": DecodeOnly,
    }
)
"""All batching policies by the names of the command line; each takes its knobs by name, all with defaults."""

CHUNKED_POLICIES: Final = tuple(
    name for name, make in BATCHING_POLICIES.items() if hasattr(make(), "chunk_tokens")
)
"""Those that cut prompts to the tokens of an iteration, `chunk_tokens`."""


def named_policy(name: str, *, chunk_tokens: int | None = None) -> BatchingPolicy:
    """The policy of that name, with that many tokens per iteration if it cuts prompts.

    Raises:
        ValueError: when there is no such policy, it never cuts a prompt, or the tokens are fewer than 1.
    """
    if name not in BATCHING_POLICIES:
        raise ValueError(f"unknown batching policy {name!r}; allowed are {', '.join(BATCHING_POLICIES)}")
    if chunk_tokens is None:
        return BATCHING_POLICIES[name]()
    if name not in CHUNKED_POLICIES:
        raise ValueError(
            f"batching policy {name!r} never cuts a prompt, but a chunk of {chunk_tokens} tokens was asked for;"
            f" those that do are {', '.join(CHUNKED_POLICIES)}"
        )
    return BATCHING_POLICIES[name](chunk_tokens=chunk_tokens)
