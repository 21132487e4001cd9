"""A coupled instance that dies loses no request and shows no token twice."""

import math
from dataclasses import replace

import numpy as np
import pytest
from families import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.cluster import COUPLED_SYSTEMS, ClusterSpec
from mooncake_lab.conductor import CacheAware
from mooncake_lab.core import (
    DecodeStretch,
    Finished,
    FirstToken,
    Placed,
)
from mooncake_lab.metrics import check_log, token_times_s
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import Cluster, Failure, SimulationOptions
from mooncake_lab.simulation.coupled import CoupledInstance

STEP_S, PROMPT_S = 0.25, 2.0
MODEL = LatencyModel(
    name="by hand",
    shape=model_shape("llama3-70b"),
    prefill=PrefillLatency(constant_s=0.0, per_token_s=2**-9, per_token_squared_s=0.0),
    decode=DecodeLatency(STEP_S, 0.0, 0.0),
    hybrid=HybridLatency(floor_s=STEP_S, per_token_s=2**-9, per_token_squared_s=0.0, per_context_token_s=0.0),
    transfer=LinkLatency(1e12),
    dram=LinkLatency(1e12),
)
ROWS = st.lists(
    st.tuples(st.floats(0, 20), st.integers(1, 1500), st.integers(1, 40), st.integers(0, 1)),
    min_size=1,
    max_size=12,
).map(sorted)
# nobody comes or dies exactly with an iteration, where rounding would decide what is first
OFF_THE_GRID = st.lists(
    st.tuples(
        st.integers(0, 60).map(lambda n: n * math.sqrt(0.1)),
        st.integers(1, 1500),
        st.integers(1, 40),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda row: row[0],
).map(sorted)
DEATHS = st.lists(st.tuples(st.sampled_from(["coupled-0", "coupled-1"]), st.floats(0, 25)), max_size=3)


def run(rows, deaths, name="vllm", model=MODEL, **knobs):
    policy, caching = COUPLED_SYSTEMS[name]
    settings = {
        "nodes": 3,
        "batching": policy,
        "prefix_caching": caching,
        "device_tokens": 16_000,
        "max_request_tokens": 2000,
        "block_size_tokens": 64,
    }
    options = SimulationOptions(failures=tuple(Failure(*death) for death in deaths))
    return Cluster(ClusterSpec.coupled(**settings | knobs), model, options).run(requests_of(rows, 64))


@pytest.mark.parametrize("name", COUPLED_SYSTEMS)
@settings(max_examples=20, deadline=None)
@given(rows=ROWS, deaths=DEATHS)
def test_no_request_is_lost_and_no_token_shown_twice(name, rows, deaths):
    """Whoever dies when, under any policy, each request ends with all its tokens (I1, I2)."""
    log = run(rows, deaths, name)
    assert check_log(log) == ()
    produced = {i: len(times) for i, times in token_times_s(log)}
    assert produced == {i: outputs for i, (_, _, outputs, _) in enumerate(rows)}
    assert sorted(r.request_id for r in log if isinstance(r, FirstToken)) == list(range(len(rows)))
    assert sorted(r.request_id for r in log if isinstance(r, Finished)) == list(range(len(rows)))
    for _, times in token_times_s(log):
        assert (np.diff(times) > 0).all()
    died_s = {}
    for instance, at_s in deaths:
        died_s[instance] = min(at_s, died_s.get(instance, at_s))
    for record in log:
        if isinstance(record, Placed):
            assert record.at_s <= died_s.get(record.prefill_instance, np.inf)
        if isinstance(record, DecodeStretch):
            start_s = record.start_s + (record.steps - 1) * record.first_step_s
            assert start_s <= died_s.get(record.instance, np.inf) + 1e-9
    assert_placed_again_in_time(log, died_s)


def assert_placed_again_in_time(log, died_s):
    """What was on a dead instance is placed again at once, or when the step ends that decoded there."""
    stretches, placed = [record for record in log if isinstance(record, DecodeStretch)], {}
    for record in log:
        if isinstance(record, Placed):
            before = placed.get(record.request_id)
            if before is not None:
                at_s = died_s[before]
                ends_s = [s.at_s for s in stretches if s.instance == before and s.start_s <= at_s <= s.at_s]
                assert any(record.at_s == pytest.approx(each_s) for each_s in (ends_s or [at_s]))
            placed[record.request_id] = record.prefill_instance


@pytest.mark.parametrize("name", ["vllm_prefix", "vllm_chunked", "sarathi"])
@settings(max_examples=20, deadline=None)
@given(rows=OFF_THE_GRID, died_s=st.integers(0, 60).map(lambda n: n * math.sqrt(0.17)))
def test_a_death_is_the_same_step_by_step(name, rows, died_s):
    """Fast-forwarding changes no token's time where somebody dies, of those who were there or of others."""
    deaths = [("coupled-0", died_s)]
    growing = replace(MODEL, decode=DecodeLatency(STEP_S, 0.0, 2**-12))
    growing = replace(growing, hybrid=replace(MODEL.hybrid, per_context_token_s=2**-12))
    fast = dict(token_times_s(run(rows, deaths, name, model=growing, placement=CacheAware())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoupledInstance, "_steady_steps", lambda *_: 1)
        slow = dict(token_times_s(run(rows, deaths, name, model=growing, placement=CacheAware())))
    assert fast.keys() == slow.keys()
    for request_id, times in slow.items():
        np.testing.assert_allclose(fast[request_id], times, rtol=0, atol=1e-9)


def test_what_was_shown_stays():
    """Two seconds of prompt and 4.5 steps, then a death: the fifth step ends, the rest is computed elsewhere."""
    died_s = PROMPT_S + 4.5 * STEP_S
    log = run([(0.0, 1024, 20, 0)], [("coupled-0", died_s)])
    placed = [record for record in log if isinstance(record, Placed)]
    assert [record.prefill_instance for record in placed] == ["coupled-0", "coupled-1"]
    assert placed[1].reason.startswith("placed again after its instance failed")
    ((_, times),) = token_times_s(log)
    again_s = died_s + STEP_S / 2 + (1024 + 6) / 512
    expected = [PROMPT_S + k * STEP_S for k in range(6)] + [again_s + k * STEP_S for k in range(14)]
    np.testing.assert_allclose(times, expected)


def test_the_conductor_decides_on_the_prompt_with_the_tokens_shown():
    """Who is placed again is placed by prompt and shown tokens together: all of it is computed anew."""
    policy, _ = COUPLED_SYSTEMS["vllm"]
    spec = ClusterSpec.coupled(nodes=2, batching=policy, block_size_tokens=64)
    failures = (Failure("coupled-0", PROMPT_S + 4.5 * STEP_S),)
    cluster = Cluster(spec, MODEL, SimulationOptions(failures=failures, keep_decisions=True))
    cluster.run(requests_of([(0.0, 1024, 100, 0)], 64))
    seen = [one.request for one in cluster.decisions]
    assert [request.input_tokens for request in seen] == [1024, 1024 + 6]
    assert seen[1].block_keys[:16] == seen[0].block_keys
