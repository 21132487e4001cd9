"""A run that is cut at a horizon: what users have by then is in the log, and the log can be checked for it."""

import math

import pytest
from drawn import REALISTIC, REQUESTS, clusters, simulated
from families import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import VLLM, Orca, Sarathi, SarathiServe, SplitFuse, VLLMChunked
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import SLO, Arrived, DecodeStretch, Request, RunEnded, TracedRequest
from mooncake_lab.metrics import check_log, run_summary, token_times_s
from mooncake_lab.simulation import Cluster, Failure, SimulationOptions

HORIZONS = st.floats(0.05, 12.0)
BATCHING = (VLLM(), VLLMChunked(chunk_tokens=512), Sarathi(), SarathiServe(), SplitFuse(), Orca())


def long_answers(count=8, output_tokens=2000):
    """Prompts that arrive together and decode for a long time."""
    keys = [tuple(range(100 * i, 100 * i + 16)) for i in range(count)]
    return [
        TracedRequest(Request(id=i, arrival_s=0.0, input_tokens=8000, block_keys=keys[i]), output_tokens)
        for i in range(count)
    ]


def received(log, until_s):
    """Tokens of each request up to a moment."""
    counted = {request_id: sum(at_s <= until_s for at_s in times) for request_id, times in token_times_s(log)}
    return {request_id: tokens for request_id, tokens in counted.items() if tokens}


def assert_conserved(make, requests, horizon_s):
    """The log that is cut has the tokens that the whole run had given out by then; on the edge either is right."""
    whole, cut = make().run(requests), make().run(requests, until_s=horizon_s)
    assert check_log(cut) == ()
    assert cut[-1].at_s == horizon_s
    assert all(record.at_s <= horizon_s for record in cut)
    logged = received(cut, math.inf)
    assert logged == received(whole, horizon_s + 1e-8) or logged == received(whole, horizon_s - 1e-8)


CLUSTERS = {
    "disaggregated": lambda: Cluster(ClusterSpec.disaggregated(prefill_nodes=8, decode_nodes=1), REALISTIC),
    "pipelined": lambda: Cluster(
        ClusterSpec.disaggregated(prefill_nodes=8, prefill_group=4, decode_nodes=2), REALISTIC
    ),
    "coupled": lambda: Cluster(ClusterSpec.coupled(nodes=1), REALISTIC),
}


@settings(max_examples=40, deadline=None)
@given(REQUESTS, clusters(), HORIZONS)
def test_tokens_are_conserved_at_any_horizon(rows, drawn, horizon_s):
    """Of any cluster, whatever dies in it: the tokens before the horizon, no more and no fewer."""
    assert_conserved(lambda: simulated(drawn), requests_of(rows), horizon_s)


@settings(max_examples=40, deadline=None)
@given(
    rows=REQUESTS,
    batching=st.sampled_from(BATCHING),
    caching=st.booleans(),
    deaths=st.lists(
        st.builds(Failure, st.sampled_from(["coupled-0", "coupled-1"]), st.floats(0.0, 6.0)), max_size=1
    ),
    horizon_s=HORIZONS,
)
def test_coupled_tokens_are_conserved_at_any_horizon(rows, batching, caching, deaths, horizon_s):
    """Of coupled nodes under any policy too, chunks of prompts beside decodes included."""
    spec = ClusterSpec.coupled(
        nodes=2, batching=batching, prefix_caching=caching, device_tokens=8000, max_request_tokens=6000,
        max_batch_tokens=8000,
    )  # fmt: skip
    options = SimulationOptions(failures=tuple(deaths))
    assert_conserved(lambda: Cluster(spec, REALISTIC, options), requests_of(rows), horizon_s)


@pytest.mark.parametrize("make", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("steps", [1, 3, 40])
def test_a_step_that_ends_at_the_horizon(make, steps):
    """Whether a step ends at the very moment of the horizon or next to it, log and count agree."""
    stretch = next(r for r in make().run(long_answers()) if isinstance(r, DecodeStretch) and r.steps > 50)
    grown_s = steps * (steps - 1) / 2 * stretch.step_growth_s
    ends_s = stretch.start_s + steps * stretch.first_step_s + grown_s
    for horizon_s in (math.nextafter(ends_s, 0), ends_s, math.nextafter(ends_s, math.inf), ends_s + 1e-10):
        assert check_log(make().run(long_answers(), until_s=horizon_s)) == ()


def test_a_cut_run_goes_on():
    """A run that is cut and continued gives every request its answer."""
    cluster = Cluster(ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=1), REALISTIC)
    cluster.run(long_answers(3, 200), until_s=3.0)
    cluster.run([], until_s=4.0)
    log = [record for record in cluster.run([]) if not isinstance(record, RunEnded)]
    assert check_log(log) == ()
    assert run_summary(log, SLO())["output_tokens"] == 600


def test_what_arrives_after_the_cut_comes_when_the_run_goes_on():
    """The requests of the first run that were not due yet arrive at their times, between those of the second."""
    rows = requests_of([(float(i), 1000, 5, i % 2) for i in range(8)])
    cluster = Cluster(ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=1), REALISTIC)
    cluster.run([rows[i] for i in (0, 1, 4, 6)], until_s=2.5)
    log = cluster.run([rows[i] for i in (3, 5, 7)])
    arrived = [(record.request_id, record.at_s) for record in log if isinstance(record, Arrived)]
    assert arrived == [(i, float(i)) for i in (0, 1, 3, 4, 5, 6, 7)]
