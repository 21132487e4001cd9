"""How long requests wait for their next tokens under a batching policy of one's own, beside Sarathi-Serve."""

import random
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from mooncake_lab.batching import VLLM, BatchingPolicy, Limits, Progress, SarathiServe, trace_plans
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.core import sum_in_order
from mooncake_lab.perf import HybridLatency

LIMITS: Final = Limits(
    max_batch_tokens=65_536, max_requests=32, block_size_tokens=16, capacity_blocks=200_000, free_blocks=200_000
)
"""Of the node; its memory has room for all requests that may run."""
GAPS_S: Final = MappingProxyType({"busy": 2.2, "calm": 4.5})
"""The mean time between two arrivals at each load."""
ITERATION_S: Final = 0.02
"""What every iteration costs besides computing: the scheduler, and starting the kernels."""
CHUNK_TOKENS: Final = 1024
"""Of Sarathi-Serve. Smaller fixed chunks do not keep up with the busy load."""
LONGEST_TTFT: Final = 1.4
"""The most that the mean TTFT may be, in multiples of that of Sarathi-Serve."""
LEAST_THROUGHPUT: Final = 0.95
"""The least throughput, in multiples of that of Sarathi-Serve."""
MOST_ITERATIONS: Final = 8000
"""Limit for a policy that gets stuck; Sarathi-Serve needs about 2,500."""
_REQUESTS: Final = 60
_MOST_OUTPUT_TOKENS: Final = 80


@dataclass(frozen=True, slots=True)
class BatchingWork:
    """Requests, and what only the clock knows of them."""

    requests: tuple[Progress, ...]
    output_tokens: dict[int, int]
    arrives_s: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLoad:
    """How a policy served a workload."""

    longest_gap_s: float
    """The longest time between two tokens of a request, in the mean over all requests."""
    ttft_s: float
    """The mean over all requests."""
    requests_per_s: float


def node_latency() -> HybridLatency:
    """The node of the paper, with what each iteration costs besides computing."""
    return replace(paper_node_latency().hybrid, constant_s=ITERATION_S)


def long_and_short_prompts(seed: int | random.Random, gap_s: float) -> BatchingWork:
    """Prompts of 300 to 60,000 tokens, evenly on a logarithmic scale, and answers of 20 to 80 tokens.

    One length is drawn from each of as many equal parts of the range as there are requests, and gaps are scaled to
    their mean, so that no seed draws a load of its own.

    Args:
        seed: of the draws, or the draws themselves.
        gap_s: mean time between two arrivals.
    """
    draw = seed if isinstance(seed, random.Random) else random.Random(seed)  # noqa: S311  # a workload
    prompts = [int(300 * 200 ** ((i + draw.random()) / _REQUESTS)) for i in range(_REQUESTS)]
    outputs = [20 + int(60 * (i + draw.random()) / _REQUESTS) for i in range(_REQUESTS)]
    draw.shuffle(prompts)
    draw.shuffle(outputs)
    gaps = [draw.random() for _ in range(_REQUESTS)]
    scale, at_s, arrives_s = _REQUESTS * gap_s / sum_in_order(gaps), 0.0, dict[int, float]()
    for number, gap in enumerate(gaps):
        at_s += scale * gap
        arrives_s[number] = at_s
    requests = tuple(
        Progress(request_id=i, arrival=i, prompt_tokens=tokens, max_new_tokens=_MOST_OUTPUT_TOKENS)
        for i, tokens in enumerate(prompts)
    )
    return BatchingWork(requests, dict(enumerate(outputs)), arrives_s)


def serve(policy: BatchingPolicy, work: BatchingWork, node: HybridLatency) -> ServedLoad:
    """Let a policy serve a workload on one simulated node.

    Raises:
        ValueError: when a plan cannot be executed, or a request is not served.
    """
    log = trace_plans(
        policy,
        work.requests,
        LIMITS,
        work.output_tokens,
        arrives_s=work.arrives_s,
        seconds=lambda plan: node.batch_s(*plan.work),
        max_iterations=MOST_ITERATIONS,
    )
    ttfts_s, shown_s, longest_s = dict[int, float](), dict[int, float](), dict[int, float]()
    for iteration in log:
        for segment in iteration.plan.segments:
            if not segment.emits:
                continue
            request_id = segment.request_id
            if request_id in shown_s:
                gap_s = iteration.end_s - shown_s[request_id]
                longest_s[request_id] = max(longest_s.get(request_id, 0.0), gap_s)
            else:
                ttfts_s[request_id] = iteration.end_s - work.arrives_s[request_id]
            shown_s[request_id] = iteration.end_s
    if len(longest_s) < len(work.requests):
        raise ValueError(f"{len(work.requests) - len(longest_s)} of {len(work.requests)} requests were not served")
    return ServedLoad(
        longest_gap_s=sum_in_order(longest_s.values()) / len(longest_s),
        ttft_s=sum_in_order(ttfts_s.values()) / len(ttfts_s),
        requests_per_s=len(work.requests) / log[-1].end_s,
    )


def slower_than_allowed(mine: ServedLoad, sarathi: ServedLoad) -> str:
    """What a policy gave up for its tail, beyond what is allowed; empty where it kept up with Sarathi-Serve."""
    if mine.requests_per_s < LEAST_THROUGHPUT * sarathi.requests_per_s:
        return (
            f"{mine.requests_per_s:.3f} requests/s; at least {LEAST_THROUGHPUT * sarathi.requests_per_s:.3f}"
            f" ({LEAST_THROUGHPUT:g} times as many as with Sarathi-Serve) are required"
        )
    if mine.ttft_s > LONGEST_TTFT * sarathi.ttft_s:
        return (
            f"a mean TTFT of {mine.ttft_s:.2f} s; at most {LONGEST_TTFT * sarathi.ttft_s:.2f} s"
            f" ({LONGEST_TTFT:g} times that with Sarathi-Serve) are allowed"
        )
    return ""


@dataclass(frozen=True, slots=True)
class BatchingReport:
    """What `compare_batching` found; print it to read it."""

    served: dict[str, dict[str, ServedLoad]]
    """Of each load, how each policy served it: `yours`, `vLLM`, and `Sarathi-Serve`."""

    def ratio(self, rival: str) -> float:
        """Your longest gap in multiples of a rival's, at the load where it is the largest."""
        return max(each["yours"].longest_gap_s / each[rival].longest_gap_s for each in self.served.values())

    def problems(self) -> list[str]:
        """At which load you did not keep up with Sarathi-Serve, and by what."""
        found = {
            load: slower_than_allowed(each["yours"], each["Sarathi-Serve"]) for load, each in self.served.items()
        }
        return [f"at the {load} load your policy has {problem}" for load, problem in found.items() if problem]

    def __str__(self) -> str:
        rows = [
            f"{load}: {name:13} longest gap {1000 * one.longest_gap_s:6.0f} ms, mean TTFT {one.ttft_s:5.2f} s,"
            f" {one.requests_per_s:.3f} requests/s"
            for load, policies in self.served.items()
            for name, one in policies.items()
        ]
        return "\n".join([*rows, *self.problems()])


def compare_batching(policy: BatchingPolicy, seed: int = 7) -> BatchingReport:
    """Let a policy, vLLM and Sarathi-Serve serve the same requests, at a busy and at a calm load."""
    policies = {"yours": policy, "vLLM": VLLM(), "Sarathi-Serve": SarathiServe(chunk_tokens=CHUNK_TOKENS)}
    works = {load: long_and_short_prompts(seed, gap_s) for load, gap_s in GAPS_S.items()}
    return BatchingReport(
        {
            load: {name: serve(each, work, node_latency()) for name, each in policies.items()}
            for load, work in works.items()
        }
    )
