"""What nodes share, and who waits for whom: KVCache, links into GPU memory, iterations."""

from dataclasses import replace

import pytest
from drawn import REALISTIC, make_model
from families import requests_of

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import LoadBalance, Placement
from mooncake_lab.core import FirstToken, Moved, Prefilled
from mooncake_lab.metrics import check_log
from mooncake_lab.perf import LinkLatency, model_shape
from mooncake_lab.simulation import Cluster, Failure, SimulationOptions

KV_BYTES = model_shape("llama3-70b").kv_bytes_per_token
LONG = 2048


@pytest.mark.parametrize("layerwise", [True, False])
def test_kvcache_of_one_iteration_leaves_in_order_of_arrival(layerwise):
    """As from a live instance: the prompt that came first is at its decode node first, although it is longer."""
    rows = [(0.0, 4000, 2, 0), (0.1, 3000, 2, 1), (0.2, 64, 2, 2), (0.3, 500, 2, 3)]
    spec = ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1, pack_tokens=8192, streams_layers=layerwise)
    log = Cluster(spec, make_model(constant_s=1.0, bytes_per_s=KV_BYTES * 8000)).run(requests_of(rows))
    moved = sorted((r.at_s, r.request_id) for r in log if isinstance(r, Moved))
    assert [request_id for _, request_id in moved] == [0, 1, 2, 3]
    assert len({at_s for at_s, _ in moved}) == 4
    assert check_log(log) == ()


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


def test_a_block_is_copied_to_a_node_once():
    """Two requests that want the same prefix on the same node wait for one copy, which has no other block."""
    requests = requests_of([(0.0, LONG, 1, 0), (50.0, LONG + 100, 1, 0), (50.0, LONG + 200, 1, 0)])
    spec = ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=1, placement=FetchTwice())
    log = Cluster(spec, make_model(constant_s=0.1, bytes_per_s=KV_BYTES * 500)).run(requests)
    copied = sum(r.bytes for r in log if isinstance(r, Moved) and r.destination == "prefill-1")
    assert copied == LONG * KV_BYTES
    assert [r.computed_tokens for r in log if isinstance(r, Prefilled) and r.request_id == 1] == [100]


@pytest.mark.parametrize(("timeout_s", "reused", "start_s"), [(30.0, LONG, 54.096), (3.0, 0, 53.0)])
def test_a_fetch_has_a_deadline(timeout_s, reused, start_s):
    """A prompt whose prefix takes 4.096 s to come waits for it; with a deadline of 3 s it is computed then."""
    requests = requests_of([(0.0, LONG, 1, 0), (50.0, LONG + 100, 1, 0)])
    spec = ClusterSpec.disaggregated(
        prefill_nodes=2, decode_nodes=1, placement=FetchTwice(), fetch_timeout_s=timeout_s
    )
    log = Cluster(spec, make_model(constant_s=0.1, bytes_per_s=KV_BYTES * 500)).run(requests)
    assert check_log(log) == ()
    (last,) = (r for r in log if isinstance(r, Prefilled) and r.request_id == 1)
    assert (last.reused_tokens, last.start_s) == (reused, pytest.approx(start_s))
    copied = sum(r.bytes for r in log if isinstance(r, Moved) and r.destination == "prefill-1")
    assert copied == reused * KV_BYTES


class TestOneStoreForAll:
    REQUESTS = requests_of([(float(i), LONG, 1, i) for i in range(8)])

    def test_a_death_takes_a_share(self):
        """Of one store over four nodes, the death of one leaves about three quarters of the blocks."""
        spec = ClusterSpec.disaggregated(
            prefill_nodes=4, decode_nodes=1, shared_cache=True, placement=LoadBalance()
        )
        cluster = Cluster(spec, REALISTIC, SimulationOptions(failures=(Failure("prefill-3", 100.0),)))
        cluster.run(self.REQUESTS)
        held = 8 * LONG // 512
        assert held / 2 < len(cluster.coordinator.instances.index) < held

    def test_blocks_that_come_late_are_computed(self):
        """With a deadline of 3 s a prompt computes what would be 20.48 s on its way; what is its own it reuses."""
        again = requests_of([(0.0, LONG, 1, 0), (10.0, LONG, 1, 0)])
        slow = make_model(constant_s=0.1, bytes_per_s=KV_BYTES * 100)
        spec = ClusterSpec.disaggregated(
            prefill_nodes=2, decode_nodes=1, shared_cache=True, placement=InTurn(), fetch_timeout_s=3.0
        )
        log = Cluster(spec, slow).run(again)
        assert check_log(log) == ()
        (last,) = (r for r in log if isinstance(r, Prefilled) and r.request_id == 1)
        assert (last.reused_tokens, last.start_s) == (0, pytest.approx(13.0))

    def test_the_disk_of_an_owner_reads_for_others(self):
        """A block on SSD is read where it lies, and sent after that, if the placement counts on it."""
        filling = [(10.0 * i, LONG, 1, i) for i in range(3)]
        model = replace(make_model(constant_s=9.0, bytes_per_s=KV_BYTES * LONG), ssd=LinkLatency(KV_BYTES * LONG))
        requests = requests_of([*filling, (100.0, LONG, 1, 0)])
        two = {"prefill_nodes": 2, "decode_nodes": 1, "cache_tokens": LONG, "ssd_tokens": 4 * LONG}
        log = Cluster(ClusterSpec.disaggregated(**two, shared_cache=True, placement=ByHand(0)), model).run(
            requests
        )
        assert [r.reused_tokens for r in log if isinstance(r, Prefilled)][-1] == 0
        assert not any(isinstance(r, Moved) and "prefill" in r.destination for r in log)
        spec = ClusterSpec.disaggregated(**two, shared_cache=True, placement=ByHand(LONG - 1))
        log = Cluster(spec, model).run(requests)
        assert check_log(log) == ()
        moves = [r for r in log if isinstance(r, Moved) and r.request_id == 3]
        read, sent, _ = moves
        assert (read.source, sent.source, sent.destination) == ("prefill-0/ssd", "prefill-0", "prefill-1")
        assert read.bytes == sent.bytes == (LONG - 1) * KV_BYTES
        assert (read.at_s, sent.start_s, sent.at_s) == pytest.approx((101.0, 101.0, 102.0), abs=1e-2)


class ByHand:
    """Requests 0 to 2 on the first node, the next on the second, which counts on so many tokens on SSD."""

    def __init__(self, ssd_tokens):
        self.ssd_tokens = ssd_tokens

    def place(self, request, view, estimate):
        del view, estimate
        last = request.id == 3
        return Placement(
            request_id=request.id, prefill=f"prefill-{int(last)}", decode="decode-0",
            reused_tokens=0, ssd_tokens=self.ssd_tokens if last else 0, expected_ttft_s=0.0, expected_tbt_s=0.0,
            reason="",
        )  # fmt: skip


class InTurn:
    """Request 0 on the first node, the next on the second, each with what the store has."""

    def place(self, request, view, estimate):
        del view, estimate
        return Placement(
            request_id=request.id, prefill=f"prefill-{request.id}", decode="decode-0", reused_tokens=0,
            expected_ttft_s=0.0, expected_tbt_s=0.0, reason="",
        )  # fmt: skip
