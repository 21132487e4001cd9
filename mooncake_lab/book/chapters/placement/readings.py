"""Other readings of what the papers leave open about the Conductor."""

from dataclasses import dataclass, replace
from typing import Literal

from mooncake_lab.conductor import ClusterView, Estimator, LatencyEstimator, Placement, PlacementPolicy
from mooncake_lab.conductor.decide import needs_of
from mooncake_lab.core import Request

DecodeChoice = Literal["least_tbt", "fewest_requests"]
"""How a decode instance is selected (assumption B05)."""
Transfers = Literal["shared", "alone"]
"""Whether estimates of transfers count those that their sender has under way (assumption B02)."""


@dataclass(frozen=True, slots=True)
class FewestDecodes:
    """Another policy, but a request decodes on the instance with the fewest requests (assumption B05).

    Requests that are still in prefill count. A request whose KVCache fits nowhere goes where the policy sends it.
    """

    inner: PlacementPolicy

    @property
    def needs(self) -> frozenset[str]:
        """What the other policy needs."""
        return needs_of(self.inner)

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """The placement of the other policy with another decode instance."""
        placed, new = self.inner.place(request, view, estimate), request.input_tokens
        fitting = [each for each in view.decode if each.context_tokens + new <= each.capacity_tokens]
        if not fitting:
            return placed
        chosen = min(fitting, key=lambda instance: instance.requests)
        tbt_s = estimate.decode_step_s(chosen.requests + 1, chosen.context_tokens + new)
        return replace(placed, decode=chosen.name, expected_tbt_s=tbt_s)


def with_decode_choice(policy: PlacementPolicy, choice: DecodeChoice) -> PlacementPolicy:
    """A policy that selects decode instances by one of the readings."""
    return FewestDecodes(policy) if choice == "fewest_requests" else policy


@dataclass(frozen=True, slots=True)
class AloneEstimator(LatencyEstimator):
    """Estimates in which a transfer has the network card of its sender to itself (assumption B02)."""

    def transfer_s(self, tokens: int, flows: int) -> float:
        """Bytes over bandwidth, whatever else is being sent."""
        del flows
        return LatencyEstimator.transfer_s(self, tokens, 0)
