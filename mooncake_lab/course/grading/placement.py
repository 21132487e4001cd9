"""Assignment: Algorithm 1 from its pseudo-code."""

from collections.abc import Iterator
from functools import partial
from typing import Final

from mooncake_lab.conductor import ClusterView, DecodeView, KVCacheCentric, LatencyEstimator, PrefillView
from mooncake_lab.core import Request
from mooncake_lab.course.grading.proxies import RemotePlacement
from mooncake_lab.course.grading.remote import Submission
from mooncake_lab.course.grading.task import Assignment, HiddenDraw, Task, require
from mooncake_lab.workload.twin import make_twin

_TRIALS: Final = 150
_THRESHOLD: Final = 1.5
_BLOCK_TOKENS: Final = 512


def _policy(submission: Submission) -> RemotePlacement:
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
            PrefillView(
                f"prefill-{i}", draw.choice((0.0, draw.expovariate(0.5))), 0, 0, matched, draw.choice((0, 0, 1, 7))
            )
            for i, matched in enumerate(matches)
        )
        decode = tuple(
            DecodeView(f"decode-{i}", draw.randrange(1, 40), draw.randrange(1, 900_000), 1_330_000)
            for i in range(4)
        )
        keys = tuple(range(1000 * number, 1000 * number + blocks))
        request = Request(id=number, arrival_s=0.0, input_tokens=blocks * _BLOCK_TOKENS, block_keys=keys)
        yield request, ClusterView(0.0, prefill, decode)


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
    from mooncake_lab.testbeds import paper_node_latency

    policy, estimate = _policy(submission), LatencyEstimator(paper_node_latency())
    for request, view in _seen(seed, sharing=sharing):
        expected = KVCacheCentric().place(request, view, estimate)
        found = policy.place(request, view, estimate)
        for field in fields:
            ours, theirs = getattr(expected, field), getattr(found, field)
            equal = abs(ours - theirs) <= 1e-9 * abs(ours) if isinstance(ours, float) else ours == theirs
            require(equal, f"for {_told(request, view)} {field} must be {ours!r}, not {theirs!r}")
    return said


def _told(request: Request, view: ClusterView) -> str:
    nodes = ", ".join(f"{node.name} {node.backlog_s:.2f} s {node.matched_blocks} blocks" for node in view.prefill)
    return f"a prompt of {len(request.block_keys)} blocks and [{nodes}]"


def _serves(submission: Submission, seed: str) -> str:
    from mooncake_lab.chapters.placement.experiment import mean_ttft_s

    first = HiddenDraw(seed).randrange(300, 350)
    twin = make_twin("conversation")  # a grade must not depend on whether the released trace is on this machine
    ours = mean_ttft_s(KVCacheCentric(), first=first, whole=twin)
    theirs = mean_ttft_s(_policy(submission), first=first, whole=twin)
    require(
        theirs <= 1.02 * ours,
        f"the mean TTFT is {theirs:.3f} s with your policy and {ours:.3f} s with Algorithm 1",
    )
    return f"the mean TTFT of {first} requests is {theirs:.3f} s, and {ours:.3f} s with Algorithm 1"


_WHERE: Final = ("prefill",)
_WHAT: Final = ("prefill", "fetch_from", "fetched_tokens", "reused_tokens")

PLACEMENT: Final = Assignment(
    topic="placement",
    tasks=(
        Task(
            name="The policy chooses the right node if no fetch is worthwhile",
            points=3,
            check=partial(_agrees, _WHERE, "every chosen node is right", sharing=False),
        ),
        Task(
            name="The policy chooses the right node and fetch in the balancing branch",
            points=3,
            check=partial(
                _agrees, _WHAT, "every chosen node and every fetch is that of Algorithm 1", sharing=True
            ),
        ),
        Task(
            name="The policy estimates the right TTFT",
            points=2,
            check=partial(_agrees, ("expected_ttft_s",), "every estimate is that of Algorithm 1", sharing=True),
        ),
        Task(name="A whole cluster is served as well as with our policy", points=2, check=_serves),
    ),
)
