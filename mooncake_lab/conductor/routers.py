"""Routers that know nothing of prompts or caches: what stands in front of instances that do not cooperate."""

from dataclasses import dataclass
from typing import ClassVar

from mooncake_lab.conductor.decision import Placement
from mooncake_lab.conductor.estimator import Estimator
from mooncake_lab.conductor.needs import Need
from mooncake_lab.conductor.placement import LoadBalance
from mooncake_lab.conductor.view import ClusterView
from mooncake_lab.core import Request


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The instance that was given the fewest requests so far: every one in its turn."""

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """Whoever's turn it is."""
        return LoadBalance("assigned_requests").place(request, view, estimate)


@dataclass(frozen=True, slots=True)
class FewestRequests:
    """The instance with the fewest requests in it, waiting, prefilling or decoding; ties go to whose turn it is.

    For coupled instances, whose prefill and decode views are of the same instances in the same order.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"coupled_instances"})

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """The least connections, as a load balancer of web servers would count them."""
        pairs = zip(view.decode, view.prefill, strict=True)
        loads = [(here.requests, instance.assigned_requests) for here, instance in pairs]
        chosen = loads.index(min(loads))
        return LoadBalance().place(request, view._replace(prefill=(view.prefill[chosen],)), estimate)
