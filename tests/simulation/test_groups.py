"""Groups of prefill nodes that compute a prompt together, and the knobs of the cluster."""

import pytest

from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import FirstToken, Prefilled, Request, TracedRequest, blocks_for
from mooncake_lab.metrics import check_log, prefill_gpu_s
from mooncake_lab.perf import CppGroup, cpp_finish_s, cpp_prefill_s
from mooncake_lab.simulation import Cluster

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
    took_s, _ = prefill_s(ClusterSpec.disaggregated(prefill_nodes=4, prefill_group=nodes), 100_000)
    group = CppGroup.of(MODEL, nodes=nodes, chunk_tokens=4096)
    assert took_s == pytest.approx(cpp_prefill_s(group, 100_000))
    assert MODEL.prefill.seconds(100_000) / nodes < took_s < MODEL.prefill.seconds(100_000)


def test_a_group_is_one_instance_with_the_memory_of_its_nodes():
    """Two groups of four are two instances, each with four caches' room."""
    cluster = Cluster(ClusterSpec.disaggregated(prefill_nodes=8, prefill_group=4, cache_tokens=10_000), MODEL)
    view = cluster.view(alone(512)[0].request)
    assert [p.name for p in view.prefill] == ["prefill-0", "prefill-1"]
    request = alone(38_000)[0].request
    cluster.executor.prefix_caches.keep("prefill-0", request)
    assert [seen.matched_blocks for seen in cluster.view(request).prefill] == [blocks_for(38_000, 512), 0]


def test_the_pipeline_stays_full():
    """The next prompt enters when the first node is done with this one, and ends when the recurrence says.

    The time in which both are computed counts once.
    """
    spec = ClusterSpec.disaggregated(prefill_nodes=4, prefill_group=4, decode_nodes=1)
    keys = [tuple((i, k) for k in range(blocks_for(60_000, 512))) for i in range(2)]
    prompts = [Request(id=i, arrival_s=0.0, input_tokens=60_000, block_keys=keys[i]) for i in range(2)]
    log = Cluster(spec, MODEL).run([TracedRequest(prompt, 1) for prompt in prompts])
    first, second = (record for record in log if isinstance(record, Prefilled))
    group = CppGroup.of(MODEL, nodes=4, chunk_tokens=4096)
    done_s = [column[-1] for column in cpp_finish_s(group, 60_000)]
    assert second.start_s - first.start_s == pytest.approx(done_s[0])
    free_s = [each_s - done_s[0] for each_s in done_s]
    assert second.at_s - second.start_s == pytest.approx(cpp_finish_s(group, 60_000, free_s=free_s)[-1][-1])
    assert second.at_s - first.start_s < 1.95 * done_s[-1]
    assert prefill_gpu_s(log) == pytest.approx(second.at_s - first.start_s)
    assert check_log(log) == ()
