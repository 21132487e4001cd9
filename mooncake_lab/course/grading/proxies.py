"""Policies that live in a submission, with the faces that stores, engines and simulated clusters know."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final

from mooncake_lab.batching import Limits, Plan, Progress
from mooncake_lab.conductor import ClusterView, Decision, DecodeView, Estimator, Placement, Rejection
from mooncake_lab.core import SLO, BlockKey, Request
from mooncake_lab.course.grading.messages import Passes, Refuses
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.store.eviction.policy import NOTHING_SPARED

_LONGEST_REASON: Final = 200


@dataclass(frozen=True, slots=True)
class RemoteEviction:
    """An eviction policy (`store.EvictionPolicy`)."""

    submission: Submission
    number: int

    def touch(self, key: BlockKey, /) -> None:
        """Tell it of a hit."""
        self.submission.tell(self.number, "touch", key)

    def insert(self, key: BlockKey, position: int = 0, /) -> None:
        """Tell it of a new block."""
        self.submission.tell(self.number, "insert", key, position)

    def remove(self, key: BlockKey, /) -> None:
        """Tell it that a block is gone."""
        self.submission.tell(self.number, "remove", key)

    def victim(
        self, incoming: BlockKey | None = None, spared: AbstractSet[BlockKey] = NOTHING_SPARED, /
    ) -> BlockKey:
        """Ask who goes."""
        return self.submission.ask(self.number, "victim", incoming, list(spared), gives=int | bytes)

    def __len__(self) -> int:
        return self.submission.ask(self.number, "__len__", gives=int)

    def __contains__(self, key: object, /) -> bool:
        return self.submission.ask(self.number, "__contains__", key, gives=bool)


@dataclass(frozen=True, slots=True)
class RemoteBatching:
    """A batching policy (`batching.BatchingPolicy`)."""

    submission: Submission
    number: int

    def __str__(self) -> str:
        return "your policy"  # errors name the policy, and a student reads them

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Ask what to run next."""
        return self.submission.ask(self.number, "plan", list(waiting), list(running), limits)


@dataclass(frozen=True, slots=True)
class RemotePlacement:
    """A placement policy (`conductor.PlacementPolicy`); it has an estimator of its own, equal to ours."""

    submission: Submission
    number: int

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """Ask where to."""
        del estimate
        return self.submission.ask(self.number, "place", request, view)


@dataclass(frozen=True, slots=True)
class RemoteAdmission:
    """An admission policy (`conductor.AdmissionPolicy`); what it returns has to fit the question."""

    submission: Submission
    number: int

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """Ask on arrival; the answer must be the proposed placement or a rejection of this request."""
        del estimate
        match self.submission.ask(self.number, "admit", request, proposed, view, slo):
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
        del estimate
        match self.submission.ask(self.number, "double_check", request, decode, slo):
            case Refuses(rejection):
                return _checked(rejection, request, "decode")
            case _:
                return None


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
