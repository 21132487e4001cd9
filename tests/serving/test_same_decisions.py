"""The same trace under the pacer gives the same decisions live and simulated, and both recordings keep laws."""

from dataclasses import asdict, replace

import pytest
from recorded import Follower, decisions, orders, recording

from mooncake_lab import cluster as c
from mooncake_lab.batching import SarathiServe
from mooncake_lab.cluster import events as e
from mooncake_lab.conductor import (
    CacheAware,
    FewestRequests,
    KVCacheCentric,
    LatencyEstimator,
    LoadBalance,
    WithinSLO,
)
from mooncake_lab.core import SLO, CacheChanged, Request, TracedRequest
from mooncake_lab.perf import DecodeLatency, HybridLatency, PrefillLatency
from mooncake_lab.serving import Pacer
from mooncake_lab.serving.spec import coordinator_rules
from mooncake_lab.simulation import Cluster, SimulationOptions

BLOCK = 16
GAP_S = 0.08
"""Between two arrivals, at least."""
MARGIN_S = 0.03
"""How far each arrival is from anything else that happens: what happens in between decides nothing."""
CLUSTERS = {
    "1P+1D": {"prefill_nodes": 1, "decode_nodes": 1},
    "2P+1D": {"prefill_nodes": 2, "decode_nodes": 1},
    "2 coupled": {"coupled_nodes": 2},
}
ROWS = (
    (70, 3, 0, 2),
    (90, 4, 1, 3),
    (120, 4, 0, 2),
    (75, 4, 0, 4),
    (72, 4, 1, 3),
    (110, 4, 0, 2),
    (100, 6, 1, 3),
    (120, 6, 1, 2),
    (80, 4, 0, 2),
    (74, 3, 2, 4),
    (90, 4, 2, 3),
    (64, 3, 0, 2),
)
"""Of each request: input tokens, whole blocks that it shares, with which family, and output tokens."""


@pytest.fixture(scope="module")
def pace(believed):
    """Iterations of a tenth of a second and more, which any machine keeps."""
    prefill = PrefillLatency(constant_s=0.08, per_token_s=1e-3, per_token_squared_s=0.0)
    decode = DecodeLatency(0.08, 0.0, 0.0)
    return replace(believed, prefill=prefill, decode=decode, hybrid=HybridLatency.of(prefill, decode))


def request(i, at_s):
    """One of the trace, at some time: whole blocks shared within its family, then blocks of its own."""
    tokens, shared, family, output_tokens = ROWS[i]
    keys = [10_000 + family * 100 + k for k in range(shared)]
    keys += [1_000_000 + i * 100 + k for k in range(-(-tokens // BLOCK) - shared)]
    made = Request(id=i, arrival_s=at_s, input_tokens=tokens, block_keys=tuple(keys), block_size_tokens=BLOCK)
    return TracedRequest(made, output_tokens)


def belief(spec, model):
    """What the live cluster believes."""
    return LatencyEstimator(model, fetches_by_layer=spec.streams_layers)


def simulated(spec, model, requests):
    """The steps of the coordinator of the simulated cluster."""
    with recording() as steps:
        Cluster(spec, model, estimate=belief(spec, model)).run(requests)
    (recorded,) = steps.values()
    return recorded


def apart(spec, model, count, gap_s):
    """The first requests of the trace, each so late that its decision does not depend on a few milliseconds."""
    requests, at_s = [], 0.05
    for i in range(count):
        while not is_apart(simulated(spec, model, [*requests, request(i, at_s)]), i, at_s):
            at_s += MARGIN_S / 2
        requests.append(request(i, at_s))
        at_s += gap_s
    return requests


def is_apart(steps, request_id, at_s):
    """Whether nothing happens around an arrival but what it leads to at once, such as a fetch."""
    fetched = {step.now_s for step in steps if isinstance(step.event, e.PrefixFetched)}
    for event, now_s, _ in steps:
        about = event.request if isinstance(event, e.RequestArrived) else getattr(event, "attempt", None)
        comes = isinstance(event, CacheChanged) and now_s in fetched
        is_own = about in {c.Attempt(request_id, 1), request(request_id, at_s).request} or comes
        if not is_own and abs(now_s - at_s) < MARGIN_S:
            return False
    return True


def lateness_s(real, predicted):
    """By how much the live run was later than the pace, at most, when requests began to decode."""
    ends = [
        {step.event.attempt: step.event.at_s for step in steps if isinstance(step.event, e.DecodeStarted)}
        for steps in (real, predicted)
    ]
    return max(ends[0].get(attempt, at_s) - at_s for attempt, at_s in ends[1].items())


def on_time(live, model, requests):
    """The steps of a live run that kept its pace, and those of the simulation."""
    predicted = simulated(live.spec, model, requests)
    for number in range(4):  # each worker touches its memory once
        live.generate([[number, 1, 2, 3] * 20], max_new_tokens=2)
    for _ in range(8):
        live.reset_prefix_cache()
        with recording() as steps:
            live.run(requests)
        real = list(steps.values())[-1]
        late_s = lateness_s(real, predicted)
        if late_s < MARGIN_S or (decisions(real), orders(real)) == (decisions(predicted), orders(predicted)):
            return real, predicted
    pytest.fail(f"this machine is {late_s:.3f} s late; the trace leaves {MARGIN_S} s")


def keeps_the_laws(live, model, steps):
    """Nothing is left of requests that ended, and the laws of the coordinator hold all along."""
    follower = Follower(
        live.spec, coordinator_rules(live.options), belief(live.spec, model), extend=lambda *_: None
    )
    follower.follow(steps)
    follower.log = sorted(
        (record for record in follower.log if not isinstance(record, CacheChanged)), key=lambda one: one.at_s
    )
    follower.check_log()
    assert not follower.coordinator.requests
    assert not any(
        worker.decode.contexts or worker.prefill.prompts for worker in follower.coordinator.instances.up
    )


def placed(decided):
    """A decision without its times."""
    known = asdict(decided.decision)
    return {name: value for name, value in known.items() if name != "reason" and not name.startswith("expected")}


def check(open_cluster, pace, nodes, placement, count, **changes):
    """The decisions of both runtimes, and what each worker did, are the same; both recordings keep the laws."""
    changes = CLUSTERS[nodes] | {"placement": placement, "block_size_tokens": BLOCK} | changes
    with open_cluster(pace, pacer=Pacer.of(pace), **changes) as live:
        requests = apart(live.spec, pace, count, GAP_S)
        real, predicted = on_time(live, pace, requests)
        again = Cluster(live.spec, pace, SimulationOptions(keep_decisions=True), estimate=live.estimate)
        again.run(requests)
        assert [placed(one) for one in again.decisions] == [placed(one) for one in live.decisions]
    assert decisions(real) == decisions(predicted)
    assert orders(real) == orders(predicted)
    for steps in (real, predicted):
        keeps_the_laws(live, pace, steps)
    return decisions(real)


def test_the_same_decisions(open_cluster, pace):
    """The same prompts go to the same workers, wait, reuse and fetch in both runtimes, under Algorithm 1."""
    made = check(open_cluster, pace, "2P+1D", KVCacheCentric(1.2), 7)
    assert any(fetched for *_, fetched, _ in made)


def test_the_same_decisions_of_coupled_workers(open_cluster, pace):
    """The same with prompts in pieces: the blocks of each piece are found while the next one is computed."""
    made = check(open_cluster, pace, "2 coupled", CacheAware(), 7, batching=SarathiServe(chunk_tokens=48))
    assert any(reused for _, _, _, reused, _, _ in made)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [CacheAware(), LoadBalance(), KVCacheCentric(1.2)], ids=repr)
@pytest.mark.parametrize("nodes", CLUSTERS)
def test_the_same_decisions_of_a_longer_trace(open_cluster, pace, nodes, placement):
    """The same for each cluster and policy, with more requests."""
    if nodes == "2 coupled" and isinstance(placement, KVCacheCentric):
        placement = FewestRequests()  # coupled workers share no store to fetch from
    check(open_cluster, pace, nodes, placement, len(ROWS))


@pytest.mark.slow
def test_the_same_packing(open_cluster, pace):
    """Prompts that wait together are computed in one iteration in both runtimes, and leave in order of arrival."""
    check(open_cluster, pace, "1P+1D", LoadBalance(), 6, pack_tokens=200)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", CLUSTERS)
def test_the_same_refusals(open_cluster, pace, nodes):
    """Admission that refuses what would miss its SLO refuses the same requests in both runtimes."""
    made = check(
        open_cluster, pace, nodes, LoadBalance(), len(ROWS), admission=WithinSLO(), slo=SLO(ttft_s=0.16, tbt_s=1.0)
    )
    assert 0 < sum(len(one) == 2 for one in made) < len(ROWS)
