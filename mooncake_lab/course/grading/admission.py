"""Assignment: an admission policy for overload."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Final

from mooncake_lab.conductor import (
    AdmissionPolicy,
    AfterPrefill,
    ClusterView,
    Decision,
    DecodeView,
    EarlyRejection,
    Estimator,
    Placement,
)
from mooncake_lab.core import SLO, Request
from mooncake_lab.course.admission import ADMISSION_LAWS, goodput
from mooncake_lab.course.grading.proxies import RemoteAdmission
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.course.grading.task import Assignment, HiddenDraw, Task, require


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
        "counting prefills": partial(EarlyRejection, with_coming=True),
    }
)
"""Policies of chapter 11, in the order of their goodput if decode is the bottleneck and prefill is scarce."""


@cache
def rung(name: str, seed: str) -> float:
    """Goodput of a policy of the ladder on the hidden crowd of a seed."""
    from mooncake_lab.testbeds import paper_node_latency

    return goodput(LADDER[name](), paper_node_latency(), seed=HiddenDraw(seed))


def _policy(submission: Submission) -> RemoteAdmission:
    return RemoteAdmission(submission, submission.make("MyAdmission"))


def _law(name: str, said: str, submission: Submission, seed: str) -> str:
    del seed
    try:
        ADMISSION_LAWS[name](_policy(submission))
    except AssertionError as error:
        raise SubmissionError(str(error)) from error
    return said


def _reaches(name: str, submission: Submission, seed: str) -> str:
    """Require a goodput of at least the mean of a rung's and of the next lower rung's.

    If the hidden crowd reverses the order of the two rungs, the goodput of the rung itself is enough.
    """
    from mooncake_lab.testbeds import paper_node_latency

    below = list(LADDER)[list(LADDER).index(name) - 1]
    theirs, less = rung(name, seed), rung(below, seed)
    mine = goodput(_policy(submission), paper_node_latency(), seed=HiddenDraw(seed))
    said = f"goodput on a hidden crowd: your policy {mine:.3f}, {name} {theirs:.3f}, {below} {less:.3f}"
    require(mine >= min((theirs + less) / 2, theirs), said)
    return said


ADMISSION: Final = Assignment(
    topic="admission",
    tasks=(
        Task(
            name="Each decision is about the request that arrived",
            points=1,
            check=partial(
                _law,
                "answers about this request",
                "placements are returned unchanged, and rejections have a reason",
            ),
        ),
        Task(
            name="The same view always gets the same decision",
            points=1,
            check=partial(_law, "decisions replay", "a repeated view got the same decision"),
        ),
        Task(
            name="An idle cluster rejects no request",
            points=1,
            check=partial(_law, "serves an idle cluster", "the idle cluster admitted the request"),
        ),
        *(
            Task(name=f"Goodput as good as that of {name}", points=points, check=partial(_reaches, name))
            for name, points in zip(list(LADDER)[1:], (1, 2, 2, 2), strict=True)
        ),
    ),
)
