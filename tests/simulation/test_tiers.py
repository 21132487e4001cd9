"""Prefill nodes with an SSD under their DRAM."""

from dataclasses import replace

import pytest
from drawn import REALISTIC, REQUESTS, clusters
from families import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.cluster import Attempt, ClusterSpec
from mooncake_lab.conductor import (
    KVCacheCentric,
    LoadBalance,
    Placement,
)
from mooncake_lab.core import Moved, Prefilled, Request, TracedRequest
from mooncake_lab.metrics import check_log, reused_share, tier_hit_rates, ttft_s
from mooncake_lab.perf import (
    CppGroup,
    DecodeLatency,
    HybridLatency,
    LatencyModel,
    LinkLatency,
    PrefillLatency,
    model_shape,
)
from mooncake_lab.simulation import Cluster, Failure, SimulationOptions
from mooncake_lab.simulation.instances import PromptPart, prefill_finish_s
from mooncake_lab.simulation.kv_transfer import PrefillJob
from mooncake_lab.simulation.prefix_caches import PrefixCaches

SHAPE = model_shape("llama3-70b")
MODEL = LatencyModel(
    name="by hand",
    shape=SHAPE,
    prefill=PrefillLatency(constant_s=0.0, per_token_s=1e-3, per_token_squared_s=0.0),
    decode=DecodeLatency(0.02, 0.0, 0.0),
    hybrid=HybridLatency(floor_s=0.02, per_token_s=0.0, per_token_squared_s=0.0, per_context_token_s=0.0),
    transfer=LinkLatency(1e15),
    dram=LinkLatency(1e15),
    ssd=LinkLatency(SHAPE.kv_bytes_per_token * 2000.0),  # 2000 tokens a second, twice as fast as computing
)


def family(i, at_s, number, blocks) -> TracedRequest:
    keys = tuple(number * 100 + k for k in range(blocks))
    return TracedRequest(Request(id=i, arrival_s=at_s, input_tokens=blocks * 512, block_keys=keys), 1)


def spec(prefill_nodes=1, **knobs):
    return ClusterSpec.disaggregated(prefill_nodes=prefill_nodes, decode_nodes=1, cache_tokens=4 * 512, **knobs)


THREE = [family(0, 0.0, 1, 4), family(1, 10.0, 2, 4), family(2, 20.0, 1, 4)]


class TestSinkingAndRising:
    def test_what_dram_evicts_is_found_on_ssd(self):
        """Without an SSD the third prompt is computed anew; with one all but its last token is read."""
        computed = {}
        for tokens in (0, 4 * 512):
            log = Cluster(spec(ssd_tokens=tokens), MODEL).run(THREE)
            assert check_log(log) == ()
            computed[tokens] = [r.computed_tokens for r in log if isinstance(r, Prefilled)][2]
        assert computed == {0: 2048, 2048: 1}

    @settings(max_examples=60, deadline=None)
    @given(REQUESTS, clusters())
    def test_shares_of_tiers_are_shares(self, rows, drawn):
        """Of any cluster: no tier has less than nothing, and together they have the token hit rate."""
        spec, options = drawn
        prefill, decode = spec.pools
        prefill = replace(
            prefill, nodes=3 * prefill.prefill_group, cache_tokens=1024, ssd_tokens=4096, shared_cache=False
        )
        fetching = replace(spec, placement=KVCacheCentric(1.0), pools=(prefill, decode))
        crowded = requests_of((at_s / 5, *rest) for at_s, *rest in rows)
        log = Cluster(fetching, REALISTIC, options).run(crowded)
        if any(isinstance(r, Prefilled) for r in log):
            rates = tier_hit_rates(log, REALISTIC.shape.kv_bytes_per_token)
            assert min(rates.values()) >= 0
            assert sum(rates.values()) == pytest.approx(reused_share(log))

    def test_what_was_evicted_again_is_no_hit(self):
        """A prefix that was read from another node's SSD, and lost before the prefill began, counts nowhere."""
        kv = SHAPE.kv_bytes_per_token
        read = Moved(
            at_s=1.0,
            request_id=0,
            source="prefill-1/ssd",
            destination="prefill-1/dram",
            start_s=0.0,
            bytes=512 * kv,
        )
        spans = [
            Prefilled(
                at_s=2.0,
                request_id=i,
                instance="p",
                start_s=1.0,
                computed_tokens=1024 - reused,
                reused_tokens=reused,
            )
            for i, reused in enumerate((0, 512))
        ]
        assert tier_hit_rates([read, *spans], kv) == {"dram": 0.25, "ssd": 0.0}


@given(st.integers(1, 5000), st.floats(0, 1), st.floats(0, 1))
def test_overlap_hides_all_but_one_layer(tokens, share, of_those):
    """With reading overlapped a prefill takes what a pipeline over layers takes, layer by layer."""
    reused = int(share * (tokens - 1))
    from_ssd = int(of_those * reused)
    compute_s, read_s = MODEL.prefill.seconds(tokens, reused), from_ssd / 2000
    ready = done = 0.0
    for _ in range(SHAPE.layers):  # the reference: one layer after the other
        ready += read_s / SHAPE.layers
        done = max(done, ready) + compute_s / SHAPE.layers
    parts = [PromptPart(tokens, reused, from_ssd)]
    assert prefill_finish_s(MODEL, None, parts) == [pytest.approx(done)]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=3), st.floats(0, 1), st.integers(1, 4))
def test_reading_ends_all_nodes_of_a_group_later(parts, share, nodes):
    """Each node is done as much later as the last one, which is done as a single one with that computation is."""
    group = CppGroup(
        prefill=MODEL.prefill,
        shape=SHAPE,
        nodes=nodes,
        chunk_tokens=512,
        link=LinkLatency(1e12),
        chunk_constant_s=0.0,
    )
    tokens = sum(parts) + 1
    reused = int(share * (tokens - 1))
    free_s = [0.1 * place for place in range(nodes)]
    without, reading = (
        prefill_finish_s(MODEL, group, [PromptPart(tokens, reused, ssd)], free_s) for ssd in (0, reused)
    )
    assert reading[-1] == pytest.approx(MODEL.beside_ssd_s(without[-1], reused))
    assert [b - a for a, b in zip(without, reading, strict=True)] == pytest.approx(
        [reading[-1] - without[-1]] * nodes
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8)), min_size=1, max_size=6),
    st.tuples(st.integers(0, 2), st.integers(1, 8)),
    st.sampled_from([100.0, 900.0, 1500.0, 4000.0]),
)
def test_what_is_on_ssd_is_read_where_that_is_faster(kept, last, tokens_per_s):
    """All that a node holds of a prompt, or only what is before the first block on SSD: whichever ends first."""
    model = replace(MODEL, ssd=LinkLatency(SHAPE.kv_bytes_per_token * tokens_per_s))
    cluster = Cluster(spec(ssd_tokens=8 * 512), model)
    pool, node = cluster.executor.prefix_caches, cluster.executor.prefill["prefill-0"]
    for i, (number, blocks) in enumerate(kept):
        pool.keep("prefill-0", family(i, 0.0, number, blocks).request)
    request = family(9, 0.0, *last).request
    held, in_dram = pool.matched("prefill-0", request), pool.before_ssd("prefill-0", request)

    def seconds(blocks):
        reused = min(blocks * 512, request.input_tokens - 1)
        below = min(pool.on_ssd("prefill-0", request.block_keys[:blocks]) * 512, reused)
        (end_s,) = prefill_finish_s(model, None, [PromptPart(request.input_tokens, reused, below)])
        return end_s

    found = min(node._most_blocks(PrefillJob(Attempt(9, 1), request, None), ()), held)
    assert seconds(found) == min(seconds(held), seconds(held if in_dram is None else in_dram))


class Fetching:
    """The first prompts on one node, the last one on the other, which copies what the first holds."""

    def place(self, request, view, estimate):
        del view, estimate
        last = request.id == 2
        return Placement(
            request_id=request.id, prefill="prefill-1" if last else "prefill-0", decode="decode-0",
            reused_tokens=2047 if last else 0, fetched_tokens=2047 if last else 0,
            fetch_from="prefill-0" if last else None, expected_ttft_s=0.0, expected_tbt_s=0.0, reason="",
        )  # fmt: skip


@pytest.mark.parametrize("dies", ["", "prefill-0", "decode-0"])
def test_what_lies_on_its_holders_ssd_is_read_before_it_is_sent(dies):
    """A copy waits for its holder's SSD, and so does the prompt; if the holder dies, the prompt is computed.

    If nobody is left to decode, nothing is sent that nobody waits for.
    """
    failures = (Failure(dies, 20.5),) if dies else ()
    two = spec(prefill_nodes=2, ssd_tokens=4 * 512, placement=Fetching())
    log = Cluster(two, MODEL, SimulationOptions(failures=failures)).run(THREE)
    assert check_log(log) == ()
    moves = [r for r in log if isinstance(r, Moved) and r.request_id == 2 and "decode" not in r.destination]
    if dies == "decode-0":
        assert moves == []
        return
    (last,) = [r for r in log if isinstance(r, Prefilled) and r.request_id == 2]
    if dies:
        assert (moves, last.computed_tokens) == ([], 2048)
        return
    read, sent = moves
    assert (read.source, read.destination) == ("prefill-0/ssd", "prefill-0/dram")
    assert (sent.source, sent.destination) == ("prefill-0", "prefill-1")
    assert read.at_s - read.start_s == pytest.approx(2047 / 2000)
    assert sent.start_s == read.at_s
    assert last.start_s == pytest.approx(sent.at_s)
    assert last.computed_tokens == 1


@pytest.mark.parametrize("kept", range(5))
def test_what_is_evicted_before_it_is_read_is_computed(kept):
    """Of a prefix that waits for its holder's SSD, only the blocks before the first that was evicted are sent."""
    others = [family(4, 19.5, 3, 1)] if kept < 4 else []
    if 0 < kept < 4:
        others.append(family(3, 15.0, 1, kept))  # they rise, and are evicted last
    two = spec(prefill_nodes=2, ssd_tokens=4 * 512, placement=Fetching())
    log = Cluster(two, MODEL).run(sorted([*THREE, *others], key=lambda one: one.request.arrival_s))
    assert check_log(log) == ()
    (last,) = [r for r in log if isinstance(r, Prefilled) and r.request_id == 2]
    reused = min(512 * kept, 2047)
    assert (last.computed_tokens, last.reused_tokens) == (2048 - reused, reused)
    sent = [r.bytes for r in log if isinstance(r, Moved) and r.destination == "prefill-1"]
    assert sent == [reused * SHAPE.kv_bytes_per_token] * (reused > 0)


def test_a_block_that_was_read_for_another_node_has_risen():
    """Who fetches the same prefix later does not wait for the SSD; reads of one SSD wait for each other."""
    requests = [
        *(family(i, 10.0 * i, i + 1, 4) for i in range(3)),  # the third is in DRAM, the others have sunk
        family(3, 40.0, 1, 4), family(4, 40.2, 2, 4), family(5, 60.0, 2, 4),
    ]  # fmt: skip
    places = dict.fromkeys(range(3), ("prefill-0", None))
    places |= {3: ("prefill-1", "prefill-0"), 4: ("prefill-2", "prefill-0"), 5: ("prefill-1", "prefill-0")}

    class Told:
        def place(self, request, view, estimate):
            del view, estimate
            prefill, source = places[request.id]
            return Placement(
                request_id=request.id, prefill=prefill, decode="decode-0", reused_tokens=2047 if source else 0,
                fetched_tokens=2047 if source else 0, fetch_from=source, expected_ttft_s=0.0, expected_tbt_s=0.0,
                reason="",
            )  # fmt: skip

    three = spec(prefill_nodes=3, ssd_tokens=16 * 512, placement=Told())
    log = Cluster(three, MODEL).run(requests)
    reads = [record for record in log if isinstance(record, Moved) and record.source == "prefill-0/ssd"]
    assert [record.request_id for record in reads] == [3, 4]
    assert reads[0].start_s == pytest.approx(40.0, abs=0.1)
    assert reads[1].start_s == pytest.approx(reads[0].at_s)


def test_only_what_was_fetched_comes_by_a_fetch():
    """A prefix that the fetching node held itself, on its SSD, is read there and not conjured into DRAM."""
    pool = PrefixCaches(["a", "b"], capacity_tokens=4 * 512, bytes_per_token=1, ssd_tokens=8 * 512)
    first, second = THREE[0].request, THREE[1].request
    pool.keep("a", first, 2)
    pool.keep("a", second)
    assert pool.on_ssd("a", first.block_keys[:2]) == 2
    pool.keep("a", first, 4, first=2)
    assert pool.on_ssd("a", first.block_keys) == 2
    for store in pool.stores.values():
        store.check()


class TestThePriceOfReading:
    """An SSD that delivers 100 tokens a second, where a node computes 1,000."""

    SLOW = replace(MODEL, ssd=LinkLatency(SHAPE.kv_bytes_per_token * 100.0))

    def test_what_is_read_is_in_the_estimate(self):
        """The Conductor expects the TTFT that a request has, also where its prefix is on SSD."""
        expected = {}

        class Noted(LoadBalance):
            def place(self, request, view, estimate):
                placed = super().place(request, view, estimate)
                expected[request.id] = placed.expected_ttft_s
                return placed

        shape = spec(ssd_tokens=4 * 512, placement=Noted(), first_shown_by="prefill")
        found = ttft_s(Cluster(shape, self.SLOW).run(THREE))
        assert expected == pytest.approx(found, abs=0.5)

    def test_what_is_computed_again_takes_room_in_a_packed_iteration(self):
        """Prompts whose prefix is on an SSD that is too slow are not packed as if they reused it."""
        slow = replace(MODEL, ssd=LinkLatency(SHAPE.kv_bytes_per_token * 10.0))
        kept = [family(i, 10.0 * i, i, 4) for i in range(3)]
        waiting = [family(3, 40.0, 9, 1), family(4, 40.1, 0, 4), family(5, 40.2, 1, 4)]
        log = Cluster(spec(ssd_tokens=16 * 512, pack_tokens=1024), slow).run([*kept, *waiting])
        starts = [(r.start_s, r.computed_tokens) for r in log if isinstance(r, Prefilled) and r.request_id > 3]
        assert [computed for _, computed in starts] == [2048, 2048]
        assert starts[0][0] < starts[1][0]


class ReadTwice:
    """Requests up to 3 on the first node; of the others one there too, and one that fetches from it."""

    def place(self, request, view, estimate):
        del view, estimate
        fetches = request.id == 5
        return Placement(
            request_id=request.id, prefill=f"prefill-{int(fetches)}", decode="decode-0",
            reused_tokens=2048 if fetches else 0, fetched_tokens=2048 if fetches else 0,
            fetch_from="prefill-0" if fetches else None, expected_ttft_s=0.0, expected_tbt_s=0.0, reason="",
        )  # fmt: skip


@pytest.mark.parametrize("fetched_s", [100.0, 100.1])
def test_a_disk_reads_one_prefix_at_a_time(fetched_s):
    """A node that reads one prefix for itself and one for another node takes as long as both, in either order."""
    filling = [family(i, 10.0 * i, i, 4) for i in range(4)]
    both = [family(4, 100.0, 0, 4), family(5, fetched_s, 1, 5)]
    slow = replace(MODEL, ssd=LinkLatency(SHAPE.kv_bytes_per_token * 4000.0))
    shape = ClusterSpec.disaggregated(
        prefill_nodes=2, decode_nodes=1, cache_tokens=4 * 512, ssd_tokens=64 * 512,
        placement=ReadTwice(),
    )  # fmt: skip
    log = Cluster(shape, slow).run([*filling, *both])
    reads = [r for r in log if isinstance(r, Moved) and r.source == "prefill-0/ssd"]
    assert [r.request_id for r in reads] == ([5, 4] if fetched_s == 100.0 else [4, 5])
    assert max(r.at_s for r in reads) >= 100.0 + 2 * 2047 / 4000
