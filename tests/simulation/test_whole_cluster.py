"""The whole cluster against a simulator that goes token by token and moves every byte (`conftest.Reference`)."""

import math
from collections import Counter

import numpy as np
from families import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import ADMISSION_POLICIES, PLACEMENT_POLICIES, KVCacheCentric, needs_of
from mooncake_lab.core import SLO, Finished, Moved, Placed, Prefilled, Rejected
from mooncake_lab.metrics import replicas_at, token_times_s
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import Cluster

PREFILL = PrefillLatency(constant_s=0.05, per_token_s=1e-4 * math.sqrt(3), per_token_squared_s=1e-9)
DECODE = DecodeLatency(0.025, 2e-4, 3e-8)
MODEL = LatencyModel(
    name="by hand",
    shape=model_shape("llama3-70b"),
    prefill=PREFILL,
    decode=DECODE,
    hybrid=HybridLatency.of(PREFILL, DECODE),
    transfer=LinkLatency(1e9 * math.sqrt(2), 1e-3),  # 0.2 ms a token: slower than prefill, so cards are crowded
    dram=LinkLatency(2e10),
    schedule_s=0.01,
)
FETCHING = KVCacheCentric(balancing_threshold=1.1)

# arrivals lie irrationally far from one another: nothing coincides, so that no rounding decides what comes first
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 60).map(lambda n: n * math.sqrt(0.002)),
        st.one_of(st.integers(1, 6000), st.integers(2800, 3000)),
        st.integers(1, 60),
        st.integers(0, 1),
    ),
    min_size=8,
    max_size=40,
    unique_by=lambda row: row[0],
).map(sorted)


@st.composite
def clusters(draw):
    """Single nodes with DRAM, LRU and the present in view, in all else any cluster."""
    named = [make() for make in PLACEMENT_POLICIES.values()]
    policies = [*(one for one in named if "coupled_instances" not in needs_of(one)), *[FETCHING] * 4]
    return ClusterSpec.disaggregated(
        prefill_nodes=draw(st.integers(1, 3)),
        decode_nodes=draw(st.integers(1, 3)),
        cache_tokens=draw(st.sampled_from([600, 8000, 10**6])),
        device_tokens=draw(st.sampled_from([3010, 7000, 10**6])),
        first_shown_by=draw(st.sampled_from(["decode", "prefill"])),
        streams_layers=draw(st.booleans()),
        overtaking=draw(st.booleans()),
        fetch_timeout_s=draw(st.sampled_from([30.0, 0.3])),
        placement=draw(st.sampled_from(policies)),
        admission=draw(st.sampled_from([make() for make in ADMISSION_POLICIES.values()])),
        slo=draw(st.sampled_from([SLO(), SLO(ttft_s=3.0, tbt_s=0.027)])),
    )


def told(log, kind, *fields):
    """What the log says of each request in records of a kind; each request has at most one."""
    found = {r.request_id: tuple(getattr(r, name) for name in fields) for r in log if isinstance(r, kind)}
    assert len(found) == sum(isinstance(r, kind) for r in log)
    return found


def moved(log):
    """Every copy of KVCache: what it is, and when it began and ended."""
    copies = sorted((r for r in log if isinstance(r, Moved)), key=lambda r: (r.request_id, r.destination))
    return [(r.request_id, r.source, r.destination, r.bytes) for r in copies], [
        (r.start_s, r.at_s) for r in copies
    ]


def assert_same_times(found, expected):
    assert found.keys() == expected.keys()
    for key, times in found.items():
        np.testing.assert_allclose(times, expected[key], rtol=0, atol=1e-7)


@settings(max_examples=100, deadline=None)
@given(REQUESTS, clusters())
def test_every_decision_and_every_token_is_that_of_the_slow_simulator(reference, rows, spec):
    """Placements, prefills, copies, refusals, caches and the time of each single token agree."""
    log, slow = Cluster(spec, MODEL).run(requests_of(rows)), reference(spec, MODEL, requests_of(rows))
    where = ("prefill_instance", "decode_instance", "reused_tokens", "fetched_tokens")
    assert told(log, Placed, *where) == told(slow.log, Placed, *where)
    assert told(log, Rejected, "stage") == told(slow.log, Rejected, "stage")
    assert told(log, Finished, "output_tokens") == told(slow.log, Finished, "output_tokens")
    computed = ("instance", "computed_tokens", "reused_tokens")
    assert told(log, Prefilled, *computed) == told(slow.log, Prefilled, *computed)
    for kind, moments in ((Placed, ("at_s",)), (Rejected, ("at_s",)), (Prefilled, ("start_s", "at_s"))):
        assert_same_times(told(log, kind, *moments), told(slow.log, kind, *moments))
    (copies, times), (expected, when) = moved(log), moved(slow.log)
    assert copies == expected
    np.testing.assert_allclose(times, when, rtol=0, atol=1e-7)
    held = Counter(key for node in slow.prefill.values() for key in node.held)
    assert [+found for _, found in replicas_at(log, [math.inf])] == [held]
    assert_same_times(dict(token_times_s(log)), {i: times for i, times in slow.tokens.items() if times})
