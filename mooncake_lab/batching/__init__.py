"""What an instance runs next: a pure policy plans each iteration, and `Instance` acts on the plan."""

from mooncake_lab.batching.batch_builder import BatchBuilder
from mooncake_lab.batching.blocks import known_blocks, worst_case_blocks
from mooncake_lab.batching.check import check_plan
from mooncake_lab.batching.instance import BlockSpace, CountedBlocks, Instance
from mooncake_lab.batching.one_stage import DecodeOnly, PrefillOnly
from mooncake_lab.batching.orca import Orca
from mooncake_lab.batching.plan import BatchingPolicy, Limits, Plan, Progress, Refusal, Segment, SegmentKind
from mooncake_lab.batching.policies import BATCHING_POLICIES, CHUNKED_POLICIES, named_policy
from mooncake_lab.batching.replay import Iteration, ObservedPolicy, gantt, padding_waste, tail_waste, trace_plans
from mooncake_lab.batching.request_level import RequestLevel
from mooncake_lab.batching.sarathi import Sarathi, SarathiServe
from mooncake_lab.batching.splitfuse import SplitFuse
from mooncake_lab.batching.steady import SteadyPolicy, decode_stretch_steps, steady_while_blocks_last
from mooncake_lab.batching.tensorrt_llm import TensorRTLLM
from mooncake_lab.batching.vllm import VLLM, VLLMChunked

__all__ = [
    "BATCHING_POLICIES",
    "CHUNKED_POLICIES",
    "VLLM",
    "BatchBuilder",
    "BatchingPolicy",
    "BlockSpace",
    "CountedBlocks",
    "DecodeOnly",
    "Instance",
    "Iteration",
    "Limits",
    "ObservedPolicy",
    "Orca",
    "Plan",
    "PrefillOnly",
    "Progress",
    "Refusal",
    "RequestLevel",
    "Sarathi",
    "SarathiServe",
    "Segment",
    "SegmentKind",
    "SplitFuse",
    "SteadyPolicy",
    "TensorRTLLM",
    "VLLMChunked",
    "check_plan",
    "decode_stretch_steps",
    "gantt",
    "known_blocks",
    "named_policy",
    "padding_waste",
    "steady_while_blocks_last",
    "tail_waste",
    "trace_plans",
    "worst_case_blocks",
]
