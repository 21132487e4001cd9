"""The interface of admission policies: a check on arrival and one when the KVCache has arrived (arXiv §3, §7)."""

from typing import Protocol

from mooncake_lab.conductor.decision import Decision, Placement, Rejection
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.view import ClusterView, DecodeView
from mooncake_lab.core import SLO, Request


class AdmissionPolicy(Protocol):
    """Accepts a proposed placement or rejects it with a reason, and lets the decode instance refuse later.

    A policy that needs more than loads declares it in an attribute `needs` (`conductor.needs`).
    """

    def admit(
        self, request: Request, proposed: Placement, view: ClusterView, *, estimate: Estimator, slo: SLO
    ) -> Decision:
        """The placement itself or a rejection, when the request arrives."""
        ...

    def double_check(
        self, request: Request, decode: DecodeView, *, estimate: Estimator, slo: SLO
    ) -> Rejection | None:
        """Whether the decode instance refuses a request whose prefill is done (arXiv §3, step 4).

        Args:
            request: whose KVCache has just arrived.
            decode: the instance now, without this request.
            estimate: the Conductor's latency estimates.
            slo: the limits.
        """
        ...
