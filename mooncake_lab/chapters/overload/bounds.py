"""What prediction could do at best: a policy that is told the future. It exists outside the policies on purpose.

A policy of the Conductor gets no output length, by type. This one is handed all of them when it is built, which
only an experiment can do; no name on the command line leads to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mooncake_lab.conductor import ClusterView, Decision, DecodeView, Estimator, Placement, Rejection, ServedView
from mooncake_lab.conductor.load import predicted_decode_load, prefill_load, refuse, refuse_at_decode
from mooncake_lab.core import SLO, Request


@dataclass(frozen=True, slots=True, eq=False)
class Oracle:
    """Refuse on arrival when the decode pool will be full, by answers whose lengths are known beforehand."""

    answer_tokens: Mapping[int, int]
    """The future: output length by request id."""
    threshold: float = 1.0

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """A rejection if the prefill pool is full, or the decode pool will be."""
        load = prefill_load(proposed, slo)
        if load >= self.threshold:
            return refuse(request, "prefill", load, self.threshold)
        steps = [estimate.decode_step_s(each.present_requests, each.present_tokens) for each in view.decode]
        step_s = sum(steps) / len(steps)

        def still_there(served: ServedView, now_s: float, then_s: float) -> float:
            del now_s
            return float(then_s - served.starts_s < self.answer_tokens[served.request_id] * step_s)

        then_s = max(view.taken_at_s, request.arrival_s) + proposed.expected_ttft_s
        load = predicted_decode_load(request, view, then_s, still_there, estimate, slo)
        return proposed if load < self.threshold else refuse(request, "known decode", load, self.threshold)

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """A rejection if this request would fill the decode instance."""
        return refuse_at_decode(request, decode, estimate, slo, self.threshold)
