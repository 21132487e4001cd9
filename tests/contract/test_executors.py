"""What every executor owes the coordinator: a method for each command, and no command is swallowed."""

import re
from typing import get_args

import msgspec
import pytest

from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.cluster import Attempt, ClusterSpec, Executor, carry_out, events
from mooncake_lab.serving.runtime import ClusterRuntime
from mooncake_lab.simulation import Cluster
from mooncake_lab.simulation.executors import CoupledExecutor, DisaggregatedExecutor

COMMANDS = get_args(events.Command)
METHODS = {kind: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower() for kind in COMMANDS}
A = Attempt(0, 1)


class Remembers:
    """An executor that does nothing but remember."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda command: self.calls.append((name, command))


def some(kind):
    """A command of a kind; what is in it does not matter."""
    return kind(*[None for _ in kind.__struct_fields__])


@pytest.mark.parametrize("kind", COMMANDS)
def test_each_command_calls_the_method_of_its_name(kind):
    """A command is handed to one method, as it is."""
    command, executor = some(kind), Remembers()
    carry_out(command, executor)
    assert executor.calls == [(METHODS[kind], command)]


class Unknown(msgspec.Struct, frozen=True):
    """A command that no executor knows."""

    request_id: int = 0


@pytest.mark.parametrize("command", [Unknown(), None, events.KVLoaded(at_s=0.0, attempt=A)])
def test_an_unknown_command_is_an_error(command):
    """Nothing is called, and nothing is swallowed."""
    executor = Remembers()
    with pytest.raises(AssertionError, match=re.escape(repr(command))):
        carry_out(command, executor)
    assert executor.calls == []


@pytest.mark.parametrize("runtime", [DisaggregatedExecutor, CoupledExecutor, ClusterRuntime])
def test_each_runtime_implements_every_command(runtime):
    """The protocol has a method for each command, and each runtime has its own."""
    declared = {name for name in vars(Executor) if not name.startswith("_")}
    assert declared == set(METHODS.values())
    assert [name for name in declared if getattr(runtime, name) is getattr(Executor, name)] == []


def test_each_kind_of_cluster_has_its_executor():
    """Caches of prefill instances are those of a disaggregated cluster alone."""
    pools = Cluster(ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=1), paper_node_latency()).executor
    assert set(pools.prefix_caches.caches) == set(pools.prefill) == {"prefill-0", "prefill-1"}
    coupled = Cluster(ClusterSpec.coupled(nodes=1, prefix_caching=True), paper_node_latency()).executor
    assert (set(coupled.instances), hasattr(coupled, "prefix_caches")) == ({"coupled-0"}, False)


@pytest.mark.parametrize("spec", [ClusterSpec.small(), ClusterSpec.small_coupled()])
def test_a_simulated_instance_that_is_suspected_is_confirmed(spec):
    """Each of the instances that are asked for answers, and no other."""
    cluster = Cluster(spec, paper_node_latency())
    reported, on = [], cluster._on
    cluster._on = lambda event, now_s: (reported.append(event), on(event, now_s))[1]
    name = next(iter(spec.roles))
    carry_out(events.ConfirmInstances((name,)), cluster.executor)
    cluster.run([])
    assert reported == [events.InstanceConfirmed(at_s=0.0, instance=name)]


def test_a_coupled_instance_is_not_told_to_decode():
    """It decodes what it prefilled by itself, and says so instead of doing nothing."""
    executor = Cluster(ClusterSpec.small_coupled(), paper_node_latency()).executor
    with pytest.raises(ValueError, match="coupled-0 is coupled and decodes by itself"):
        carry_out(events.StartDecode(A, "coupled-0", 0, shows_computed=True), executor)
