"""What an instance runs next: a pure policy plans each iteration, and `Instance` acts on the plan."""

from mooncake_lab.batching.check import check_plan
from mooncake_lab.batching.chunked_prefill import Sarathi, SarathiServe, SplitFuse, TensorRTLLM, VLLMChunked
from mooncake_lab.batching.instance import BlockSpace, CountedBlocks, Instance
from mooncake_lab.batching.one_stage import DecodeOnly, PrefillOnly
from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress, Refusal, Segment
from mooncake_lab.batching.policies import BATCHING_POLICIES, CHUNKED_POLICIES, named_policy
from mooncake_lab.batching.replay import Iteration, gantt, trace_plans
from mooncake_lab.batching.whole_prompts import VLLM, Orca, RequestLevel

__all__ = [
    "BATCHING_POLICIES",
    "CHUNKED_POLICIES",
    "VLLM",
    "BatchingPolicy",
    "BlockSpace",
    "CountedBlocks",
    "DecodeOnly",
    "Instance",
    "Iteration",
    "Limits",
    "Orca",
    "Plan",
    "PrefillOnly",
    "Progress",
    "Refusal",
    "RequestLevel",
    "Sarathi",
    "SarathiServe",
    "Segment",
    "SplitFuse",
    "TensorRTLLM",
    "VLLMChunked",
    "check_plan",
    "gantt",
    "named_policy",
    "trace_plans",
]
