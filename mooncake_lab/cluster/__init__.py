"""The life of a request in a cluster, written once for the real and the simulated one: events in, commands out."""

from mooncake_lab.cluster.coordinator import Coordinator, CoordinatorRules
from mooncake_lab.cluster.events import SHARED_STORE, Attempt, Command, Event, Role
from mooncake_lab.cluster.executor import Executor, carry_out
from mooncake_lab.cluster.instances import DecodeLoad, InstanceState, InstanceTable, PrefillLoad
from mooncake_lab.cluster.spec import COUPLED_SYSTEMS, ClusterSpec, CoupledPool, DecodePool, PrefillPool

__all__ = [
    "COUPLED_SYSTEMS",
    "SHARED_STORE",
    "Attempt",
    "ClusterSpec",
    "Command",
    "Coordinator",
    "CoordinatorRules",
    "CoupledPool",
    "DecodeLoad",
    "DecodePool",
    "Event",
    "Executor",
    "InstanceState",
    "InstanceTable",
    "PrefillLoad",
    "PrefillPool",
    "Role",
    "carry_out",
]
