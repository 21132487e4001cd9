"""What nodes share, and who waits for whom: KVCache, links into GPU memory, iterations."""

from dataclasses import replace

import pytest
from drawn import REALISTIC, make_model
from families import requests_of

from mooncake_lab.conductor import KVCacheCentric, LoadBalance, Placement
from mooncake_lab.core import FirstToken, Moved, Prefilled
from mooncake_lab.perf import LinkLatency, model_shape
from mooncake_lab.simulation import Cluster, ClusterSpec, Failure

KV_BYTES = model_shape("llama3-70b").kv_bytes_per_token
LONG = 2048


def test_prompts_that_wait_together_are_packed_everywhere():
    """Prompts that wait when an iteration ends are computed in one, on a coupled and on a prefill node."""
    requests = requests_of([(0.0, 4000, 1, 0), (0.1, 64, 1, 1), (0.1, 64, 1, 2), (0.1, 64, 1, 3)])
    clusters = (
        Cluster(ClusterSpec.coupled(nodes=1), REALISTIC),
        Cluster(ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1, max_batch_tokens=8192), REALISTIC),
    )
    for cluster in clusters:
        spans = {(r.start_s, r.at_s) for r in cluster.run(requests) if isinstance(r, Prefilled)}
        assert len(spans) == 2


@pytest.mark.xfail(
    strict=True, reason="loads from host memory into GPU memory do not share the link of their node"
)
def test_loads_into_gpu_memory_share_a_link():
    """Two KVCaches that come to one decode node at once take as long as both, one after the other or together."""
    model = replace(make_model(constant_s=1.0), dram=LinkLatency(KV_BYTES * LONG))  # one second each
    requests = requests_of([(0.0, LONG, 2, 0), (0.0, LONG, 2, 1)])
    spec = ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=1, placement=LoadBalance())
    log = Cluster(spec, model).run(requests)
    assert max(r.at_s for r in log if isinstance(r, FirstToken)) >= 3.0 - 1e-6


class FetchTwice:
    """Request 0 on the first node, all others on the second, which fetch their prefix from the first."""

    def place(self, request, view, estimate):
        del view, estimate
        fetches = request.id > 0
        return Placement(
            request_id=request.id, prefill=f"prefill-{int(fetches)}", decode="decode-0",
            reused_tokens=LONG if fetches else 0, fetched_tokens=LONG if fetches else 0,
            fetch_from="prefill-0" if fetches else None, expected_ttft_s=0.0, expected_tbt_s=0.0, reason="",
        )  # fmt: skip


@pytest.mark.xfail(strict=True, reason="a block that is on its way to a node already is copied there once more")
def test_a_block_is_copied_to_a_node_once():
    """Two requests that want the same prefix on the same node wait for one copy."""
    requests = requests_of([(0.0, LONG, 1, 0), (50.0, LONG + 100, 1, 0), (50.0, LONG + 200, 1, 0)])
    spec = ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=1, placement=FetchTwice())
    log = Cluster(spec, make_model(constant_s=0.1, bytes_per_s=KV_BYTES * 500)).run(requests)
    copied = sum(r.bytes for r in log if isinstance(r, Moved) and r.destination == "prefill-1")
    assert copied == LONG * KV_BYTES


class TestOneStoreForAll:
    REQUESTS = requests_of([(float(i), LONG, 1, i) for i in range(8)])

    @pytest.mark.xfail(strict=True, reason="one store for all nodes loses everything with any of them")
    def test_a_death_takes_a_share(self):
        """Of one store over four nodes, the death of one leaves about three quarters of the blocks."""
        spec = ClusterSpec.disaggregated(
            prefill_nodes=4, decode_nodes=1, shared_cache=True, placement=LoadBalance(),
            failures=(Failure("prefill-3", 100.0),),
        )  # fmt: skip
        cluster = Cluster(spec, REALISTIC)
        cluster.run(self.REQUESTS)
        held = 8 * LONG // 512
        assert held / 2 < len(cluster.coordinator.workers.index) < held

    @pytest.mark.xfail(
        strict=True, reason="reading the memory of other nodes moves no byte where one store serves all"
    )
    def test_reading_elsewhere_moves_bytes(self):
        """Prompts that are reused on other nodes than the one that computed them come over the network."""
        again = requests_of([*((float(i), LONG, 1, i) for i in range(8)), *((50.0, LONG, 1, i) for i in range(8))])
        spec = ClusterSpec.disaggregated(
            prefill_nodes=4, decode_nodes=1, shared_cache=True, placement=KVCacheCentric()
        )
        log = Cluster(spec, REALISTIC).run(again)
        assert sum(r.reused_tokens for r in log if isinstance(r, Prefilled)) > 4 * LONG
        assert sum(r.bytes for r in log if isinstance(r, Moved) and r.destination.startswith("prefill")) > 0
