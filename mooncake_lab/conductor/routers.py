"""Routers that use neither prompts nor caches, as in front of instances that do not cooperate."""

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
    """The instance with the fewest assignments so far, so that instances take turns."""

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """The next instance in turn."""
        return LoadBalance("assigned_requests").place(request, view, estimate)


@dataclass(frozen=True, slots=True)
class FewestRequests:
    """The instance with the fewest requests that wait, prefill or decode; ties go to the fewest assignments.

    For coupled instances, whose prefill and decode views are of the same instances in the same order.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"coupled_instances"})

    def place(self, request: Request, view: ClusterView, estimate: Estimator) -> Placement:
        """The instance with the fewest connections, as a load balancer of web servers counts them."""
        pairs = zip(view.decode, view.prefill, strict=True)
        loads = [(here.requests, instance.assigned_requests) for here, instance in pairs]
        chosen = loads.index(min(loads))
        return LoadBalance().place(request, view.replace(prefill=(view.prefill[chosen],)), estimate)
