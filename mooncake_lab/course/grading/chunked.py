"""Assignment: chunked prefill in the same iterations as decodes, correct on the real engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from msgspec.structs import replace

from mooncake_lab.batching import (
    BatchingPolicy,
    Iteration,
    Limits,
    Plan,
    Progress,
    Segment,
    named_policy,
    trace_plans,
)
from mooncake_lab.course.grading.proxies import RemoteBatching
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.course.grading.task import Assignment, HiddenDraw, Task, require

_CHUNK_TOKENS: Final = 16
_LIMITS: Final = Limits(
    max_batch_tokens=256, max_requests=32, block_size_tokens=16, capacity_blocks=4096, free_blocks=4096
)
_NEW_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class _Labelled:
    """Another policy with corrected labels of its segments; which tokens it computes is not changed.

    A policy with a wrong label therefore loses only the points of the task on labels.
    """

    inner: BatchingPolicy

    def __str__(self) -> str:
        return str(self.inner)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """The plan of the other policy, with correct labels."""
        plan = self.inner.plan(waiting, running, limits)
        known = {request.request_id: request for request in (*waiting, *running)}
        segments = tuple(_labelled(segment, known.get(segment.request_id)) for segment in plan.segments)
        return replace(plan, segments=segments)


def _labelled(segment: Segment, request: Progress | None) -> Segment:
    if request is None:
        return segment
    kind = "decode" if request.decoding else "prefill"
    emits = segment.new_tokens == request.pending_tokens
    return Segment(segment.request_id, kind, segment.new_tokens, request.cached_tokens, emits)


def _policy(submission: Submission) -> RemoteBatching:
    return RemoteBatching(submission, submission.make("MyChunking", _CHUNK_TOKENS))


def _iterations(policy: BatchingPolicy, seed: str) -> list[Iteration]:
    draw = HiddenDraw(seed)
    requests = [
        Progress(request_id=i, arrival=i, prompt_tokens=draw.randrange(1, 120), max_new_tokens=64)
        for i in range(12)
    ]
    outputs = {request.request_id: draw.randrange(1, 30) for request in requests}
    enters = {request.request_id: draw.randrange(20) for request in requests}
    try:
        return trace_plans(policy, requests, _LIMITS, outputs, arrives_s=enters, max_iterations=2000)
    except ValueError as error:
        raise SubmissionError(f"an instance could not execute the plan: {error}") from error


def _legal(submission: Submission, seed: str) -> str:
    count = len(_iterations(_policy(submission), seed))
    return f"an instance can execute all {count} plans, and every request finishes"


def _within_chunk(submission: Submission, seed: str) -> str:
    for iteration in _iterations(_Labelled(_policy(submission)), seed):
        tokens = sum(segment.new_tokens for segment in iteration.plan.prefills)
        require(
            tokens <= _CHUNK_TOKENS,
            f"iteration {iteration.index} computes {tokens} prompt tokens; a chunk has {_CHUNK_TOKENS}",
        )
    return f"no iteration computes more than {_CHUNK_TOKENS} prompt tokens"


def _no_stall(submission: Submission, seed: str) -> str:
    for iteration in _iterations(_Labelled(_policy(submission)), seed):
        decoding = {request.request_id for request in iteration.running if request.decoding}
        waits = decoding - {segment.request_id for segment in iteration.plan.decodes}
        require(
            not waits,
            f"request {min(waits, default=0)} could decode in iteration {iteration.index}, but the plan omits it",
        )
    return "no decode waits for a prompt"


def _no_idling(submission: Submission, seed: str) -> str:
    for iteration in _iterations(_Labelled(_policy(submission)), seed):
        present = (*iteration.running, *iteration.waiting)
        pending = sum(request.pending_tokens for request in present if not request.decoding)
        done = sum(segment.new_tokens for segment in iteration.plan.prefills)
        require(
            done >= min(pending, _CHUNK_TOKENS),
            f"iteration {iteration.index} computes {done} prompt tokens, but {pending} are waiting",
        )
    return "every chunk is full if enough prompt tokens are waiting"


def _same_tokens(submission: Submission, seed: str) -> str:
    prompts, expected = _reference(seed)
    found = _generate(_Labelled(_policy(submission)), prompts)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        require(
            ours == theirs, f"prompt {number} continues with {ours}; without chunks it continues with {theirs}"
        )
    return f"{len(prompts)} prompts continue with the same tokens as without chunks"


@cache
def _reference(seed: str) -> tuple[list[list[int]], list[list[int]]]:
    draw = HiddenDraw(seed)
    prompts = [[draw.randrange(100) for _ in range(draw.randrange(1, 90))] for _ in range(6)]
    return prompts, _generate(named_policy("vllm"), prompts)


def _generate(policy: BatchingPolicy, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens that the real engine generates under a policy: greedy, float32, with a small random model."""
    from mooncake_lab.engine import CoupledEngine, EngineSettings, load_model

    model = load_model("random:lab-tiny", device="cpu", positions=256)
    engine = CoupledEngine(model, policy, EngineSettings(cache_blocks=256))
    try:
        return [list(output.tokens) for output in engine.generate(prompts, max_new_tokens=_NEW_TOKENS)]
    except ValueError as error:
        raise SubmissionError(f"the engine could not execute the plan: {error}") from error


CHUNKED: Final = Assignment(
    topic="chunked",
    tasks=(
        Task(name="An instance can execute every plan, and all labels are correct", points=2, check=_legal),
        Task(name="No iteration computes more prompt tokens than a chunk has", points=2, check=_within_chunk),
        Task(name="No decode waits", points=2, check=_no_stall),
        Task(name="No chunk is smaller than it needs to be", points=1, check=_no_idling),
        Task(name="The real engine generates the same tokens", points=3, check=_same_tokens),
    ),
)
