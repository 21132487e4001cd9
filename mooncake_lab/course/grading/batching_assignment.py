"""The assignment about the time between tokens: a batching policy at two loads, beside vLLM and Sarathi-Serve."""

from functools import cache, partial
from typing import Final

from mooncake_lab.batching import VLLM, BatchingPolicy, SarathiServe
from mooncake_lab.course.batching import (
    CHUNK_TOKENS,
    GAPS_S,
    MOST_ITERATIONS,
    ServedLoad,
    long_and_short_prompts,
    node_latency,
    serve,
    slower_than_allowed,
)
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.course.grading.task import (
    Assignment,
    Board,
    HiddenDraw,
    OpenResult,
    RemoteBatching,
    ServingAll,
    Task,
    require,
    scored,
)

_RIVALS: Final = {"vLLM": VLLM(), "Sarathi-Serve": SarathiServe(chunk_tokens=CHUNK_TOKENS)}
HALF: Final = 0.5
"""Of vLLM's longest gap."""
NEAR, BETTER, MUCH_BETTER = 1.1, 0.95, 0.65
"""Of Sarathi-Serve's; no fixed chunk is much better at both loads and keeps up."""


def _served(policy: BatchingPolicy, seed: str, load: str) -> ServedLoad:
    return serve(policy, long_and_short_prompts(HiddenDraw(seed, load), GAPS_S[load]), node_latency())


@cache
def _rival(name: str, seed: str, load: str) -> ServedLoad:
    return _served(_RIVALS[name], seed, load)


def _mine(submission: Submission, seed: str, load: str) -> ServedLoad:
    policy = RemoteBatching(submission, submission.make("MyBatching"), most_plans=MOST_ITERATIONS)
    try:
        return _served(ServingAll(policy), seed, load)
    except ValueError as error:
        raise SubmissionError(f"the node could not execute the plan: {error}") from error


def _serves(submission: Submission, seed: str) -> str:
    for load in GAPS_S:
        _mine(submission, seed, load)
    return "the node executed every plan, and served all requests"


def _shortens(rival: str, most: float, submission: Submission, seed: str) -> OpenResult:
    """Require a longest gap of at most so many times that of a rival, at both loads."""
    ratios, shares, told = list[float](), list[float](), list[str]()
    for load in GAPS_S:
        mine, theirs = _mine(submission, seed, load), _rival(rival, seed, load)
        problem = slower_than_allowed(mine, _rival("Sarathi-Serve", seed, load))
        require(not problem, f"at the {load} load your policy has {problem}")
        ratios.append(mine.longest_gap_s / theirs.longest_gap_s)
        shares.append(1 - mine.longest_gap_s / _rival("Sarathi-Serve", seed, load).longest_gap_s)
        told.append(
            f"at the {load} load {1000 * mine.longest_gap_s:.0f} ms ({rival} {1000 * theirs.longest_gap_s:.0f} ms)"
        )
    said = (
        f"mean longest gap between tokens {', '.join(told)}; at most {most:g} times that of {rival} is asked for"
    )
    return scored(max(ratios) <= most, said, min(shares))


def _task(points: int, rival: str, most: float, board: Board | None = None) -> Task:
    said = "half" if most == HALF else f"{most:g} times"
    return Task(
        f"Requests wait for a token at most {said} as long as with {rival}",
        points,
        partial(_shortens, rival, most),
        board=board,
    )


BATCHING: Final = Assignment(
    "batching",
    (
        Task("The node can execute every plan, and every request is served", 2, _serves),
        _task(2, "vLLM", HALF),
        _task(2, "Sarathi-Serve", NEAR),
        _task(1, "Sarathi-Serve", BETTER),
        _task(
            3,
            "Sarathi-Serve",
            MUCH_BETTER,
            Board("share of the mean longest gap of Sarathi-Serve that is saved, at the load where it is smaller"),
        ),
    ),
)
