"""Early rejection by predicted load, with one decode time t_d for all requests (arXiv §7.4, system level)."""

from dataclasses import dataclass
from typing import ClassVar

from mooncake_lab.conductor.admission.load import prefill_load, refuse, refuse_at_decode
from mooncake_lab.conductor.admission.load_prediction import predicted_decode_load
from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.needs import Need
from mooncake_lab.conductor.view import ClusterView, DecodeView, ServedView
from mooncake_lab.core import SLO, Request


def full_decode_s(
    estimate: Estimator, slo: SLO, *, input_tokens: float, output_tokens: float, capacity_tokens: float
) -> float:
    """t_d of a full decode instance: mean answer times the step at its limit, or with its memory full (B22).

    The prediction matters when the pool is full, and the steps of a full instance take as long as the limit on TBT
    allows. If the memory is full before, the step is that of the largest batch of mean requests that fits, each in
    the middle of its answer.

    Args:
        estimate: the Conductor's latency estimates.
        slo: the limits.
        input_tokens: mean prompt.
        output_tokens: mean answer.
        capacity_tokens: KVCache tokens that fit into the instance.
    """
    requests = max(1.0, capacity_tokens / (input_tokens + output_tokens / 2))
    return output_tokens * min(slo.tbt_s, estimate.decode_step_s(requests, capacity_tokens))


@dataclass(frozen=True, slots=True)
class PredictiveRejection:
    """Refuse on arrival when the decode pool will be full at the moment this request's prefill ends.

    The decode time depends on trace, model and hardware; `full_decode_s` estimates it.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests"})

    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""
    decode_s: float = 8.5
    """t_d: the decode time of every request (assumption B22)."""
    reserving: bool = False
    """Count every request that was placed earlier, including those that will join later. Not in the paper: there,
    a short prompt can take the place of a long one that was placed earlier, which is refused after its prefill."""

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
