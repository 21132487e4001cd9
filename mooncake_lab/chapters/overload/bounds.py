"""What prediction could do at best: a policy that is told the future. It exists outside the policies on purpose.

A policy of the Conductor gets no output length, by type. This one is handed all of them when it is built, which
only an experiment can do; no name on the command line leads to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mooncake_lab.conductor import ClusterView, Estimator, Placement, RejectByLoad, ServedView
from mooncake_lab.conductor.admission import mean_step_s, predicted_decode_load
from mooncake_lab.core import SLO, Request


@dataclass(frozen=True, slots=True, eq=False)
class Oracle(RejectByLoad):
    """Refuse on arrival when the decode pool will be full, by answers whose lengths are known beforehand."""

    answer_tokens: Mapping[int, int] = field(kw_only=True)
    """The future: output length by request id."""

    def decode_load(
        self, request: Request, proposed: Placement, view: ClusterView, estimate: Estimator, slo: SLO
    ) -> tuple[float, str]:
        """The mean load over the decode instances when this request's prefill ends."""
        step_s = mean_step_s(view, estimate)

        def still_decodes(served: ServedView, then_s: float) -> float:
            return float(then_s - served.starts_s < self.answer_tokens[served.request_id] * step_s)

        return predicted_decode_load(request, proposed, view, still_decodes, estimate, slo), "known decode"
