"""Groups of prefill nodes that compute a prompt together, and the knobs of the cluster."""

import pytest

from mooncake_lab.core import FirstToken, Prefilled, Request, TracedRequest, blocks_for
from mooncake_lab.experiments.paper_node import paper_node_latency
from mooncake_lab.metrics import check_log
from mooncake_lab.perf import CppGroup, cpp_prefill_s
from mooncake_lab.simulation import Cluster, ClusterSpec

MODEL = paper_node_latency()


def alone(input_tokens):
    keys = tuple(range(blocks_for(input_tokens, 512)))
    return [TracedRequest(Request(id=0, arrival_s=0.0, input_tokens=input_tokens, block_keys=keys), 1)]


def prefill_s(spec, input_tokens):
    log = Cluster(spec, MODEL).run(alone(input_tokens))
    assert check_log(log) == ()
    (span,) = [record for record in log if isinstance(record, Prefilled)]
    return span.at_s - span.start_s, next(r.at_s for r in log if isinstance(r, FirstToken))


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_group_takes_what_the_recurrence_says(nodes):
    """A prompt alone on a group takes the time of chunked pipeline parallelism, less than one node needs."""
    took_s, _ = prefill_s(ClusterSpec(prefill_nodes=4, prefill_group=nodes), 100_000)
    group = CppGroup.of(MODEL, nodes=nodes, chunk_tokens=4096)
    assert took_s == pytest.approx(cpp_prefill_s(group, 100_000))
    assert MODEL.prefill.seconds(100_000) / nodes < took_s < MODEL.prefill.seconds(100_000)


def test_smaller_chunks_fill_the_pipeline_sooner():
    """The chunk length is no knob without effect."""
    coarse, fine = (
        prefill_s(ClusterSpec(prefill_nodes=4, prefill_group=4, prefill_chunk_tokens=chunk), 100_000)[0]
        for chunk in (16_384, 2048)
    )
    assert fine < coarse


def test_a_group_is_one_instance_with_the_memory_of_its_nodes():
    """Two groups of four are two instances, each with four caches' room."""
    cluster = Cluster(ClusterSpec(prefill_nodes=8, prefill_group=4, cache_tokens=10_000), MODEL)
    view = cluster.view(alone(512)[0].request)
    assert [p.name for p in view.prefill] == ["prefill-0", "prefill-1"]
    cluster.pool.keep("prefill-0", alone(38_000)[0].request)
    assert cluster.pool.matches(alone(38_000)[0].request) == [blocks_for(38_000, 512), 0]


def test_groups_are_whole():
    """Eight nodes are no groups of three."""
    with pytest.raises(ValueError, match="no whole number of groups of 3"):
        ClusterSpec(prefill_nodes=8, prefill_group=3)
