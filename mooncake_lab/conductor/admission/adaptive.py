"""An adaptive threshold: it falls as more of the recent prefills were wasted. Not in the papers."""

from dataclasses import dataclass, field, replace

from mooncake_lab.conductor.admission.early import EarlyRejection
from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.needs import needs_of
from mooncake_lab.conductor.view import ClusterView, DecodeView
from mooncake_lab.core import SLO, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveThreshold:
    """Early rejection whose threshold falls with the share of recent prefills that the double check refused.

    The view contains the share, so the policy has no state of its own.
    """

    inner: EarlyRejection = field(default_factory=EarlyRejection)
    gain: float = 1.0
    """Load by which the threshold falls when all recent prefills were refused."""
    least: float = 0.5
    """The lowest threshold."""

    @property
    def needs(self) -> frozenset[str]:
        """The double checks whose results it reads, and what early rejection needs."""
        return needs_of(self.inner) | {"double_check"}

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """The decision of early rejection at the present threshold."""
        now = replace(self.inner, threshold=self.threshold_in(view))
        return now.admit(request, proposed, view, estimate=estimate, slo=slo)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance; the threshold here does not adapt."""
        return self.inner.double_check(request, decode, estimate=estimate, slo=slo)

    def threshold_in(self, view: ClusterView) -> float:
        """Load at which this view is refused."""
        recent = view.recent
        refused = recent.refused / recent.received if recent.received else 0.0
        return max(self.least, self.inner.threshold - self.gain * refused)
