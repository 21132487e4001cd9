"""All batching policies by the names of the command line."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final

from mooncake_lab.batching.one_stage import DecodeOnly, PrefillOnly
from mooncake_lab.batching.orca import Orca
from mooncake_lab.batching.plan import BatchingPolicy
from mooncake_lab.batching.request_level import RequestLevel
from mooncake_lab.batching.sarathi import Sarathi, SarathiServe
from mooncake_lab.batching.splitfuse import SplitFuse
from mooncake_lab.batching.tensorrt_llm import TensorRTLLM
from mooncake_lab.batching.vllm import VLLM, VLLMChunked

BATCHING_POLICIES: Final[Mapping[str, Callable[[], BatchingPolicy]]] = MappingProxyType(
    {
        "request_level": RequestLevel,
        "orca": Orca,
        "vllm": VLLM,
        "vllm_chunked": VLLMChunked,
        "splitfuse": SplitFuse,
        "tensorrt_llm": TensorRTLLM,
        "tensorrt_llm_max_utilization": partial(TensorRTLLM, capacity="max_utilization"),
        "sarathi": Sarathi,
        "sarathi_serve": SarathiServe,
        "prefill_only": PrefillOnly,
        "decode_only": DecodeOnly,
    }
)
"""Each with the knobs it has by default."""

CHUNKED_POLICIES: Final[Mapping[str, Callable[[int], BatchingPolicy]]] = MappingProxyType(
    {
        "vllm_chunked": lambda chunk_tokens: VLLMChunked(chunk_tokens=chunk_tokens),
        "splitfuse": lambda chunk_tokens: SplitFuse(chunk_tokens=chunk_tokens),
        "tensorrt_llm": lambda chunk_tokens: TensorRTLLM(chunk_tokens=chunk_tokens),
        "tensorrt_llm_max_utilization": lambda chunk_tokens: TensorRTLLM("max_utilization", chunk_tokens),
        "sarathi": lambda chunk_tokens: Sarathi(chunk_tokens=chunk_tokens),
        "sarathi_serve": lambda chunk_tokens: SarathiServe(chunk_tokens=chunk_tokens),
        "prefill_only": lambda chunk_tokens: PrefillOnly(chunk_tokens=chunk_tokens),
    }
)
"""Those that can cut a prompt, by the tokens of an iteration."""


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
    return CHUNKED_POLICIES[name](chunk_tokens)
