"""The live cluster: the same face and log as the simulator, over processes that really compute."""

import time
from dataclasses import replace
from pathlib import Path

import flat
import pytest

from mooncake_lab.batching import Plan, named_policy
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import ADMISSION_POLICIES, KVCacheCentric, Placement, decide
from mooncake_lab.core import SLO, Arrived, Finished, Moved, Placed, Prefilled, Rejected
from mooncake_lab.metrics import check_log, run_summary
from mooncake_lab.perf import model_shape
from mooncake_lab.serving import FailedError, LiveCluster, LiveOptions, Pacer, WorkerError
from mooncake_lab.workload import SharedPrefix
from mooncake_lab.workload.transforms import prompt_of, scaled_down

COUPLED = {"coupled_nodes": 1}


def test_tokens_equal_one_engine(cluster, reference, rng):
    """Prefill here, move KVCache, decode there gives the tokens of one engine in one process (I10)."""
    prompts = [rng.integers(0, 256, length) for length in (1, 15, 16, 17, 32, 100, 600)]
    assert cluster.generate(prompts, max_new_tokens=9) == reference(prompts, 9)
    assert cluster.generate(prompts, max_new_tokens=1) == reference(prompts, 1)  # all from the cache now


def test_run_keeps_the_simulators_log(cluster, traced, expected):
    """A trace gives tokens, and a log that obeys I1 and I2 and that the metrics read."""
    cluster.reset_prefix_cache()
    requests = traced(20)
    log = cluster.run(requests)
    assert cluster.outputs == expected(requests)
    assert check_log(log) == ()
    summary = run_summary(log, SLO())
    assert summary["finished"] == len(requests)
    assert summary["output_tokens"] == sum(one.output_tokens for one in requests)
    assert summary["token_hit_rate"] > 0.2


def test_a_cluster_outside_of_its_with_block_refuses(open_cluster):
    """Before it is opened and after it was closed it says so, instead of waiting for ever."""
    live = open_cluster()
    with pytest.raises(RuntimeError, match="cluster is not open"):
        assert live.in_flight == 0
    with live:
        assert live.in_flight == 0
    for use in (lambda: live.run([]), lambda: live.generate([[1]]), live.reset_prefix_cache):
        with pytest.raises(RuntimeError, match="cluster is not open"):
            use()


def test_a_call_that_fails_leaves_nothing_under_way(cluster, traced, expected):
    """When one of several prompts cannot be served the others are let go, and the next run is as ever."""
    with pytest.raises(ValueError, match="token"):
        cluster.generate([[1, 2, 3], [10**6]], max_new_tokens=500)
    requests = traced(4)
    log = cluster.run(requests)
    assert cluster.outputs == expected(requests)
    assert check_log(log) == ()


class Elsewhere:
    """A placement policy that names a worker nobody knows."""

    def place(self, request, view, estimate):
        """Nowhere."""
        del view, estimate
        return Placement(
            request_id=request.id, prefill="prefill-9", decode="decode-0", reused_tokens=0, expected_ttft_s=0.0,
            expected_tbt_s=0.0, reason="a mistake",
        )  # fmt: skip


def test_a_placement_on_nobody_fails_its_request_only(open_cluster):
    """A user's policy that errs is told so, and the cluster lives on."""
    with open_cluster(placement=Elsewhere()) as live:
        for _ in range(2):
            with pytest.raises(FailedError, match="sets prefill to 'prefill-9'; allowed are prefill-0"):
                live.generate([[1, 2, 3]])
        assert set(live.pids()) == {"prefill-0", "decode-0"}


def test_forgetting_is_done_when_it_returns(cluster, traced):
    """After `forget`, the Conductor and the worker agree that nothing of an earlier run is there."""
    requests = traced(1)
    for _ in range(3):
        cluster.run(requests)
        cluster.reset_prefix_cache()
        log = cluster.run(requests)
        assert [record.reused_tokens for record in log if isinstance(record, Placed | Prefilled)] == [0, 0]


def test_decisions_replay(cluster, traced):
    """A recorded live decision follows from its recorded view (I7)."""
    cluster.run(traced(8))
    assert len(cluster.decisions) == 8
    for one in cluster.decisions:
        again = decide(
            one.request,
            one.view,
            placement=cluster.spec.placement,
            admission=cluster.spec.admission,
            estimate=cluster.estimate,
            slo=cluster.spec.slo,
        )
        assert again == one.decision


def test_horizon(cluster, traced):
    """At the horizon a request that still runs is left running, and later runs are not disturbed."""
    log = cluster.run(traced(3, every_s=0.0, output_tokens=4000), until_s=0.4)
    assert not any(isinstance(record, Finished) for record in log)
    assert check_log(log) == ()
    assert all(len(tokens) < 4000 for tokens in cluster.outputs.values())
    assert cluster.now_s >= 0.4, "the clock of the run goes on"
    assert cluster.generate([[1, 2, 3]], max_new_tokens=2)


def test_prompts_that_wait_together_may_be_packed(open_cluster, traced, expected):
    """With room for several prompts some share an iteration; tokens and the order of prompts stay the same."""
    requests = traced(24, every_s=0.0)
    with open_cluster(pack_tokens=4096) as live:
        log = live.run(requests)
        assert live.outputs == expected(requests)
    assert check_log(log) == ()
    prefills = [record for record in log if isinstance(record, Prefilled)]
    assert len({record.start_s for record in prefills}) < len(prefills) == len(requests)
    placed = [record.request_id for record in log if isinstance(record, Placed)]
    assert [record.request_id for record in prefills] == placed


def test_first_shown_by_prefill_and_moves_by_layer(open_cluster, traced, expected, believed):
    """The first token may come from the prefill worker, and each layer's move may be a record of its own.

    A prompt takes long, so that its first layer has arrived before its end even on a busy machine.
    """
    requests = traced(6, tokens=200)
    slow = Pacer.of(replace(believed, prefill=replace(believed.prefill, constant_s=0.5)))
    with open_cluster(first_shown_by="prefill", log_layers=True, chunk_tokens=16, pacer=slow) as live:
        log = live.run(requests)
        assert live.outputs == expected(requests)
    assert check_log(log) == ()
    moves = [record for record in log if isinstance(record, Moved) and record.request_id == 0]
    prefilled = next(record for record in log if isinstance(record, Prefilled) and record.request_id == 0)
    assert len(moves) >= 2 * 13  # layers times chunks
    assert sum(move.bytes for move in moves) == 200 * live_bytes_per_token()
    assert min(move.at_s for move in moves) < prefilled.at_s  # KVCache moves while prefill still runs


def live_bytes_per_token():
    return model_shape("lab-tiny").kv_bytes_per_token


def test_whole_kvcache_after_prefill(open_cluster, traced, expected):
    """Without layer-wise streaming the tokens are the same, and nothing moves before prefill has ended."""
    requests = traced(4)
    with open_cluster(streams_layers=False, prefix_caching=False) as live:
        log = live.run(requests)
        assert live.outputs == expected(requests)
    assert check_log(log) == ()
    ends = {record.request_id: record.at_s for record in log if isinstance(record, Prefilled)}
    assert all(record.start_s >= ends[record.request_id] for record in log if isinstance(record, Moved))
    assert all(record.reused_tokens == 0 for record in log if isinstance(record, Prefilled))


def test_prefix_is_fetched(open_cluster, traced, expected, believed):
    """Where another worker holds much more of a prompt, its blocks are fetched, and are there afterwards.

    A prompt takes long, so that the queue of the holder is as long as the requests that came at once.
    """
    requests = traced(12, every_s=0.0, tokens=400, shared_blocks=24, output_tokens=3)
    slow = Pacer.of(replace(believed, prefill=replace(believed.prefill, constant_s=0.25)))
    with open_cluster(prefill_nodes=2, pacer=slow) as live:
        live.run(requests[:3])
        log = live.run(requests[3:])
        assert live.outputs == expected(requests[3:])
    assert check_log(log) == ()
    fetched = [record for record in log if isinstance(record, Moved) and record.destination.startswith("prefill")]
    assert fetched
    assert all(record.bytes % (16 * live_bytes_per_token()) == 0 for record in fetched)


@pytest.mark.parametrize("batching", ["sarathi_serve", "vllm"])
def test_coupled(open_cluster, traced, expected, batching):
    """Coupled workers give the same tokens and a log that the metrics read; prefixes are found again."""
    requests = traced(12)
    with open_cluster(coupled_nodes=2, batching=named_policy(batching)) as live:
        log = live.run(requests)
        assert live.outputs == expected(requests)
        live.kill("coupled-0")
        live.run(requests)
        assert live.outputs == expected(requests)
    assert check_log(log) == ()
    assert run_summary(log, SLO())["finished"] == len(requests)


class Own:
    """A batching policy that no worker knows."""

    def plan(self, waiting, running, limits):
        """Nothing."""
        del waiting, running, limits
        return Plan()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prefill_nodes": 0}, "PrefillPool.nodes is 0"),
        ({"prefill_nodes": 2, "prefill_group": 2}, "PrefillPool.prefill_group is 2; a live cluster has 1: each"),
        ({"shared_cache": True}, "PrefillPool.shared_cache is True; a live cluster has False"),
        ({"overtaking": True}, "PrefillPool.overtaking is True"),
        ({"eviction": "belady"}, "PrefillPool.eviction is 'belady'; a live cluster knows lru, fifo"),
        ({"eviction": "mru"}, "PrefillPool.eviction is 'mru'; a live cluster knows lru, fifo"),
        (COUPLED | {"eviction": "lfu"}, "CoupledPool.eviction is 'lfu'"),
        (COUPLED | {"memory_block_tokens": 8}, "memory_block_tokens is 8 and block_size_tokens 16"),
        (COUPLED | {"batching": Own()}, "CoupledPool.batching is .*know request_level, orca, vllm"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"max_kv_oversubscription": 0.0}, "max_kv_oversubscription is 0.0"),
        ({"spares": -1}, "spares is -1"),
        ({"transfer_bytes": 64}, "transfer_bytes is 64"),
        (COUPLED | {"transfer": "mooncake"}, "Transfer Engine"),
        (COUPLED | {"placement": KVCacheCentric()}, "remote_prefixes: a store"),
        ({"ssd_tokens": 64}, "give a folder and a size"),
        ({"ssd_dir": "x"}, "give a folder and a size"),
        ({"ssd_dir": "x", "ssd_tokens": 8}, "ssd_tokens is 8; a block of 16 has to fit"),
        ({"ssd_dir": "x", "ssd_tokens": 64, "cache_tokens": 64}, "no use for ssd_tokens"),
        (COUPLED | {"shared_store": "remote"}, "no use for shared_store"),
        (COUPLED | {"ssd_dir": "x"}, "no use for ssd_dir"),
        ({"shared_store": "remote", "prefix_caching": False}, "no use for shared_store_tokens"),
        (
            {"shared_store": "remote", "shared_store_tokens": 8},
            "shared_store_tokens is 8; a block of 16 has to fit",
        ),
    ],
)
def test_what_a_live_cluster_cannot_do_is_refused(changes, says):
    """The sentence names the setting and its value."""
    with pytest.raises(ValueError, match=says):
        LiveCluster(*flat.live(**changes))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pool", "shared_store"),
        ("pool_tokens", "shared_store_tokens"),
        ("pool_address", "shared_store_address"),
        ("most_waiting", "max_kv_oversubscription"),
    ],
)
def test_an_option_under_its_old_name_is_refused_with_the_new_name(old, new):
    """Options of the release before are refused in a sentence."""
    with pytest.raises(TypeError, match=f"^LiveOptions has no field {old}: its name is {new}$"):
        LiveOptions(**{old: None})


def test_requests_that_do_not_fit_are_refused(cluster, pool):
    """So are prompts too long, tokens that the model does not know, and a pool of another model."""
    with pytest.raises(ValueError, match="too many"):
        cluster.generate([[1] * 9000])
    with pytest.raises(ValueError, match="tokens 7 to 256"):
        cluster.generate([[7, 256]])
    with pytest.raises(WorkerError, match="cannot serve"):
        LiveCluster(ClusterSpec.small(), LiveOptions(seed=1), launcher=pool).__enter__()


def test_a_cluster_that_stood_still_kills_no_worker(open_cluster, reference):
    """Only silence while the cluster itself runs counts: after Ctrl-Z, or on a busy machine, all workers go on."""
    stalls, written = iter([2.5]), []

    def write(record):
        written.append(record)
        time.sleep(next(stalls, 0.0))

    with open_cluster(heartbeat_timeout_s=1.0) as live:
        pids, live.on_record = live.pids(), write
        assert live.generate([[1, 2, 3]], max_new_tokens=4) == reference([[1, 2, 3]], 4)
        assert live.pids() == pids
    assert sum(isinstance(record, Placed) for record in written) == 1


def test_no_request_id_comes_twice_in_a_run(cluster, traced):
    """Requests without an id of their own take those behind the ids of the trace before them."""
    arrived = []
    cluster.on_record = lambda record: arrived.extend([record.request_id] * isinstance(record, Arrived))
    try:
        cluster.run(traced(3))
        cluster.generate([[1, 2, 3]] * 2, max_new_tokens=2)
    finally:
        cluster.on_record = lambda _: None
    assert arrived == [0, 1, 2, 3, 4]


def test_a_measurement_has_a_time_limit(pool, monkeypatch):
    """A worker that takes too long to time itself ends the start with its name, not with an empty message."""
    monkeypatch.setattr("mooncake_lab.serving.calibration._LEAST_LIMIT_S", 1e-3)
    monkeypatch.setattr("mooncake_lab.serving.calibration._SLOWEST_FLOPS", 1e15)
    with pytest.raises(WorkerError, match="did not measure its speed within"):
        LiveCluster(*flat.live(device="cpu", backend="dense"), launcher=pool).__enter__()


def test_small_engines_are_measured_with_what_fits(pool, reference):
    """A coupled worker with little KVCache is timed with short prompts; one with too little says what is."""
    with LiveCluster(
        *flat.live(device="cpu", backend="dense", **COUPLED, device_tokens=1024), launcher=pool
    ) as live:
        assert live.generate([[1, 2, 3]], max_new_tokens=4) == reference([[1, 2, 3]], 4)
    with pytest.raises(ValueError, match=r"KVCache \(max_total_tokens\) is too small"):
        LiveCluster(
            *flat.live(device="cpu", backend="dense", **COUPLED, device_tokens=16), launcher=pool
        ).__enter__()


def test_measures_itself(pool):
    """Without a latency model the cluster times its workers and fits one."""
    with LiveCluster(*flat.live(device="cpu", backend="dense"), launcher=pool) as live:
        model = live.model
    assert model.prefill.seconds(1000.0) > model.prefill.seconds(10.0) > 0
    assert model.decode.step_s(1, 100) > 0
    assert model.transfer.bytes_per_s > 1e6


def test_scaled_down_keeps_sharing():
    """Lengths divided, blocks as much smaller: the same blocks of the same requests, one key each."""
    trace = SharedPrefix(
        requests=4, requests_per_s=1.0, input_tokens=2100, shared_tokens=1024, output_tokens=40
    ).make()
    small = scaled_down(trace, 32)
    assert small.block_size_tokens == 16
    assert [one.request.block_keys for one in small.requests()] == [
        one.request.block_keys for one in trace.requests()
    ]
    first, second = (prompt_of(one.request, 256) for one in list(small.requests())[:2])
    assert (first[:32] == second[:32]).all()
    assert (first[32:] != second[32:]).any()
    assert len(first) == 66
    with pytest.raises(ValueError, match="cannot be divided by 7"):
        scaled_down(trace, 7)


@pytest.mark.parametrize("name", sorted(ADMISSION_POLICIES))
def test_every_admission_policy(open_cluster, traced, name):
    """Each admission policy of the Conductor runs live, on views that name who decodes and who is coming."""
    with open_cluster(admission=ADMISSION_POLICIES[name](), slo=SLO(ttft_s=60, tbt_s=1e-4)) as live:
        log = live.run(traced(6, every_s=0.0))
    assert check_log(log) == ()
    refused = {record.stage for record in log if isinstance(record, Rejected)}
    finished = [record for record in log if isinstance(record, Finished)]
    assert len(finished) + sum(isinstance(record, Rejected) for record in log) == 6
    assert bool(refused) == (name != "none")


def test_evicted_blocks_sink_and_come_back(open_cluster, traced, expected, tmp_path):
    """What DRAM cannot hold is read from SSD, also by the worker that follows a killed one; tokens are equal."""
    requests = traced(6, tokens=200, every_s=0.05)
    with open_cluster(cache_tokens=256, ssd_dir=str(tmp_path), ssd_tokens=8192) as live:
        live.run(requests)
        log = live.run(requests)
        assert live.outputs == expected(requests)
        assert read_from_ssd(log) > 0
        live.kill("prefill-0")
        log = live.run(requests)
        assert live.outputs == expected(requests)
        assert read_from_ssd(log) > 0
        live.reset_prefix_cache()
        log = live.run(requests[:1])
        assert read_from_ssd(log) == 0
    assert check_log(log) == ()
    assert [folder.name for folder in tmp_path.iterdir()] == ["prefill-0"]


@pytest.mark.wheel
def test_kvcache_travels_by_mooncakes_engine(open_cluster, traced, expected):
    """Streamed layers and fetched blocks through Mooncake's Transfer Engine: equal tokens, also after a kill."""
    requests = traced(8, tokens=96, every_s=0.02)  # whole blocks: a full hit computes its last token again
    with open_cluster(prefill_nodes=2, transfer="mooncake") as live:
        for _ in range(2):
            log = live.run(requests)
            assert live.outputs == expected(requests)
            assert check_log(log) == ()
            assert sum(isinstance(record, Placed) for record in log) == len(requests)  # none a second time
        for pid in live.pids().values():
            assert "mooncake/engine" in Path(f"/proc/{pid}/maps").read_text()
        live.kill("decode-0")
        log = live.run(requests)
        assert live.outputs == expected(requests)
    assert check_log(log) == ()


def read_from_ssd(log):
    """Bytes that prefill workers read from their own SSDs."""
    return sum(record.bytes for record in log if isinstance(record, Moved) and record.source.endswith("/ssd"))
