"""What is graded: tasks with points, each a question to a submission and a check on hidden workloads.

Policies that live in a submission have the interfaces that stores, engines and simulated clusters know.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import msgspec

from mooncake_lab.batching import Limits, Plan, Progress, Refusal
from mooncake_lab.conductor import ClusterView, Decision, DecodeView, Estimator, Placement, Rejection
from mooncake_lab.core import SLO, BlockKey, Request
from mooncake_lab.course.grading.messages import EstimatorName, Passes, Refuses
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.course.round_estimates import RoundEstimator

_SECRET_BYTES: Final = 16
_LONGEST_REASON: Final = 200
"""Letters of a reason that are kept."""
MOST_PLANS: Final = 2000
"""Iterations after which a batching policy is taken to be stuck; a right one needs about a hundred."""


@dataclass(frozen=True, slots=True)
class OpenResult:
    """What went well in an open task, and how well: a number that a leaderboard can compare."""

    said: str
    score: float


Check: TypeAlias = Callable[[Submission, str], str | OpenResult]
"""A submission and the hidden seed of this task: a sentence on what went well; `SubmissionError` where it did not.

What is drawn with the seed comes from a `HiddenDraw`.
"""


@dataclass(frozen=True, slots=True)
class Board:
    """What the score of an open task is."""

    measures: str
    """What a leaderboard says of the number."""
    optimum: float | None = None
    """The best score that any submission can reach, where it is known."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to get right, all or nothing."""

    name: str
    """What is asked, as a statement."""
    points: int
    check: Check
    cells: tuple[str, ...] = ()
    """The solution cells that it is about; all of them where none is named."""
    board: Board | None = None
    """Of a task with a score."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """An evening's work: a notebook, and the tasks it is graded by."""

    topic: str
    """Stem of its notebook in `notebooks/assignments`."""
    tasks: tuple[Task, ...]

    @property
    def points(self) -> int:
        """The most that can be earned."""
        return sum(task.points for task in self.tasks)


def require(holds: bool, message: str) -> None:
    """Fail a task with a sentence for the student.

    Raises:
        SubmissionError: unless it holds.
    """
    if not holds:
        raise SubmissionError(message)


def scored(holds: bool, said: str, score: float) -> OpenResult:
    """The result of an open task; the score counts on a leaderboard also where the task is not passed.

    Raises:
        SubmissionError: unless it holds.
    """
    if not holds:
        raise SubmissionError(said, score)
    return OpenResult(said, score)


class HiddenDraw(random.Random):
    """Random numbers of a task: a keyed hash that counts.

    The output of Python's own generator can be predicted from enough of its earlier draws.

    Args:
        seed: of the class.
        names: what else tells these draws from others: the topic, the task.
    """

    def __init__(self, seed: str, *names: object) -> None:
        text = "\0".join(map(str, (seed, *names)))
        self._key = hashlib.blake2b(text.encode(), digest_size=_SECRET_BYTES).digest()
        self._count = 0
        super().__init__()

    def seed(self, *given: Any, **named: Any) -> None:
        """Nothing: the key is the seed."""
        del given, named

    def getrandbits(self, k: int, /) -> int:
        """Draw `k` random bits."""
        found = 0
        for _ in range(0, k, 512):
            self._count += 1
            text = self._count.to_bytes(8, "little")
            found = found << 512 | int.from_bytes(hashlib.blake2b(text, key=self._key).digest(), "little")
        return found >> (-k % 512)

    def random(self) -> float:
        """Uniform in [0, 1)."""
        return self.getrandbits(53) / 2**53


@dataclass(frozen=True, slots=True)
class _Remote:
    """An object that a submission made, and its number there."""

    submission: Submission
    number: int


@dataclass(frozen=True, slots=True)
class RemoteEviction(_Remote):
    """An eviction policy (`store.EvictionPolicy`)."""

    def touch(self, key: BlockKey, /) -> None:
        """Tell it of a hit."""
        self.submission.tell(self.number, "touch", key)

    def insert(self, *key_and_position: Any) -> None:
        """Tell it of a new block."""
        self.submission.tell(self.number, "insert", *key_and_position)

    def remove(self, key: BlockKey, /) -> None:
        """Tell it that a block is gone."""
        self.submission.tell(self.number, "remove", key)

    def victim(self, *incoming_and_spared: Any) -> BlockKey:
        """Ask who goes, with as many arguments as there are."""
        return self.submission.ask(self.number, "victim", *incoming_and_spared)

    def __len__(self) -> int:
        return self.submission.ask(self.number, "__len__")

    def __contains__(self, key: object, /) -> bool:
        return self.submission.ask(self.number, "__contains__", key)


@dataclass(slots=True)
class RemoteBatching:
    """A batching policy (`batching.BatchingPolicy`); mutable because its plans are counted.

    Engines and traces keep every plan. What they keep of a submission is bounded: the number of plans, the
    requests in each, and the letters of reasons.
    """

    submission: Submission
    number: int
    plans: int = 0

    def __str__(self) -> str:
        return "your policy"  # errors name the policy, and a student reads them

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Ask what to run next.

        Raises:
            SubmissionError: when it has planned too often, or too much.
        """
        self.plans += 1
        require(
            self.plans <= MOST_PLANS,
            f"after {MOST_PLANS:,} iterations {len(waiting)} requests still wait and {len(running)} run",
        )
        plan: Plan = self.submission.ask(self.number, "plan", waiting, running, limits)
        named = len(plan.segments) + len(plan.preempted) + len(plan.swapped) + len(plan.rejected)
        there = len(waiting) + len(running)
        require(
            named <= there,
            f"the plan decides about {named} requests, but {there} are there; each may be named once",
        )
        return msgspec.structs.replace(
            plan,
            rejected=tuple(Refusal(each.request_id, each.reason[:_LONGEST_REASON]) for each in plan.rejected),
            reason=plan.reason[:_LONGEST_REASON],
        )


@dataclass(frozen=True, slots=True)
class RemotePlacement(_Remote):
    """A placement policy (`conductor.PlacementPolicy`); it has an estimator of its own, equal to ours."""

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """Ask where to."""
        name = _name_of(estimate)
        found: Placement = self.submission.ask(self.number, "place", request, view, estimate=name)
        return replace(found, reason=found.reason[:_LONGEST_REASON])


@dataclass(frozen=True, slots=True)
class RemoteAdmission(_Remote):
    """An admission policy (`conductor.AdmissionPolicy`); what it returns has to fit the question."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """Ask on arrival; the answer must be the proposed placement or a rejection of this request."""
        match self.submission.ask(self.number, "admit", request, proposed, view, slo, estimate=_name_of(estimate)):
            case Passes(placement) if placement == proposed:
                return proposed
            case Refuses(rejection):
                return _checked(rejection, request, "admission")
            case _:
                raise SubmissionError(f"admit changed the placement of request {request.id}; return it as it is")

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """Ask again when the KVCache has arrived."""
        match self.submission.ask(self.number, "double_check", request, decode, slo, estimate=_name_of(estimate)):
            case Refuses(rejection):
                return _checked(rejection, request, "decode")
            case _:
                return None


def _name_of(estimate: Estimator) -> EstimatorName:
    return "round" if isinstance(estimate, RoundEstimator) else "paper"


def _checked(rejection: Rejection, request: Request, stage: str) -> Rejection:
    """A rejection, checked: of this request, at this stage, and with a reason.

    Raises:
        SubmissionError: when it is not.
    """
    if rejection.request_id != request.id:
        raise SubmissionError(f"request {request.id} arrived, but request {rejection.request_id} was refused")
    if rejection.stage != stage:
        raise SubmissionError(
            f"request {request.id} was refused at stage {rejection.stage!r}; the stage must be {stage!r}"
        )
    if not rejection.reason:
        raise SubmissionError(f"request {request.id} was refused without a reason")
    return replace(rejection, reason=rejection.reason[:_LONGEST_REASON])
