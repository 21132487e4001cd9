"""Assignment: an admission policy for overload."""

from collections.abc import Callable
from functools import partial
from typing import Final

from mooncake_lab.conductor import AdmissionPolicy, AdmitAll, EarlyRejection, WithinSLO
from mooncake_lab.exercises.admission import ADMISSION_LAWS, goodput
from mooncake_lab.exercises.grading.proxies import RemoteAdmission
from mooncake_lab.exercises.grading.remote import Submission, SubmissionError
from mooncake_lab.exercises.grading.task import Assignment, Task, require


def _policy(submission: Submission) -> RemoteAdmission:
    return RemoteAdmission(submission, submission.make("MyAdmission"))


def _law(name: str, said: str, submission: Submission, seed: int) -> str:
    del seed
    try:
        ADMISSION_LAWS[name](_policy(submission))
    except AssertionError as error:
        raise SubmissionError(str(error)) from error
    return said


def _serves(rival: Callable[[], AdmissionPolicy], share: float, submission: Submission, seed: int) -> str:
    from mooncake_lab.experiments.paper_node import paper_node_latency

    model = paper_node_latency()
    theirs = goodput(rival(), model, seed=1000 + seed)
    mine = goodput(_policy(submission), model, seed=1000 + seed)
    name = type(rival()).__name__
    require(mine >= share * theirs, f"goodput on the hidden crowd is {mine:.3f}; {name} has {theirs:.3f}")
    return f"goodput {mine:.3f} on the hidden crowd, where {name} has {theirs:.3f}"


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
        Task(name="Better than admitting everything", points=3, check=partial(_serves, AdmitAll, 1.1)),
        Task(name="Better than the SLO test of Algorithm 1", points=2, check=partial(_serves, WithinSLO, 1.02)),
        Task(name="As good as early rejection", points=2, check=partial(_serves, EarlyRejection, 0.98)),
    ),
)
"""Ten points."""
