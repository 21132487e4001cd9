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
from mooncake_lab.exercises.admission import ADMISSION_LAWS, goodput
from mooncake_lab.exercises.grading.hidden import HiddenDraw
from mooncake_lab.exercises.grading.proxies import RemoteAdmission
from mooncake_lab.exercises.grading.remote import Submission, SubmissionError
from mooncake_lab.exercises.grading.task import Assignment, Task, require


@dataclass(frozen=True, slots=True)
class DecideOnce:
    """What another policy decides on arrival, and no second look when the KVCache has arrived."""

    inner: AdmissionPolicy

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """The other's decision."""
        return self.inner.admit(request, proposed, view, estimate=estimate, slo=slo)

    def double_check(self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO) -> None:
        """Nothing against it."""
        del request, decode, estimate, slo


LADDER: Final[Mapping[str, Callable[[], AdmissionPolicy]]] = MappingProxyType(
    {
        "looking only at prefill": lambda: DecideOnce(AfterPrefill()),
        "looking at the present load of decode": lambda: DecideOnce(EarlyRejection()),
        "refusing after prefill": AfterPrefill,
        "early rejection": EarlyRejection,
        "counting prefills": partial(EarlyRejection, with_coming=True),
    }
)
"""What chapter 11 compares, from the least goodput to the most where decode binds and prefill is scarce."""


@cache
def rung(name: str, seed: str) -> float:
    """Goodput of a policy of the ladder on the hidden crowd of a seed."""
    from mooncake_lab.experiments.paper_node import paper_node_latency

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
    """Its goodput is nearer to that of a rung, or above it, than to that of the rung below.

    Where a hidden crowd has the two rungs in the other order, that of the rung itself is enough.
    """
    from mooncake_lab.experiments.paper_node import paper_node_latency

    below = list(LADDER)[list(LADDER).index(name) - 1]
    theirs, less = rung(name, seed), rung(below, seed)
    mine = goodput(_policy(submission), paper_node_latency(), seed=HiddenDraw(seed))
    said = f"goodput {mine:.3f} on a hidden crowd, where {name} has {theirs:.3f} and {below} {less:.3f}"
    require(mine >= min((theirs + less) / 2, theirs), said)
    return said


ADMISSION: Final = Assignment(
    topic="admission",
    title="An admission policy for overload",
    chapter="11_overload",
    tasks=(
        Task(
            name="It answers about the request that came",
            points=1,
            check=partial(
                _law, "answers about this request", "placements pass unchanged, rejections have a reason"
            ),
        ),
        Task(
            name="Its decisions replay",
            points=1,
            check=partial(_law, "decisions replay", "the same view gets the same answer"),
        ),
        Task(
            name="It serves an idle cluster",
            points=1,
            check=partial(_law, "serves an idle cluster", "nobody is refused without need"),
        ),
        *(
            Task(name=f"As good as {name}", points=points, check=partial(_reaches, name))
            for name, points in zip(list(LADDER)[1:], (1, 2, 2, 2), strict=True)
        ),
    ),
)
"""Ten points."""
