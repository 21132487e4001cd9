"""No knob of a cluster is without effect, and every decision replays from the view it was made on."""

import dataclasses

import flat
import pytest

from mooncake_lab.batching import VLLM, Orca, VLLMChunked
from mooncake_lab.book.chapters.placement.experiment import NoisyEstimator
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.cluster import ClusterSpec, CoupledPool, DecodePool, PrefillPool
from mooncake_lab.conductor import AdmitAll, CacheAware, LoadBalance, Placement, WithinSLO, decide
from mooncake_lab.core import SLO, Placed, Rejected, Request, TracedRequest, blocks_for, keyed_uniform
from mooncake_lab.metrics import check_log
from mooncake_lab.perf import LinkLatency
from mooncake_lab.simulation import Cluster, Failure, SimulationOptions

MODEL = dataclasses.replace(paper_node_latency(), ssd=LinkLatency(4e9), transfer=LinkLatency(1e10))
BASE = {
    "prefill_nodes": 4,
    "decode_nodes": 3,
    "cache_tokens": 60_000,
    "device_tokens": 120_000,
    "ssd_tokens": 40_000,
    "prefill_group": 2,
    "admission": WithinSLO(),
    "slo": SLO(ttft_s=8.0, tbt_s=0.06),
}
OTHER = {
    "prefill_nodes": 6,
    "decode_nodes": 2,
    "cache_tokens": 100_000,
    "ssd_tokens": 10_000,
    "prefill_group": 1,
    "chunk_tokens": 1024,
    "max_requests": 2,
    "prefix_caching": False,
    "device_tokens": 60_000,
    "shared_cache": True,
    "eviction": "lfu",
    "block_size_tokens": 256,
    "first_shown_by": "prefill",
    "streams_layers": False,
    "fetch_timeout_s": 0.5,
    "overtaking": True,
    "pack_tokens": 8192,
    "keep_answers": True,
    "placement": LoadBalance(),
    "failures": (Failure("decode-1", 20.0),),
    "view_age_s": 4.0,
    "admission": AdmitAll(),
    "slo": SLO(ttft_s=4.0, tbt_s=0.06),
}


COUPLED = {
    "nodes": 3,
    "batching": VLLMChunked(chunk_tokens=2048),
    "prefix_caching": True,
    "device_tokens": 90_000,
    "max_requests": 8,
    "admission": WithinSLO(),
    "slo": SLO(ttft_s=20.0, tbt_s=0.2),
}
OTHER_COUPLED = {
    "nodes": 4,
    "batching": VLLM(),
    "prefix_caching": False,
    "eviction": "lfu",
    "device_tokens": 150_000,
    "max_batch_tokens": 1024,
    "max_requests": 3,
    "max_request_tokens": 49_000,
    "default_max_tokens": 40_000,
    "memory_block_tokens": 256,
    "block_size_tokens": 256,
    "view_age_s": 4.0,
    "placement": CacheAware(),
    "failures": (Failure("coupled-1", 20.0),),
    "admission": AdmitAll(),
    "slo": SLO(ttft_s=8.0, tbt_s=0.2),
}


def traffic(n=150):
    """Prompts of five families, up to 50,000 tokens, about four a second."""
    requests, at_s = [], 0.0
    for i in range(n):
        at_s += 0.5 * keyed_uniform(1, "gap", i)
        tokens = int(2000 + 48_000 * keyed_uniform(1, "length", i) ** 3)
        family = int(5 * keyed_uniform(1, "family", i))
        keys = tuple(family * 1000 + k for k in range(blocks_for(tokens, 512)))
        request = Request(id=i, arrival_s=at_s, input_tokens=tokens, block_keys=keys)
        requests.append(TracedRequest(request, 1 + int(200 * keyed_uniform(1, "answer", i))))
    return requests


@pytest.fixture(scope="module")
def base_log():
    return flat.disaggregated(MODEL, **BASE).run(traffic())


@pytest.mark.parametrize("knob", OTHER)
def test_turning_a_knob_moves_the_result(base_log, knob):
    """Each setting changes what happens, and breaks nothing."""
    base = BASE
    if knob == "pack_tokens":  # a group computes one prompt at a time
        base = BASE | {"prefill_group": 1}
        base_log = flat.disaggregated(MODEL, **base).run(traffic())
    log = flat.disaggregated(MODEL, **base | {knob: OTHER[knob]}).run(traffic())
    assert check_log(log) == ()
    assert log != base_log


@pytest.mark.parametrize("knob", OTHER_COUPLED)
def test_turning_a_knob_of_coupled_instances_moves_the_result(knob):
    """The same for the cluster that Mooncake is compared with."""
    base = COUPLED
    if knob == "default_max_tokens":  # which only some policies reserve
        base = COUPLED | {"batching": Orca()}
    if knob == "max_request_tokens":  # the window, as far as clients ask for so much
        base = COUPLED | {"batching": Orca(), "default_max_tokens": 200_000}
    log = flat.coupled(MODEL, **base | {knob: OTHER_COUPLED[knob]}).run(traffic())
    assert check_log(log) == ()
    assert log != flat.coupled(MODEL, **base).run(traffic())


def test_every_field_is_turned():
    """The settings above are all fields of the spec and of its pools."""
    ours, prefill, decode, coupled, options = (
        {each.name for each in dataclasses.fields(kind)}
        for kind in (ClusterSpec, PrefillPool, DecodePool, CoupledPool, SimulationOptions)
    )
    both = (ours | options) - {"pools", "keep_decisions"}
    nodes = {"prefill_nodes", "decode_nodes"}
    assert OTHER.keys() == (both | prefill | decode | nodes) - {"nodes", "default_max_tokens"}
    assert OTHER_COUPLED.keys() == (both | coupled) - {"first_shown_by", "streams_layers"}


def test_the_base_of_this_test_has_something_of_everything(base_log):
    """Requests are served and rejected, so that every knob has something to move."""
    kinds = {type(record).__name__ for record in base_log}
    assert {"Placed", "Rejected", "Moved", "Finished"} <= kinds


@pytest.mark.parametrize("age_s", [0.0, 4.0])
@pytest.mark.parametrize("coupled", [False, True])
def test_recorded_views_give_the_recorded_decisions(age_s, coupled):
    """I7: `decide` on the recorded view answers what the log says, old views and wrong beliefs included."""
    died = (Failure("coupled-1", 10.0),) if coupled else OTHER["failures"]
    options = SimulationOptions(view_age_s=age_s, failures=died, keep_decisions=True)
    if coupled:
        spec = ClusterSpec.coupled(nodes=4, device_tokens=150_000)
        cluster = Cluster(spec, MODEL, options)
    else:
        spec = ClusterSpec.disaggregated(**BASE)
        cluster = Cluster(spec, MODEL, options, estimate=NoisyEstimator(MODEL, relative_error=0.3))
    log, seen = cluster.run(traffic(80)), cluster.decisions
    decided = [r for r in log if isinstance(r, Placed) or (isinstance(r, Rejected) and r.stage == "admission")]
    assert len(decided) == len(seen) >= 80
    for record, one in zip(decided, seen, strict=True):
        again = decide(
            one.request,
            one.view,
            placement=spec.placement,
            admission=spec.admission if one.is_first else AdmitAll(),
            estimate=cluster.estimate,
            slo=spec.slo,
        )
        assert again == one.decision
        assert record.request_id == one.request.id
        assert one.is_first != record.reason.startswith("placed again")
        if isinstance(again, Placement):
            assert isinstance(record, Placed)
            assert (record.prefill_instance, record.decode_instance) == (again.prefill, again.decode)
            assert (record.reused_tokens, record.fetched_tokens) == (again.reused_tokens, again.fetched_tokens)
        else:
            assert record.reason.endswith(again.reason)


def test_pools_must_make_a_cluster():
    """A prefill pool alone, a mixture, or a setting that no pool has is refused."""
    for pools in ((PrefillPool(),), (CoupledPool(), PrefillPool()), ()):
        with pytest.raises(ValueError, match="allowed are a prefill and a decode pool, or one coupled pool"):
            ClusterSpec(pools=pools, placement=LoadBalance())
    with pytest.raises(TypeError, match="batching"):
        ClusterSpec.disaggregated(batching=VLLM())
