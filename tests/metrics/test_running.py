"""The summary of a log that is not kept is the summary of the log."""

import dataclasses

import pytest
from drawn import REQUESTS, clusters, simulated
from families import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import SLO, Arrived
from mooncake_lab.metrics import RunningSummary, run_summary
from mooncake_lab.simulation import Cluster
from mooncake_lab.testbeds import paper_node_latency
from mooncake_lab.workload import load

MODEL, STRICT = paper_node_latency(), SLO(ttft_s=3.0, tbt_s=0.05)


@pytest.mark.parametrize("tbt", ["fast", "arxiv"])
@pytest.mark.parametrize("until_s", [None, 60.0])
@pytest.mark.parametrize("coupled", [False, True])
def test_read_one_by_one_the_numbers_are_the_same(tbt, until_s, coupled):
    """Served, rejected and still running requests count as in `run_summary`, for both papers' definitions."""
    trace = load("conversation").head(250)
    spec = (
        ClusterSpec.coupled(nodes=10)
        if coupled
        else ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=2, device_tokens=60_000)
    )
    kept = Cluster(spec, MODEL).run(trace.requests(), until_s)
    running = RunningSummary(STRICT, tbt)
    streamed = Cluster(spec, MODEL, log=running.read)
    assert streamed.run(trace.requests(), until_s) == []
    expected = run_summary(kept, STRICT, tbt=tbt)
    assert running.numbers() == {name: pytest.approx(value) for name, value in expected.items()}
    if until_s is None:
        assert 0 < expected["effective_request_capacity"] < 1


@settings(max_examples=40, deadline=None)
@given(REQUESTS, clusters(), st.none() | st.floats(0.5, 8.0))
def test_summaries_agree_on_any_cluster(rows, drawn, until_s):
    """Read at once or one record after the other, groups of prefill nodes and deaths included."""
    group = drawn[0].pools[0].prefill_group
    running = RunningSummary(SLO(), prefill_group=group)
    log = simulated(drawn).run(requests_of(rows), until_s)
    for record in log:
        running.read(record)
    if any(isinstance(record, Arrived) for record in log):
        expected = run_summary(log, SLO(), prefill_group=group)
        assert running.numbers() == {name: pytest.approx(value) for name, value in expected.items()}
        alone = run_summary(log, SLO())["prefill_gpu_s_per_request"]
        assert expected["prefill_gpu_s_per_request"] == pytest.approx(group * alone)


def test_nothing_has_no_summary():
    """Without a request there is nothing to summarise."""
    with pytest.raises(ValueError, match="0 requests"):
        RunningSummary(dataclasses.replace(STRICT)).numbers()
