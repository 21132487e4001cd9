"""Early rejection on predicted load: every request decodes for the same time t_d (arXiv §7.4, system level)."""

from dataclasses import dataclass
from typing import ClassVar

from mooncake_lab.conductor.admission.foresight import predicted_decode_load
from mooncake_lab.conductor.admission.load import prefill_load, refuse, refuse_at_decode
from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.needs import Need
from mooncake_lab.conductor.view import ClusterView, DecodeView, ServedView
from mooncake_lab.core import SLO, Request


@dataclass(frozen=True, slots=True)
class PredictiveRejection:
    """Refuse on arrival when the decode pool will be full at the moment this request's prefill ends."""

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests"})

    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""
    decode_s: float = 8.5
    """t_d: how long every request decodes (assumption B22)."""
    reserving: bool = False
    """Keep room for everybody placed before, also for who will join later. Not in the paper: there, a short prompt
    takes the place that was counted on for a long one, which is refused when its prefill is done."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection if the prefill pool is full, or the decode pool will be."""
        load = prefill_load(proposed, slo)
        if load >= self.threshold:
            return refuse(request, "prefill", load, self.threshold)
        then_s = max(view.taken_at_s, request.arrival_s) + proposed.expected_ttft_s
        load = predicted_decode_load(
            request, view, then_s, self._still_there, estimate, slo, reserving=self.reserving
        )
        return proposed if load < self.threshold else refuse(request, "predicted decode", load, self.threshold)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance."""
        return refuse_at_decode(request, decode, estimate, slo, self.threshold)

    def _still_there(self, served: ServedView, now_s: float, then_s: float) -> float:
        del now_s
        return 1.0 if then_s - served.starts_s < self.decode_s else 0.0
