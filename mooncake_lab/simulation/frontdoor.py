"""The front door of a simulated cluster: requests arrive, the Conductor decides, the log remembers."""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import simpy

from mooncake_lab.conductor import (
    AdmissionPolicy,
    AdmitAll,
    ClusterView,
    Decision,
    Estimator,
    Placement,
    PlacementPolicy,
    Rejection,
    decide,
)
from mooncake_lab.core import SLO, Arrived, Placed, Record, Rejected, Request, TracedRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FrontDoor:
    """What every cluster does with an arriving request, whatever its instances do then."""

    env: simpy.Environment
    placement: PlacementPolicy
    admission: AdmissionPolicy
    estimate: Estimator
    slo: SLO
    schedule_s: float
    """From arrival to decision."""
    view: Callable[[Request], ClusterView]
    place: Callable[[TracedRequest, Placement], None]
    log: Callable[[Record], None]

    def serve(self, requests: Iterable[TracedRequest]) -> None:
        """Let requests arrive, in order of arrival."""
        self.env.process(self._arrivals(iter(requests)))

    def decide(self, traced: TracedRequest, why: str = "", *, again: bool = False) -> None:
        """Ask the Conductor about a request now, and act; `why` stands before its reason in the log.

        Who was let in already and is placed `again`, because an instance died, is refused only if nobody is left.
        """
        request, view = traced.request, self.view(traced.request)
        decision: Decision
        if view.prefill and view.decode:
            decision = decide(
                request,
                view,
                placement=self.placement,
                admission=AdmitAll() if again else self.admission,
                estimate=self.estimate,
                slo=self.slo,
            )
        else:
            living = f"{len(view.prefill)} prefill and {len(view.decode)} decode instances live"
            decision = Rejection(
                request_id=request.id, stage="capacity", reason=f"{living}; one of each is needed"
            )
        if isinstance(decision, Rejection):
            self.log(
                Rejected(
                    at_s=self.env.now,
                    request_id=request.id,
                    stage=decision.stage,
                    reason=why + decision.reason,
                )
            )
            return
        self.log(
            Placed(
                at_s=self.env.now,
                request_id=request.id,
                prefill_instance=decision.prefill,
                decode_instance=decision.decode,
                reused_tokens=decision.reused_tokens,
                fetched_tokens=decision.fetched_tokens,
                reason=why + decision.reason,
            )
        )
        self.place(traced, decision)

    def _arrivals(self, requests: Iterator[TracedRequest]) -> Generator[simpy.Event, Any, None]:
        for traced in requests:
            request = traced.request
            wait_s = request.arrival_s - self.env.now
            if wait_s > 0:
                yield self.env.timeout(wait_s)
            self.log(Arrived(at_s=self.env.now, request_id=request.id, input_tokens=request.input_tokens))
            if self.schedule_s:
                self._later(traced)
            else:
                self.decide(traced)

    def _later(self, traced: TracedRequest) -> None:
        def scheduled(_: simpy.Event) -> None:
            self.decide(traced)

        self.env.timeout(self.schedule_s).callbacks.append(scheduled)
