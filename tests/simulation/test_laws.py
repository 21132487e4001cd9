"""The simulated cluster against theory, and against itself."""

import math
from collections import Counter, defaultdict
from itertools import product

import numpy as np
import pytest
from drawn import POLICIES, REALISTIC, REQUESTS, clusters, make_model, simulated
from families import requests_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import KVCacheCentric, LoadBalance, Placement
from mooncake_lab.core import Moved, Placed, Prefilled, Request, TracedRequest, blocks_for
from mooncake_lab.metrics import check_log, replicas_at, request_table
from mooncake_lab.perf import model_shape
from mooncake_lab.simulation import Cluster


def fresh(i, arrival_s, input_tokens, output_tokens=1) -> TracedRequest:
    """A request that shares nothing with any other."""
    keys = tuple(range(i * 1000, i * 1000 + blocks_for(input_tokens, 512)))
    return TracedRequest(
        Request(id=i, arrival_s=arrival_s, input_tokens=input_tokens, block_keys=keys), output_tokens
    )


class TestQueueingTheory:
    @pytest.mark.parametrize("utilisation", [0.5, 0.8])
    def test_fixed_service_waits_as_in_m_d_1(self, utilisation):
        """Poisson arrivals at one node with constant prefill time wait as Pollaczek and Khinchine say (I8)."""
        rng = np.random.default_rng(0)
        arrivals = np.cumsum(rng.exponential(1 / utilisation, 8_000))
        requests = [fresh(i, float(t), 512) for i, t in enumerate(arrivals)]
        spec = ClusterSpec.disaggregated(
            prefill_nodes=1, decode_nodes=1, cache_tokens=512, placement=LoadBalance()
        )
        table = request_table(Cluster(spec, make_model(constant_s=1.0)).run(requests))
        waits = (table["ttft_s"] - 1.0).to_numpy()
        expected = utilisation / (2 * (1 - utilisation))
        batches = waits[: 40 * (len(waits) // 40)].reshape(40, -1).mean(axis=1)
        assert abs(waits.mean() - expected) < 3 * batches.std(ddof=1) / math.sqrt(40) + 1e-3

    def test_exponential_service_waits_as_in_m_m_1(self):
        """With exponential prompt lengths one node is an M/M/1 queue (I8)."""
        rng = np.random.default_rng(1)
        utilisation, n = 0.7, 8_000
        arrivals = np.cumsum(rng.exponential(1 / utilisation, n))
        lengths = np.maximum(1, rng.exponential(100_000, n)).astype(int)
        requests = [
            TracedRequest(
                Request(
                    id=i,
                    arrival_s=float(t),
                    input_tokens=int(size),
                    block_keys=(i,),
                    block_size_tokens=10**9,
                ),
                1,
            )
            for i, (t, size) in enumerate(zip(arrivals, lengths, strict=True))
        ]
        spec = ClusterSpec.disaggregated(
            prefill_nodes=1, decode_nodes=1, device_tokens=10**12, placement=LoadBalance()
        )
        table = request_table(Cluster(spec, make_model(per_token_s=1e-5)).run(requests))
        sojourn = table["ttft_s"].to_numpy()
        batches = sojourn.reshape(40, -1).mean(axis=1)
        assert abs(sojourn.mean() - 1 / (1 - utilisation)) < 3 * batches.std(ddof=1) / math.sqrt(40)


ONE_WAITS_FOR_THE_FETCH_OF_ANOTHER = [
    (0.0, 1, 1, 2),
    (0.0, 1, 2, 0),
    (0.0, 1251, 1, 0),
    (0.0, 1251, 1, 0),
    (0.125, 2, 1, 2),
    (0.125, 2, 1, 2),
]


class TestInvariants:
    @settings(max_examples=80, deadline=None)
    @given(REQUESTS, clusters())
    def test_every_request_ends_once_and_in_order(self, rows, drawn):
        """I1, I2, I3: arrivals are conserved, times are ordered, stores and their index agree."""
        cluster = simulated(drawn)
        log = cluster.run(requests_of(rows))
        assert check_log(log) == ()
        for store in cluster.executor.prefix_caches.stores.values():
            store.check()
        ((_, held),) = replicas_at(log, [math.inf])
        index = cluster.coordinator.instances.index
        assert +held == Counter(key for name in index.instances for key in index.held_by(name))
        for name in index.instances:
            assert index.held_by(name) == cluster.executor.prefix_caches.stores[name].keys()
        table = request_table(log)
        assert set(table["end"]) <= {"finished", "rejected"}
        finished = table[table["end"] == "finished"]
        outputs = {t.request.id: t.output_tokens for t in requests_of(rows)}
        assert all(outputs[i] == row for i, row in finished["output_tokens"].items())

    @settings(max_examples=80, deadline=None)
    @given(REQUESTS, clusters())
    def test_no_disk_is_faster_than_it_is(self, rows, drawn):
        """What a node reads from SSD in any span of time, for itself and for others, takes no longer than that."""
        log = simulated(drawn).run(requests_of((at_s / 5, *rest) for at_s, *rest in rows))
        reads = defaultdict(list)
        for record in log:
            if isinstance(record, Moved) and record.source.endswith("/ssd"):
                reads[record.source].append(record)
        for of_node in reads.values():
            for first, last in product(of_node, of_node):
                within = [r.bytes for r in of_node if r.start_s >= first.start_s and r.at_s <= last.at_s]
                assert sum(within) <= REALISTIC.ssd.bytes_per_s * (last.at_s - first.start_s + 1e-6) or not within

    @settings(max_examples=25, deadline=None)
    @given(REQUESTS, clusters())
    def test_same_spec_same_log(self, rows, drawn):
        """I5: two runs of one experiment write the same log, bit for bit."""
        assert simulated(drawn).run(requests_of(rows)) == simulated(drawn).run(requests_of(rows))

    @settings(max_examples=25, deadline=None)
    @given(REQUESTS, POLICIES)
    def test_no_request_beats_its_lower_bound(self, rows, policy):
        """I9: no first token before its own prefill with everything but one token reused, on an idle node."""
        spec = ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=2, cache_tokens=3000, placement=policy)
        table = request_table(Cluster(spec, REALISTIC).run(requests_of(rows)))
        for traced in requests_of(rows):
            least = REALISTIC.prefill.seconds(traced.request.input_tokens, traced.request.input_tokens - 1)
            assert table.loc[traced.request.id, "ttft_s"] >= least * (1 - 1e-9)

    @settings(max_examples=25, deadline=None)
    @given(REQUESTS, st.integers(1, 3), st.booleans())
    @example(
        [(0.0, 1, 1, 2), (0.0, 1, 2, 0), (0.0, 1251, 1, 0), (0.0, 1251, 1, 0), (0.125, 2, 1, 2), (0.125, 2, 1, 2)],
        3,
        True,
    )
    def test_no_instance_idles_while_it_has_work(self, rows, nodes, overtaking):
        """I4: from the moment a prompt may start at an instance until it starts, that one computes."""
        policy = KVCacheCentric(balancing_threshold=1.1)
        spec = ClusterSpec.disaggregated(
            prefill_nodes=nodes, decode_nodes=2, cache_tokens=3000, placement=policy, overtaking=overtaking
        )
        log = Cluster(spec, make_model(constant_s=0.05, per_token_s=1e-4, bytes_per_s=2e9)).run(requests_of(rows))
        placed = {record.request_id: record for record in log if isinstance(record, Placed)}
        fetches = [
            record
            for record in log
            if isinstance(record, Moved) and record.destination == placed[record.request_id].prefill_instance
        ]
        arrived_s = {record.request_id: record.at_s for record in fetches}
        runs = [record for record in log if isinstance(record, Prefilled)]
        latest_s = dict.fromkeys((run.instance for run in runs), 0.0)
        for run in sorted(runs, key=lambda run: placed[run.request_id].at_s):
            place = placed[run.request_id]
            runnable_s = max(place.at_s, arrived_s.get(run.request_id, 0.0))
            if place.fetched_tokens and run.request_id not in arrived_s:  # another request fetched the same blocks
                ends_s = [
                    fetch.at_s
                    for fetch in fetches
                    if fetch.destination == run.instance
                    and fetch.start_s <= place.at_s <= fetch.at_s <= run.start_s
                ]
                assert ends_s
                runnable_s = max(runnable_s, *ends_s)
            if not overtaking:  # those before it have to start first
                runnable_s = latest_s[run.instance] = max(runnable_s, latest_s[run.instance])
            overlaps = (
                min(other.at_s, run.start_s) - max(other.start_s, runnable_s)
                for other in runs
                if other.instance == run.instance
            )
            busy_s = sum(seconds for seconds in overlaps if seconds > 0)
            assert busy_s == pytest.approx(run.start_s - runnable_s, abs=1e-6)

    @pytest.mark.parametrize(("overtaking", "start_s"), [(True, (2.5, 2.1)), (False, (2.5, 2.5))])
    def test_a_prompt_that_waits_for_its_prefix(self, overtaking, start_s):
        """While 0.5 s of KVCache are on their way, the prompt behind waits too, or goes first if it may."""
        long = tuple(range(8))
        requests = [
            TracedRequest(Request(id=0, arrival_s=0.0, input_tokens=4096, block_keys=long), 1),
            TracedRequest(Request(id=1, arrival_s=2.0, input_tokens=4096, block_keys=long), 1),
            fresh(2, 2.1, 512),
        ]

        class OneThenOther:
            def place(self, request, view, estimate):
                del view, estimate
                fetches = request.id == 1
                return Placement(
                    request_id=request.id, prefill="prefill-1" if request.id else "prefill-0", decode="decode-0",
                    reused_tokens=4095 if fetches else 0, fetched_tokens=4095 if fetches else 0,
                    fetch_from="prefill-0" if fetches else None, expected_ttft_s=0.0, expected_tbt_s=0.0,
                    reason="",
                )  # fmt: skip

        model = make_model(per_token_s=1e-4, bytes_per_s=2 * 4096 * model_shape("llama3-70b").kv_bytes_per_token)
        spec = ClusterSpec.disaggregated(
            prefill_nodes=2, decode_nodes=1, placement=OneThenOther(), overtaking=overtaking
        )
        starts = {r.request_id: r.start_s for r in Cluster(spec, model).run(requests) if isinstance(r, Prefilled)}
        assert starts[1] == pytest.approx(start_s[0], abs=1e-3)
        assert starts[2] == pytest.approx(start_s[1], abs=1e-3)
