"""Assignments about scheduling: chunked prefill on the real engine, Algorithm 1, admission under overload."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean
from types import MappingProxyType
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
from mooncake_lab.book.chapters.placement.experiment import mean_ttft_s
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.conductor import (
    AdmissionPolicy,
    AfterPrefill,
    ClusterView,
    Decision,
    DecodeView,
    EarlyRejection,
    Estimator,
    KVCacheCentric,
    LatencyEstimator,
    Placement,
    PrefillView,
)
from mooncake_lab.core import SLO, Request
from mooncake_lab.course.admission import ADMISSION_LAWS, goodput
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.course.grading.task import (
    Assignment,
    Check,
    HiddenDraw,
    RemoteAdmission,
    RemoteBatching,
    RemotePlacement,
    Task,
    require,
)
from mooncake_lab.workload.twin import make_twin

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


def _chunking(submission: Submission) -> RemoteBatching:
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
    count = len(_iterations(_chunking(submission), seed))
    return f"an instance can execute all {count} plans, and every request finishes"


def _within_chunk(submission: Submission, seed: str) -> str:
    for iteration in _iterations(_Labelled(_chunking(submission)), seed):
        tokens = sum(segment.new_tokens for segment in iteration.plan.prefills)
        require(
            tokens <= _CHUNK_TOKENS,
            f"iteration {iteration.index} computes {tokens} prompt tokens; a chunk has {_CHUNK_TOKENS}"
            f"{_seen_by(iteration)}",
        )
    return f"no iteration computes more than {_CHUNK_TOKENS} prompt tokens"


def _seen_by(iteration: Iteration) -> str:
    """What the policy saw, and what it planned."""
    running, waiting = (
        " ".join(f"{one.request_id}:{'decode' if one.decoding else one.pending_tokens}" for one in some)
        for some in (iteration.running, iteration.waiting)
    )
    planned = " ".join(f"{one.request_id}:{one.new_tokens}" for one in iteration.plan.segments)
    return (
        f" (request:pending tokens; running {running or 'none'}, waiting {waiting or 'none'}; planned {planned})"
    )


def _no_stall(submission: Submission, seed: str) -> str:
    for iteration in _iterations(_Labelled(_chunking(submission)), seed):
        decoding = {request.request_id for request in iteration.running if request.decoding}
        waits = decoding - {segment.request_id for segment in iteration.plan.decodes}
        require(
            not waits,
            f"request {min(waits, default=0)} could decode in iteration {iteration.index}, but the plan omits it"
            f"{_seen_by(iteration)}",
        )
    return "no decode waits for a prompt"


def _no_idling(submission: Submission, seed: str) -> str:
    for iteration in _iterations(_Labelled(_chunking(submission)), seed):
        present = (*iteration.running, *iteration.waiting)
        pending = sum(request.pending_tokens for request in present if not request.decoding)
        done = sum(segment.new_tokens for segment in iteration.plan.prefills)
        require(
            done >= min(pending, _CHUNK_TOKENS),
            f"iteration {iteration.index} computes {done} prompt tokens, but {pending} are waiting; a chunk has"
            f" {_CHUNK_TOKENS}{_seen_by(iteration)}",
        )
    return "every chunk is full if enough prompt tokens are waiting"


def _same_tokens(submission: Submission, seed: str) -> str:
    prompts, expected = _reference(seed)
    found = _generate(_Labelled(_chunking(submission)), prompts)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        require(
            ours == theirs,
            f"the prompt {_words(prompts[number])} continues with {_words(ours)}; without chunks it continues with"
            f" {_words(theirs)}",
        )
    return f"{len(prompts)} prompts continue with the same tokens as without chunks"


def _words(tokens: Sequence[int]) -> str:
    return f"[{' '.join(map(str, tokens))}]"


@cache
def _reference(seed: str) -> tuple[list[list[int]], list[list[int]]]:
    draw = HiddenDraw(seed)
    prompts = [[draw.randrange(100) for _ in range(draw.randrange(1, 90))] for _ in range(6)]
    return prompts, _generate(named_policy("vllm"), prompts)


def _generate(policy: BatchingPolicy, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens that the real engine generates under a policy: greedy, float32, with a small random model.

    On the dense backend: the CPU kernels take 100 MiB more in each process that grades, and 270 MiB to compile.
    """
    from mooncake_lab.engine import CoupledEngine, EngineSettings, load_model

    model = load_model("random:lab-tiny", device="cpu", backend="dense", positions=256)
    engine = CoupledEngine(model, policy, EngineSettings(cache_blocks=256))
    try:
        return [list(output.tokens) for output in engine.generate(prompts, max_new_tokens=_NEW_TOKENS)]
    except ValueError as error:
        raise SubmissionError(f"the engine could not execute the plan: {error}") from error


CHUNKED: Final = Assignment(
    "chunked",
    (
        Task("An instance can execute every plan, and all labels are correct", 2, _legal),
        Task("No iteration computes more prompt tokens than a chunk has", 2, _within_chunk),
        Task("No decode waits", 2, _no_stall),
        Task("No chunk is smaller than it needs to be", 1, _no_idling),
        Task("The real engine generates the same tokens", 3, _same_tokens),
    ),
)

_TRIALS: Final = 150
_THRESHOLD: Final = 1.5
_BLOCK_TOKENS: Final = 512


def _placement(submission: Submission) -> RemotePlacement:
    return RemotePlacement(submission, submission.make("MyPlacement"))


def _seen(seed: str, *, sharing: bool) -> Iterator[tuple[Request, ClusterView]]:
    """Random requests and clusters; without `sharing` no fetch is worthwhile, because all matches are equal.

    They include cases that are easily forgotten: no node holds anything; a node holds the whole prompt; the ratio
    is equal to the threshold; the node to fetch from is already sending to other nodes.
    """
    draw = HiddenDraw(seed, sharing)
    for number in range(_TRIALS):
        blocks = draw.randrange(4, 120)
        matches = _matches(draw, number, blocks) if sharing else [blocks // 2] * draw.randrange(2, 9)
        prefill = tuple(
            PrefillView(f"prefill-{i}", _backlog_s(draw), 0, 0, matched, draw.choice((0, 0, 1, 7)))
            for i, matched in enumerate(matches)
        )
        decode = tuple(
            DecodeView(f"decode-{i}", draw.randrange(1, 40), draw.randrange(1, 900_000), 1_330_000)
            for i in range(4)
        )
        keys = tuple(range(1000 * number, 1000 * number + blocks))
        request = Request(id=number, arrival_s=0.0, input_tokens=blocks * _BLOCK_TOKENS, block_keys=keys)
        yield request, ClusterView(0.0, prefill, decode)


def _backlog_s(draw: HiddenDraw) -> float:
    """In whole milliseconds, so that a remark can state it exactly."""
    return draw.choice((0.0, round(draw.expovariate(0.5), 3)))


def _matches(draw: HiddenDraw, number: int, blocks: int) -> list[int]:
    """How many blocks each node holds."""
    nodes = draw.randrange(2, 9)
    match number % 5:
        case 0:
            return [draw.choice((0, blocks)) for _ in range(nodes)]
        case 1:  # the threshold itself, from both sides
            own = 2 * draw.randrange(1, max(blocks // 3, 2))
            near = [int(_THRESHOLD * own), own, own - 1, own + 1, own, 0][:nodes]
            return draw.sample(near, len(near))
        case _:
            return [draw.randrange(blocks) for _ in range(nodes)]


def _agrees(fields: tuple[str, ...], said: str, submission: Submission, seed: str, *, sharing: bool) -> str:
    policy, estimate = _placement(submission), LatencyEstimator(paper_node_latency())
    for request, view in _seen(seed, sharing=sharing):
        expected = KVCacheCentric().place(request, view, estimate)
        found = policy.place(request, view, estimate)
        for field in fields:
            ours, theirs = getattr(expected, field), getattr(found, field)
            equal = abs(ours - theirs) <= 1e-9 * abs(ours) if isinstance(ours, float) else ours == theirs
            require(equal, f"for {_told(request, view)} {field} must be {ours!r}, not {theirs!r}")
    return said


def _told(request: Request, view: ClusterView) -> str:
    """Everything that the right answer depends on."""
    nodes = ", ".join(
        f"{node.name} {node.backlog_s:g} s {node.matched_blocks} blocks {node.outgoing_flows} flows"
        for node in view.prefill
    )
    blocks = f"{len(request.block_keys)} blocks of {request.block_size_tokens} tokens"
    return f"a prompt of {blocks} and [{nodes}]"


def _serves(submission: Submission, seed: str) -> str:
    first = HiddenDraw(seed).randrange(300, 350)
    twin = make_twin("conversation")  # a grade must not depend on whether the released trace is on this machine
    ours = mean_ttft_s(KVCacheCentric(), first=first, whole=twin)
    theirs = mean_ttft_s(_placement(submission), first=first, whole=twin)
    require(
        theirs <= 1.02 * ours,
        f"the mean TTFT of {first} requests is {theirs:.3f} s with your policy and {ours:.3f} s with Algorithm 1",
    )
    return f"the mean TTFT of {first} requests is {theirs:.3f} s, and {ours:.3f} s with Algorithm 1"


_WHAT: Final = ("prefill", "fetch_from", "fetched_tokens", "reused_tokens")

PLACEMENT: Final = Assignment(
    "placement",
    (
        Task(
            "The policy chooses the right node if no fetch is worthwhile",
            3,
            partial(_agrees, ("prefill",), "every chosen node is right", sharing=False),
        ),
        Task(
            "The policy chooses the right node and fetch in the balancing branch",
            3,
            partial(_agrees, _WHAT, "every chosen node and every fetch is that of Algorithm 1", sharing=True),
        ),
        Task(
            "The policy estimates the right TTFT",
            2,
            partial(_agrees, ("expected_ttft_s",), "every estimate is that of Algorithm 1", sharing=True),
        ),
        Task("A whole cluster is served as well as with our policy", 2, _serves),
    ),
)


@dataclass(frozen=True, slots=True)
class DecideOnce:
    """The decisions of another policy on arrival, without a second check when the KVCache has arrived."""

    inner: AdmissionPolicy

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """The decision of the other policy."""
        return self.inner.admit(request, proposed, view, estimate=estimate, slo=slo)

    def double_check(self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO) -> None:
        """Reject nothing."""
        del request, decode, estimate, slo


LADDER: Final[Mapping[str, Callable[[], AdmissionPolicy]]] = MappingProxyType(
    {
        "looking only at prefill": lambda: DecideOnce(AfterPrefill()),
        "looking at the present load of decode": lambda: DecideOnce(EarlyRejection()),
        "rejecting after prefill": AfterPrefill,
        "early rejection": EarlyRejection,
    }
)
"""Policies of chapter 11, in the order of their goodput if decode is the bottleneck and prefill is scarce.

Over 20 crowds, the means of two neighbours lie more than three standard errors apart. Those of early
rejection and of counting prefills do not, so that both have the highest rung.
"""


_CROWDS: Final = 4
"""How many hidden crowds a grade is measured on; on a single one, two rungs are often in the wrong order."""


def hidden_goodput(policy: AdmissionPolicy, seed: str) -> float:
    """The mean goodput of a policy on the hidden crowds of a seed."""
    draws = (HiddenDraw(f"{seed}/{number}") for number in range(_CROWDS))
    return fmean(goodput(policy, paper_node_latency(), seed=draw) for draw in draws)


@cache
def rung(name: str, seed: str) -> float:
    """That of a policy of the ladder."""
    return hidden_goodput(LADDER[name](), seed)


def _admission(submission: Submission) -> RemoteAdmission:
    return RemoteAdmission(submission, submission.make("MyAdmission"))


def _law(name: str, said: str) -> Check:
    """A check of one law; what it says where it holds."""

    def check(submission: Submission, _seed: str) -> str:
        try:
            ADMISSION_LAWS[name](_admission(submission))
        except AssertionError as error:
            raise SubmissionError(str(error)) from error
        return said

    return check


def _reaches(name: str, submission: Submission, seed: str) -> str:
    """Require a goodput of at least the mean of a rung's and of the next lower rung's.

    If the hidden crowds reverse the order of the two rungs, the goodput of the rung itself is enough.
    """
    below = list(LADDER)[list(LADDER).index(name) - 1]
    theirs, less = rung(name, seed), rung(below, seed)
    mine = hidden_goodput(_admission(submission), seed)
    said = f"goodput on hidden crowds: your policy {mine:.3f}, {name} {theirs:.3f}, {below} {less:.3f}"
    require(mine >= min((theirs + less) / 2, theirs), said)
    return said


ADMISSION: Final = Assignment(
    "admission",
    (
        Task(
            "Each decision is about the request that arrived",
            1,
            _law("answers about this request", "placements are returned unchanged, and rejections have a reason"),
        ),
        Task(
            "The same view always gets the same decision",
            1,
            _law("decisions replay", "a repeated view got the same decision"),
        ),
        Task(
            "An idle cluster rejects no request",
            1,
            _law("serves an idle cluster", "the idle cluster admitted the request"),
        ),
        *(
            Task(f"Goodput at least halfway to that of {name}", points, partial(_reaches, name))
            for name, points in zip(list(LADDER)[1:], (1, 2, 4), strict=True)
        ),
    ),
)
