"""Priority classes: as load rises, requests of lower priority are refused first. Not in the papers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mooncake_lab.conductor.admission.early import EarlyRejection
from mooncake_lab.conductor.admission.length_predicting import LengthPredicting
from mooncake_lab.conductor.admission.predictive import PredictiveRejection
from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.needs import needs_of
from mooncake_lab.conductor.view import ClusterView, DecodeView
from mooncake_lab.core import SLO, Request

WithThreshold = EarlyRejection | PredictiveRejection | LengthPredicting
"""A policy that refuses requests at or above a threshold of load."""


@dataclass(frozen=True, slots=True)
class PriorityClasses:
    """Another policy with one threshold per class; the load between two thresholds is kept for the higher class.

    Raises:
        ValueError: when there is no class, or a higher class has a lower threshold.
    """

    inner: WithThreshold = field(default_factory=EarlyRejection)
    thresholds: Sequence[float] = (0.8, 1.0)
    """The thresholds of priorities 0, 1, and so on; higher priorities have the last one."""

    @property
    def needs(self) -> frozenset[str]:
        """Classes of requests, and what the inner policy needs."""
        return needs_of(self.inner) | {"priority"}

    def __post_init__(self) -> None:
        if not self.thresholds or list(self.thresholds) != sorted(self.thresholds):
            raise ValueError(f"thresholds are {self.thresholds!r}; at least one, rising with priority, is needed")

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """The decision of the inner policy at the threshold of the request's class."""
        return self._of(request).admit(request, proposed, view, estimate=estimate, slo=slo)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """The double check of the inner policy at its own threshold, which is the same for every class."""
        return self.inner.double_check(request, decode, estimate=estimate, slo=slo)

    def _of(self, request: Request) -> WithThreshold:
        return replace(self.inner, threshold=self.thresholds[min(request.priority, len(self.thresholds) - 1)])
