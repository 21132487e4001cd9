"""Early rejection: the present load of both pools is checked on arrival (arXiv §7.2)."""

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
    """Refuse on arrival when the prefill or the decode pool is full at present.

    The present load is outdated by the time the request decodes. Requests that are still in prefill do not count
    in the load of the decode pool, so the policy admits too many requests for one prefill time and too few for the
    next. The load oscillates (arXiv §7.3).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests"})

    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""
    with_coming: bool = False
    """Count requests that are placed but not yet prefilled as decoding. Not in the paper."""

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
