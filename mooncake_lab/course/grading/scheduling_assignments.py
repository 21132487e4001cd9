"""Assignments about scheduling: chunked prefill on the real engine, Algorithm 1, admission under overload."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean
from types import MappingProxyType
from typing import Final, NamedTuple

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
from mooncake_lab.course.admission import ADMISSION_LAWS, calm_goodput, calm_rejected_share, goodput
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.course.grading.task import (
    MOST_PLANS,
    Assignment,
    Board,
    Check,
    HiddenDraw,
    OpenResult,
    RemoteAdmission,
    RemoteBatching,
    RemotePlacement,
    Task,
    require,
    scored,
)
from mooncake_lab.course.placement import ttft_saved_share

_CHUNK_TOKENS: Final = 16
_LIMITS: Final = Limits(
    max_batch_tokens=256, max_requests=32, block_size_tokens=16, capacity_blocks=4096, free_blocks=4096
)
_FEW_PLACES: Final = replace(_LIMITS, max_requests=4)
"""Fewer places than requests, where the task is about who gets one."""
_REQUESTS: Final = 12
_NEW_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class _Serving:
    """A policy that has to serve every request: this assignment asks for no other decision.

    A policy that refuses everything would otherwise let no decode wait, and keep every chunk small.
    """

    inner: BatchingPolicy

    def __str__(self) -> str:
        return str(self.inner)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """The plan of the other policy.

        Raises:
            SubmissionError: when it rejects, preempts or swaps a request.
        """
        plan = self.inner.plan(waiting, running, limits)
        for name in ("rejected", "preempted", "swapped"):
            require(
                not getattr(plan, name), f"a plan has {name} requests; every request must be served, without that"
            )
        return plan


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


def _chunking(submission: Submission) -> BatchingPolicy:
    return _Serving(RemoteBatching(submission, submission.make("MyChunking", _CHUNK_TOKENS)))


def _iterations(policy: BatchingPolicy, seed: str, limits: Limits = _LIMITS) -> list[Iteration]:
    """All iterations of a policy that serves twelve requests; the first two prompts need several chunks each."""
    draw = HiddenDraw(seed)
    requests = [
        Progress(request_id=i, arrival=i, prompt_tokens=draw.randrange(50 if i < 2 else 1, 120), max_new_tokens=64)
        for i in range(_REQUESTS)
    ]
    outputs = {request.request_id: draw.randrange(4 if request.request_id < 2 else 1, 30) for request in requests}
    enters = {request.request_id: 0 if request.request_id < 2 else draw.randrange(20) for request in requests}
    enters = dict(zip(enters, sorted(enters.values()), strict=True))
    try:
        return trace_plans(policy, requests, limits, outputs, arrives_s=enters, max_iterations=MOST_PLANS)
    except ValueError as error:
        raise SubmissionError(f"an instance could not execute the plan: {error}") from error


def _legal(submission: Submission, seed: str) -> str:
    count = len(_iterations(_chunking(submission), seed, _FEW_PLACES))
    return f"an instance with {_FEW_PLACES.max_requests} places can execute all {count} plans"


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
    """Every decode is in every plan, and chunks are computed beside decodes; serving one by one stalls nobody."""
    log = _iterations(_Labelled(_chunking(submission)), seed)
    for iteration in log:
        decoding = {request.request_id for request in iteration.running if request.decoding}
        waits = decoding - {segment.request_id for segment in iteration.plan.decodes}
        require(
            not waits,
            f"request {min(waits, default=0)} could decode in iteration {iteration.index}, but the plan omits it"
            f"{_seen_by(iteration)}",
        )
    both = sum(bool(each.plan.decodes and each.plan.prefills) for each in log)
    require(both > 0, "no iteration computes a chunk beside decodes, so requests are served one after the other")
    return f"no decode waits for a prompt; {both} of {len(log)} iterations compute a chunk beside decodes"


def _exact_chunks(submission: Submission, seed: str) -> str:
    for iteration in _iterations(_Labelled(_chunking(submission)), seed, _FEW_PLACES):
        expected, left = {}, _CHUNK_TOKENS
        places = _FEW_PLACES.max_requests - len(iteration.running)
        for one in (*(each for each in iteration.running if not each.decoding), *iteration.waiting[:places]):
            if new := min(one.pending_tokens, left):
                expected[one.request_id] = new
                left -= new
        found = {segment.request_id: segment.new_tokens for segment in iteration.plan.prefills}
        told = " ".join(f"{request}:{tokens}" for request, tokens in expected.items())
        require(
            found == expected,
            f"the chunk of iteration {iteration.index} must be {told or 'empty'}: {_CHUNK_TOKENS} tokens where"
            f" there are as many, running requests first, then older ones first{_seen_by(iteration)}",
        )
    return "every chunk is as full as it can be, with the right prompts in the right order"


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
        Task("An instance can execute every plan, and all labels are correct", 1, _legal),
        Task("No iteration computes more prompt tokens than a chunk has", 2, _within_chunk),
        Task("No decode waits, and chunks are computed beside decodes", 3, _no_stall),
        Task("Each chunk has exactly the prompt tokens that the rules say", 2, _exact_chunks),
        Task("The real engine generates the same tokens", 2, _same_tokens),
    ),
)

_TRIALS: Final = 140
_THRESHOLD: Final = 1.5
_BLOCK_TOKENS: Final = 512
_LITTLE_SAVED, _MUCH_SAVED = 0.05, 0.1
"""Shares of the mean TTFT of Algorithm 1 that a better policy has to save."""


def _placement(submission: Submission, name: str = "MyPlacement") -> RemotePlacement:
    return RemotePlacement(submission, submission.make(name))


class Nodes(NamedTuple):
    """What the right answer depends on: of each prefill node, its backlog, matched blocks and transfers."""

    blocks: int
    """Of the prompt."""
    backlogs_s: Sequence[float]
    matched: Sequence[int]
    flows: Sequence[int]


def _equal_matches(draw: HiddenDraw, _number: int) -> Nodes:
    """No fetch is worthwhile, because every node holds the same."""
    blocks, nodes = draw.randrange(4, 120), draw.randrange(2, 9)
    return Nodes(blocks, _backlogs_s(draw, nodes), [blocks // 2] * nodes, [0] * nodes)


def _one_holder(draw: HiddenDraw, _number: int) -> Nodes:
    """Every node holds something else, so that one holds most, and no ratio is the threshold."""
    while True:
        blocks, nodes = draw.randrange(20, 120), draw.randrange(3, 9)
        matched = draw.sample(range(1, blocks), nodes)
        if all(max(matched) != _THRESHOLD * each for each in matched):
            flows = [draw.choice((0, 1, 7)) for _ in range(nodes)]
            return Nodes(blocks, _backlogs_s(draw, nodes), matched, flows)


def _easily_forgotten(draw: HiddenDraw, number: int) -> Nodes:  # noqa: PLR0911  # a line for each case
    """Cases that are easily forgotten, in turns, so that every seed has twenty of each."""
    blocks, nodes = draw.randrange(20, 120), draw.randrange(3, 7)
    backlogs_s, idle, none = _backlogs_s(draw, nodes), [0.0] * nodes, [0] * nodes
    own = draw.randrange(2, blocks // 3, 2)
    match number % 7:
        case 0:  # no node holds anything
            return Nodes(blocks, backlogs_s, none, none)
        case 1:  # one node holds the whole prompt and is busy, the others hold nothing
            return Nodes(blocks, [60.0, *backlogs_s[1:]], [blocks, *none[1:]], none)
        case 2:  # the ratio is the threshold, at which only the last node fetches, since it holds nothing
            return Nodes(blocks, [60.0, *idle[1:]], [3 * own // 2, *[own] * (nodes - 2), 0], none)
        case 3:  # the ratio is just above
            return Nodes(blocks, [60.0, *idle[1:]], [3 * own // 2 + 1, *[own] * (nodes - 1)], none)
        case 4:  # two hold most, and the later one sends less; both are busy
            flows = [draw.randrange(3, 8), draw.randrange(3), *none[2:]]
            return Nodes(blocks, [60.0, 60.0, *backlogs_s[2:]], [own * 2, own * 2, *none[2:]], flows)
        case 5:  # two hold most and send as much, so the earlier one counts
            return Nodes(blocks, [60.0, 60.0, *backlogs_s[2:]], [own * 2, own * 2, *none[2:]], [2, 2, *none[2:]])
        case _:  # all nodes are equal, so the earlier one counts
            return Nodes(blocks, [backlogs_s[0]] * nodes, [own] * nodes, none)


def _backlogs_s(draw: HiddenDraw, nodes: int) -> list[float]:
    """In whole milliseconds, so that a remark can state them exactly."""
    return [draw.choice((0.0, round(draw.expovariate(0.5), 3))) for _ in range(nodes)]


def clusters(kind: Callable[[HiddenDraw, int], Nodes], seed: str) -> Iterator[tuple[Request, ClusterView]]:
    """Hidden requests, and what a policy sees when they arrive."""
    draw = HiddenDraw(seed)
    for number in range(_TRIALS):
        nodes = kind(draw, number)
        prefill = tuple(
            PrefillView(f"prefill-{i}", backlog_s, 0, 0, matched, flows)
            for i, (backlog_s, matched, flows) in enumerate(zip(*nodes[1:], strict=True))
        )
        decode = tuple(
            DecodeView(f"decode-{i}", draw.randrange(1, 40), draw.randrange(1, 900_000), 1_330_000)
            for i in range(4)
        )
        keys = tuple(range(1000 * number, 1000 * number + nodes.blocks))
        tokens = nodes.blocks * _BLOCK_TOKENS
        yield (
            Request(id=number, arrival_s=0.0, input_tokens=tokens, block_keys=keys),
            ClusterView(0.0, prefill, decode),
        )


def _agrees(
    kind: Callable[[HiddenDraw, int], Nodes], fields: tuple[str, ...], said: str, submission: Submission, seed: str
) -> str:
    policy, estimate = _placement(submission), LatencyEstimator(paper_node_latency())
    for request, view in clusters(kind, seed):
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


def _saves(name: str, least: float, submission: Submission, seed: str) -> OpenResult:
    share = ttft_saved_share(_placement(submission, name), HiddenDraw(seed))
    said = f"on a busy cluster the mean TTFT with {name} is {abs(share):.1%} {'below' if share >= 0 else 'above'}"
    asked = f"{least:.0%} below" if least > 0 else f"{-least:.0%} above"
    return scored(
        share >= least,
        f"{said} that with Algorithm 1; it must be at {'least' if least > 0 else 'most'} {asked}",
        share,
    )


def _serves(submission: Submission, seed: str) -> str:
    return _saves("MyPlacement", -0.02, submission, seed).said


_WHAT: Final = ("prefill", "fetch_from", "fetched_tokens", "reused_tokens")
_BETTER: Final = "MyBetterPlacement"
_ALGORITHM: Final = ("my-placement",)

PLACEMENT: Final = Assignment(
    "placement",
    (
        Task(
            "The policy chooses the right node if no fetch is worthwhile",
            1,
            partial(_agrees, _equal_matches, ("prefill",), "every chosen node is right"),
            _ALGORITHM,
        ),
        Task(
            "The policy chooses the right node and fetch if one node holds most",
            2,
            partial(_agrees, _one_holder, _WHAT, "every chosen node and every fetch is that of Algorithm 1"),
            _ALGORITHM,
        ),
        Task(
            "The policy is right about ties, nodes that hold nothing, and the threshold itself",
            2,
            partial(_agrees, _easily_forgotten, _WHAT, "every chosen node and every fetch is that of Algorithm 1"),
            _ALGORITHM,
        ),
        Task(
            "The policy estimates the right TTFT",
            1,
            partial(_agrees, _one_holder, ("expected_ttft_s",), "every estimate is that of Algorithm 1"),
            _ALGORITHM,
        ),
        Task("A whole cluster is served as well as with our Algorithm 1", 1, _serves, _ALGORITHM),
        Task(
            f"Your own policy serves a busy cluster with a mean TTFT {_LITTLE_SAVED:.0%} below Algorithm 1",
            2,
            partial(_saves, _BETTER, _LITTLE_SAVED),
            board=Board("share of the mean TTFT of Algorithm 1 that is saved on a busy cluster"),
        ),
        Task(
            f"Your own policy serves a busy cluster with a mean TTFT {_MUCH_SAVED:.0%} below Algorithm 1",
            1,
            partial(_saves, _BETTER, _MUCH_SAVED),
        ),
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
_CALM_REJECTED_SHARE: Final = 0.01
"""Of a calm stretch, the most that a policy may reject."""


def hidden_goodput(policy: AdmissionPolicy, seed: str) -> float:
    """The mean goodput of a policy on crowds, and on a calm stretch that counts as much as all crowds.

    A policy that rejects without looking at the load may gain in a crowd, and loses in the calm stretch, in which
    every rung serves all requests.
    """
    model = paper_node_latency()
    crowds = fmean(goodput(policy, model, seed=HiddenDraw(f"{seed}/{number}")) for number in range(_CROWDS))
    return fmean((crowds, calm_goodput(policy, model, seed=HiddenDraw(f"{seed}/calm"))))


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


def _spares_the_calm(submission: Submission, seed: str) -> str:
    share = calm_rejected_share(_admission(submission), paper_node_latency(), seed=HiddenDraw(seed))
    said = f"in a calm stretch your policy rejects {share:.1%} of the requests"
    require(share <= _CALM_REJECTED_SHARE, f"{said}; at most {_CALM_REJECTED_SHARE:.0%} are allowed")
    return said


def _reaches(name: str, submission: Submission, seed: str) -> OpenResult:
    """Require a goodput of at least the mean of a rung's and of the next lower rung's.

    If the hidden crowds reverse the order of the two rungs, the goodput of the rung itself is enough.
    """
    below = list(LADDER)[list(LADDER).index(name) - 1]
    theirs, less = rung(name, seed), rung(below, seed)
    mine = hidden_goodput(_admission(submission), seed)
    said = (
        f"mean goodput on hidden crowds and in a calm stretch: your policy {mine:.3f}, {name} {theirs:.3f},"
        f" {below} {less:.3f}"
    )
    return scored(mine >= min((theirs + less) / 2, theirs), said, mine)


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
        Task("A calm cluster rejects at most 1 % of the requests", 1, _spares_the_calm),
        *(
            Task(
                f"Goodput at least halfway to that of {name}",
                points,
                partial(_reaches, name),
                board=Board("mean goodput on crowds and in a calm stretch") if name == list(LADDER)[-1] else None,
            )
            for name, points in zip(list(LADDER)[1:], (1, 2, 4), strict=True)
        ),
    ),
)
