"""The baseline: each stage checks its own load when the request reaches it (arXiv §7.2)."""

from dataclasses import dataclass
from typing import ClassVar

from mooncake_lab.conductor.admission.load import prefill_load, refuse, refuse_at_decode
from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.needs import Need
from mooncake_lab.conductor.view import ClusterView, DecodeView
from mooncake_lab.core import SLO, Request


@dataclass(frozen=True, slots=True)
class AfterPrefill:
    """Prefill what the prefill pool can take, and check the decode instance only after prefill.

    The prefill of a request that is refused then is wasted.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"double_check"})

    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection if the prefill pool is full."""
        del view, estimate
        load = prefill_load(proposed, slo)
        return proposed if load < self.threshold else refuse(request, "prefill", load, self.threshold)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance."""
        return refuse_at_decode(request, decode, estimate, slo, self.threshold)
