"""The decision of the Conductor; the simulated and the live cluster call the same function."""

from dataclasses import dataclass

from mooncake_lab.conductor.admission import AdmissionPolicy
from mooncake_lab.conductor.decision import Decision, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.placement import PlacementPolicy
from mooncake_lab.conductor.view import ClusterView
from mooncake_lab.core import SLO, Request


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision and what it rests on: `decide` gives it again."""

    request: Request
    view: ClusterView
    decision: Decision
    is_first: bool
    """Whether admission was asked: a request that was accepted once is accepted."""


def decide(
    request: Request,
    view: ClusterView,
    *,
    placement: PlacementPolicy,
    admission: AdmissionPolicy,
    estimate: Estimator,
    slo: SLO,
) -> Decision:
    """Place a request, then ask whether to admit it there (FAST'25 Algorithm 1).

    The same request, view and policies give the same decision, also when a log is replayed. A prompt whose KVCache
    fits on no decode instance is rejected before the policies are asked, because it can never be decoded.

    Raises:
        ValueError: when the view has no prefill or no decode instance.
    """
    if not view.prefill or not view.decode:
        raise ValueError(
            f"request {request.id} cannot be placed: the view has {len(view.prefill)} prefill and"
            f" {len(view.decode)} decode instances; at least one of each is needed"
        )
    if not any(request.input_tokens <= instance.capacity_tokens for instance in view.decode):
        most = max(instance.capacity_tokens for instance in view.decode)
        return Rejection(
            request_id=request.id,
            stage="capacity",
            reason=f"a prompt of {request.input_tokens} tokens; no decode instance holds more than {most}",
        )
    proposed = placement.place(request, view, estimate)
    return admission.admit(request, proposed, view, estimate=estimate, slo=slo)
