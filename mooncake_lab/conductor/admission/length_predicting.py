"""Request-level prediction: how long each request will decode, learned from those that have finished.

The arXiv report leaves it as future work (§7.4): lengths are hard to predict. Nothing here predicts one length;
it learns how many answers to prompts of similar length go on beyond so many tokens, and adds up chances.
"""

from dataclasses import dataclass
from typing import ClassVar

from mooncake_lab.conductor.admission.foresight import predicted_decode_load
from mooncake_lab.conductor.admission.load import prefill_load, refuse, refuse_at_decode
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
    """Keep room for everybody placed before, also for who will join later. Not in the paper: there, a short prompt
    takes the place that was counted on for a long one, which is refused when its prefill is done."""

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
    """What a decode step takes now on average, to turn seconds into tokens."""
    steps = [estimate.decode_step_s(each.present_requests, each.present_tokens) for each in view.decode]
    return sum(steps) / len(steps)
