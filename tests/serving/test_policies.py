"""What the live cluster's policies get to know: all they need, or the spec refuses them."""

from typing import ClassVar

import numpy as np
import pytest
from quiet_workers import QuietCluster

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import (
    AdaptiveThreshold,
    AdmitAll,
    AfterPrefill,
    EarlyRejection,
    LengthPredicting,
    PredictiveRejection,
    PriorityClasses,
)
from mooncake_lab.core import Request, TracedRequest

ALL = (AdmitAll, AfterPrefill, EarlyRejection, PredictiveRejection, LengthPredicting, AdaptiveThreshold)


class Sees(AdmitAll):
    """Serves everything, and remembers what it saw."""

    seen: ClassVar = []

    def admit(self, request, proposed, view, *, estimate, slo):
        """Yes."""
        del view, estimate, slo
        Sees.seen.append((request.id, request.priority, request.session))
        return proposed


@pytest.mark.parametrize("policy", [AfterPrefill, AdaptiveThreshold, lambda: PriorityClasses(AdaptiveThreshold())])
def test_coupled_workers_have_no_double_check(policy):
    """A policy that decides when KVCache reaches another worker is refused where it never does."""
    with pytest.raises(ValueError, match=r"ClusterSpec.admission is .*does not give \(double_check"):
        ClusterSpec.small_coupled(admission=policy())


@pytest.mark.parametrize("policy", ALL)
def test_two_pools_have_all(policy):
    """Prefill and decode workers give every admission policy what it needs, with classes and without."""
    ClusterSpec.small(admission=policy())
    if policy not in {AdmitAll, AfterPrefill, AdaptiveThreshold}:
        ClusterSpec.small(admission=PriorityClasses(policy()))


def test_priority_and_session_reach_policies(believed):
    """The runtime hands both to admission, also when a request is placed again."""
    Sees.seen.clear()
    quiet = QuietCluster(believed, admission=Sees())
    traced = Request(id=7, arrival_s=0.0, input_tokens=1, block_keys=(0,), session="s", priority=2)
    stream = quiet.submit(np.arange(40, dtype=np.int32), traced=traced)
    assert Sees.seen == [(7, 2, "s")]
    quiet.take_down("decode-0")
    quiet.bring_up("decode-0")
    assert quiet.attempt(stream).n == 2
    request = quiet.runtime.coordinator.requests[7].request
    assert (request.priority, request.session) == (2, "s")


def test_a_trace_keeps_its_classes(open_cluster, traced):
    """Requests of a trace arrive at the policy with the priority and the session that the trace gives them."""
    Sees.seen.clear()
    made = []
    for one in traced(4):
        fields = {name: getattr(one.request, name) for name in one.request.__dataclass_fields__}
        fields |= {"priority": one.request.id % 2, "session": f"s{one.request.id}"}
        made.append(TracedRequest(type(one.request)(**fields), one.output_tokens))
    with open_cluster(admission=Sees()) as live:
        live.run(made)
    assert sorted(Sees.seen) == [(i, i % 2, f"s{i}") for i in range(4)]
