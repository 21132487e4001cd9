"""The assignment about capacity: clusters within a budget for hidden traces, and a forecast of what they break."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Final

from mooncake_lab.course.capacity import (
    BUDGET,
    KINDS,
    PRICES,
    TraceRow,
    best_share,
    clear_cases,
    draw_trace,
    problem_of,
    within_limits,
)
from mooncake_lab.course.grading.remote import Submission
from mooncake_lab.course.grading.task import Assignment, Board, HiddenDraw, OpenResult, Task, require, scored

_CASES: Final = 4
"""Of each limit; a forecast by chance is right about all of them once in 256 times."""
HALF, MOST = 0.5, 0.9
"""Shares of the best cluster's requests."""


@cache
def _trace(seed: str, kind: str, speed: float) -> list[TraceRow]:
    return draw_trace(kind, HiddenDraw(seed, kind), speed)


@cache
def _best(seed: str, kind: str, speed: float) -> float:
    return best_share(kind, _trace(seed, kind, speed), BUDGET * speed)


def _choice(submission: Submission, trace: list[TraceRow], budget: float) -> Mapping[str, int]:
    choice = submission.call("choose_cluster", trace, dict(PRICES), budget, gives=dict[str, int])
    problem = problem_of(choice, budget)
    require(not problem, problem)
    return choice


def _affords(submission: Submission, seed: str) -> str:
    for kind in KINDS:
        for part in (0.3, 1, 2.5):
            _choice(submission, _trace(seed, kind, 1), BUDGET * part)
    return "each answer is a cluster within the budget"


def _serves(least: float, speed: float, submission: Submission, seed: str) -> OpenResult:
    """Require a share of what the best cluster serves, for one trace of each kind."""
    shares, told = list[float](), list[str]()
    for kind in KINDS:
        trace = _trace(seed, kind, speed)
        choice = _choice(submission, trace, BUDGET * speed)
        share, late, slow = within_limits(choice, trace)
        best = _best(seed, kind, speed)
        shares.append(share / best)
        told.append(
            f"{kind} {share:.0%} (best {best:.0%}) with {choice['prefill']} + {choice['decode']} nodes and"
            f" {choice['cache_tokens']:,} cached tokens, {late:.0%} late and {slow:.0%} slow"
        )
    said = f"within both limits: {'; '.join(told)}; {least:.0%} of the best are required"
    return scored(min(shares) >= least, said, min(shares))


def _forecasts(submission: Submission, seed: str) -> str:
    for trace, choice, limit in _clear(seed):
        said = submission.call("forecast", trace, dict(choice), gives=str)
        require(
            said == limit,
            f"for a trace with {len(trace)} requests in {trace[-1][0]:.0f} s and {dict(choice)} the forecast is"
            f" {said[:20]!r}, but the simulation breaks the limit of {limit!r}",
        )
    return f"{2 * _CASES} forecasts agree with the simulation"


@cache
def _clear(seed: str) -> tuple[tuple[list[TraceRow], Mapping[str, int], str], ...]:
    return tuple(clear_cases(HiddenDraw(seed), _CASES))


_CLUSTER: Final = ("my-cluster",)

CAPACITY: Final = Assignment(
    "capacity",
    (
        Task("Each answer is a cluster within the budget", 1, _affords, _CLUSTER),
        Task("It serves half of what the best cluster serves", 2, partial(_serves, HALF, 1), _CLUSTER),
        Task("It serves nine tenths of what the best cluster serves", 2, partial(_serves, MOST, 1), _CLUSTER),
        Task(
            "It does so at twice the rate and twice the budget",
            3,
            partial(_serves, MOST, 2),
            _CLUSTER,
            board=Board("share of the requests of the best known cluster, at the kind of trace where it is least"),
        ),
        Task("The forecast names the limit that is broken", 2, _forecasts),
    ),
)
