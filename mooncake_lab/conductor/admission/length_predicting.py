"""Request-level prediction: the decode time of each request, estimated from the requests that have finished.

The arXiv report leaves it as future work (§7.4), because lengths are hard to predict. This module does not predict
a single length. It counts which share of the answers to prompts of similar length exceeds a number of tokens, and
adds up these chances over requests.
"""

from dataclasses import dataclass
from typing import ClassVar

from mooncake_lab.conductor.admission.load import prefill_load, refuse, refuse_at_decode
from mooncake_lab.conductor.admission.load_prediction import predicted_decode_load
from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.lengths import share_longer
from mooncake_lab.conductor.needs import Need
from mooncake_lab.conductor.view import ClusterView, DecodeView, ServedView
from mooncake_lab.core import SLO, Request


@dataclass(frozen=True, slots=True)
class LengthPredicting:
    """Refuse on arrival when the decode pool is expected to be full at the moment this request's prefill ends."""

    needs: ClassVar[frozenset[Need]] = frozenset({"decode_requests", "lengths"})

    threshold: float = 1.0
    """Load at which a pool is full (assumption B21)."""
    reserving: bool = False
    """Count every request that was placed earlier, including those that will join later. Not in the paper: there,
    a short prompt can take the place of a long one that was placed earlier, which is refused after its prefill."""

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection if the prefill pool is full, or the decode pool is expected to be."""
        load = prefill_load(proposed, slo)
        if load >= self.threshold:
            return refuse(request, "prefill", load, self.threshold)
        step_s = _mean_step_s(view, estimate)

        def still_there(served: ServedView, now_s: float, then_s: float) -> float:
            produced = max(0.0, now_s - served.starts_s) / step_s
            return share_longer(
                view.lengths, served.input_tokens, beyond=(then_s - served.starts_s) / step_s, given=produced
            )

        then_s = max(view.taken_at_s, request.arrival_s) + proposed.expected_ttft_s
        load = predicted_decode_load(request, view, then_s, still_there, estimate, slo, reserving=self.reserving)
        return proposed if load < self.threshold else refuse(request, "expected decode", load, self.threshold)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance."""
        return refuse_at_decode(request, decode, estimate, slo, self.threshold)


def _mean_step_s(view: ClusterView, estimate: Estimator) -> float:
    """The present mean duration of a decode step, which converts seconds into tokens."""
    steps = [estimate.decode_step_s(each.present_requests, each.present_tokens) for each in view.decode]
    return sum(steps) / len(steps)
