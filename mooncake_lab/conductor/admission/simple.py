"""Two policies without a model of overload: serve everything, or what Algorithm 1 expects to meet its limits."""

from dataclasses import dataclass

from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.view import ClusterView, DecodeView
from mooncake_lab.core import SLO, Request


@dataclass(frozen=True, slots=True)
class AdmitAll:
    """Serve everything."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """The placement."""
        del request, view, estimate, slo
        return proposed

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """No rejection."""
        del request, decode, estimate, slo


@dataclass(frozen=True, slots=True)
class WithinSLO:
    """Serve what is expected to meet both limits (FAST'25 Algorithm 1, lines 18-19)."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection that names the limit and the estimate, if one is exceeded."""
        del request, view, estimate
        for name, expected_s, limit_s in (
            ("TTFT", proposed.expected_ttft_s, slo.ttft_s),
            ("TBT", proposed.expected_tbt_s, slo.tbt_s),
        ):
            if expected_s > limit_s:
                return Rejection(
                    request_id=proposed.request_id,
                    stage="admission",
                    reason=f"expected {name} {expected_s:.3g} s exceeds {limit_s:g} s",
                )
        return proposed

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """No rejection: Algorithm 1 decides once, on arrival."""
        del request, decode, estimate, slo
