"""Early rejection: both pools are asked on arrival, by their load now (arXiv §7.2)."""

from dataclasses import dataclass
from typing import ClassVar

from mooncake_lab.conductor.admission.load import decode_pool_load, prefill_load, refuse, refuse_at_decode
from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.needs import Need
from mooncake_lab.conductor.view import ClusterView, DecodeView
from mooncake_lab.core import SLO, Request


@dataclass(frozen=True, slots=True)
class EarlyRejection:
    """Refuse on arrival when the fuller pool is full now.

    Now is too early: the request decodes only when it is prefilled. What was admitted in the meantime is in
    nobody's load yet, so too much is admitted, then for as long too little: load swings (arXiv §7.3).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests"})

    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""
    with_coming: bool = False
    """Count requests that are placed and not yet prefilled as if they were decoding. Not in the paper."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection if the prefill or the decode pool is full."""
        load = prefill_load(proposed, slo)
        if load >= self.threshold:
            return refuse(request, "prefill", load, self.threshold)
        load = decode_pool_load(request, view, estimate, slo, with_coming=self.with_coming)
        return proposed if load < self.threshold else refuse(request, "decode", load, self.threshold)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance."""
        return refuse_at_decode(request, decode, estimate, slo, self.threshold)
