"""Coupled instances: fast-forwarded iterations against a simulator that takes every one of them."""

import math
from bisect import insort
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import (
    VLLM,
    Limits,
    Orca,
    Progress,
    RequestLevel,
    Sarathi,
    SarathiServe,
    SplitFuse,
    TensorRTLLM,
    VLLMChunked,
)
from mooncake_lab.conductor import (
    EarlyRejection,
    KVCacheCentric,
    LengthPredicting,
    LoadBalance,
    PredictiveRejection,
)
from mooncake_lab.core import (
    SLO,
    DecodeStretch,
    Finished,
    FirstToken,
    Prefilled,
    Rejected,
    Request,
    TracedRequest,
    blocks_for,
)
from mooncake_lab.metrics import RunningSummary, check_log, run_summary, token_times_s
from mooncake_lab.paper import assumption
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import (
    COUPLED_SYSTEMS,
    DEFAULT_MAX_TOKENS,
    Cluster,
    ClusterSpec,
    CoupledInstance,
    CoupledPool,
    DeviceCache,
)
from mooncake_lab.testbeds import paper_node_latency
from mooncake_lab.workload.twin import make_twin

MODEL = LatencyModel(
    name="by hand",
    shape=model_shape("llama3-70b"),
    prefill=PrefillLatency(constant_s=0.5, per_token_s=2**-9, per_token_squared_s=2**-20),
    decode=DecodeLatency(0.25, 2**-5, 2**-10),  # powers of two: sums are exact, so boundaries are unambiguous
    hybrid=HybridLatency(
        floor_s=0.25,
        per_token_s=2**-9,
        per_token_squared_s=2**-20,
        per_request_s=2**-5,
        per_context_token_s=2**-10,
    ),
    transfer=LinkLatency(1e12),
    dram=LinkLatency(1e12),
)
POLICIES = {
    "vllm": VLLM(),
    "vllm_chunked": VLLMChunked(chunk_tokens=64),
    "sarathi_serve": SarathiServe(chunk_tokens=64),
    "splitfuse": SplitFuse(chunk_tokens=48),
    "sarathi": Sarathi(chunk_tokens=64),
    "tensorrt_llm": TensorRTLLM(chunk_tokens=64),
    "orca": Orca(),
    "request_level": RequestLevel(),
}
# off the grid of iteration boundaries, so that nobody comes exactly with one
# arrivals lie irrationally far from one another: none comes as an iteration ends, where rounding would decide
ROWS = st.lists(
    st.tuples(st.integers(0, 60).map(lambda n: n * math.sqrt(1.1)), st.integers(1, 300), st.integers(1, 25)),
    min_size=1,
    max_size=8,
    unique_by=lambda row: row[0],
).map(sorted)
CAPACITY = st.sampled_from([352, 640, 4096])


def requests(rows, block=32, families=None) -> list[TracedRequest]:
    """Requests that share nothing, or the front of their family."""
    return [
        TracedRequest(
            Request(
                id=i,
                arrival_s=at_s,
                input_tokens=tokens,
                block_size_tokens=block,
                block_keys=tuple(
                    (families[i] if families else i) * 1000 + k for k in range(blocks_for(tokens, block))
                ),
            ),
            outputs,
        )
        for i, (at_s, tokens, outputs) in enumerate(rows)
    ]


def spec(policy, capacity, max_request_tokens=328, **knobs) -> ClusterSpec:
    """One node with small memory; the window keeps policies that reserve the worst case alive."""
    return ClusterSpec.coupled(
        nodes=1, batching=policy, device_tokens=capacity, max_batch_tokens=400, max_requests=4,
        max_request_tokens=max_request_tokens, memory_block_tokens=8, block_size_tokens=32, **knobs,
    )  # fmt: skip


class OneByOne:
    """A coupled instance that takes every iteration, slow and obvious; no prefix caching."""

    def __init__(self, policy, rows, capacity):
        self.policy, self.rows, self.blocks = policy, rows, capacity // 8
        self.waiting, self.running, self.now = [], [], 0.0
        self.cached, self.made, self.begun = ([0] * len(rows) for _ in range(3))
        self.times = {i: [] for i in range(len(rows))}

    def seen(self, i):
        return Progress(
            request_id=i,
            arrival=i,
            prompt_tokens=self.rows[i][1],
            cached_tokens=self.cached[i],
            generated_tokens=self.made[i],
            held_blocks=-(-self.cached[i] // 8),
        )

    def plan(self):
        held = sum(self.seen(i).held_blocks for i in self.running)
        limits = Limits(
            max_batch_tokens=400,
            max_requests=4,
            block_size_tokens=8,
            capacity_blocks=self.blocks,
            free_blocks=self.blocks - held,
            max_request_tokens=328,
        )
        plan = self.policy.plan([self.seen(i) for i in self.waiting], [self.seen(i) for i in self.running], limits)
        for refusal in plan.rejected:
            (self.waiting if refusal.request_id in self.waiting else self.running).remove(refusal.request_id)
            self.times.pop(refusal.request_id)
        for i in (*plan.preempted, *plan.swapped):
            self.running.remove(i)
            insort(self.waiting, i)
            self.cached[i], self.begun[i] = 0, 0
        return plan

    def duration(self, segments):
        h = MODEL.hybrid
        decodes = [s.request_id for s in segments if s.kind == "decode"]
        lasts = max(h.floor_s, h.per_token_s * sum(s.new_tokens for s in segments)) + h.per_request_s * len(
            decodes
        )
        lasts += sum(h.per_context_token_s * self.cached[i] for i in decodes)
        for s in segments:
            if s.kind == "prefill":
                before = self.cached[s.request_id]
                lasts += h.per_token_squared_s * ((before + s.new_tokens) ** 2 - before**2)
                lasts += 0 if self.begun[s.request_id] else MODEL.prefill.constant_s
        return lasts

    def iterate(self, segments):
        self.now += self.duration(segments)
        for s in segments:
            i = s.request_id
            if i in self.waiting:
                self.waiting.remove(i)
                insort(self.running, i)
            self.cached[i] += s.new_tokens
            self.begun[i] = 1
            if s.emits:
                self.made[i] += 1
                self.times[i].append(self.now)
                if self.made[i] == self.rows[i][2]:
                    self.running.remove(i)

    def run(self):
        coming = list(enumerate(self.rows))
        while coming or self.waiting or self.running:
            while coming and coming[0][1][0] <= self.now:
                self.waiting.append(coming.pop(0)[0])
            plan = self.plan()
            if plan.segments:
                self.iterate(plan.segments)
            elif not (plan.rejected or plan.preempted or plan.swapped):
                self.now = coming[0][1][0]
        return self.times


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
class TestEveryPolicy:
    @settings(max_examples=25, deadline=None)
    @given(rows=ROWS, capacity=CAPACITY)
    def test_every_token_comes_when_the_slow_simulator_says(self, policy, rows, capacity):
        """Fast-forwarding changes no token's time, under any policy, with much memory and with little."""
        log = Cluster(spec(policy, capacity), MODEL).run(requests(rows))
        assert check_log(log) == ()
        times = dict(token_times_s(log))
        expected = OneByOne(policy, rows, capacity).run()
        assert set(times) == set(expected)
        for i, when in expected.items():
            np.testing.assert_allclose(times[i], when, rtol=0, atol=1e-9)

    @settings(max_examples=25, deadline=None)
    @given(rows=ROWS, capacity=CAPACITY, family=st.integers(1, 3))
    def test_with_prefix_caching_too(self, policy, rows, capacity, family):
        """With prefixes shared through GPU memory, one step at a time gives the same log of tokens."""
        shared = requests(rows, families=[i % family for i in range(len(rows))])
        knobs = spec(policy, capacity, prefix_caching=True)
        cluster = Cluster(knobs, MODEL)
        fast = dict(token_times_s(cluster.run(shared)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CoupledInstance, "_steady_steps", lambda *_: 1)
            slow_log = Cluster(knobs, MODEL).run(shared)
        slow = dict(token_times_s(slow_log))
        assert set(fast) == set(slow)
        for i, when in slow.items():
            np.testing.assert_allclose(fast[i], when, rtol=0, atol=1e-9)
        assert check_log(cluster.log) == ()
        (instance,) = cluster.coupled.values()
        instance.cache.check()
        assert instance.cache.pinned_tokens == 0


class TestByHand:
    def test_a_prompt_stalls_decodes_under_vllm(self):
        """Prefill-first: the second prompt is computed between two tokens of the first request."""
        rows = [(0.0, 64, 3), (0.7, 128, 1)]
        log = Cluster(spec(VLLM(), 4096), MODEL).run(requests(rows))
        first = 0.5 + max(0.25, 64 / 512) + 64**2 / 2**20
        stall = 0.5 + max(0.25, 128 / 512) + 128**2 / 2**20
        times = dict(token_times_s(log))[0]
        assert times[0] == pytest.approx(first)
        assert times[1] - times[0] == pytest.approx(stall + 0.25 + 2**-5 + 64 / 1024)

    def test_a_second_turn_reuses_the_first(self):
        """Prefix caching computes only what the cache does not hold; whole blocks, and never the last token."""
        rows = [(0.0, 64, 1), (20.3, 96, 1), (40.3, 64, 1)]
        log = Cluster(spec(VLLM(), 4096, prefix_caching=True), MODEL).run(requests(rows, families=[0, 0, 0]))
        spans = [(r.computed_tokens, r.reused_tokens) for r in log if isinstance(r, Prefilled)]
        assert spans == [(64, 0), (32, 64), (32, 32)]

    @pytest.mark.parametrize(("until_s", "blocks"), [(0.7, 0), (0.9, 2), (1.2, 4), (1.5, 6)])
    def test_a_block_is_shared_once_it_is_computed(self, until_s, blocks):
        """While the second piece of a prompt is computed, the Conductor knows the blocks of the first."""
        cluster = Cluster(spec(SarathiServe(chunk_tokens=64), 4096, prefix_caching=True), MODEL)
        cluster.run(requests([(0.0, 192, 1)], families=[0]), until_s)
        assert len(cluster.coordinator.workers.cached("coupled-0")) == blocks

    def test_what_is_only_kept_makes_room(self):
        """A request that needs all memory evicts what nobody uses."""
        rows = [(0.0, 160, 1), (20.3, 300, 4), (80.3, 160, 1)]
        log = Cluster(spec(VLLM(), 352, prefix_caching=True), MODEL).run(requests(rows, families=[0, 1, 0]))
        spans = [r.reused_tokens for r in log if isinstance(r, Prefilled)]
        assert spans == [0, 0, 0]
        assert sum(isinstance(r, Finished) for r in log) == 3

    def test_blocks_shared_with_a_refused_request_are_counted_once(self):
        """While a request outgrows the memory, no prompt is admitted that shares its blocks, or takes them."""
        rows = [(0.0, 270, 99), (0.1, 139, 2), (0.1, 293, 2)]
        roomy = spec(VLLM(), 320, max_request_tokens=600, prefix_caching=True)
        log = Cluster(roomy, MODEL).run(requests(rows, families=[0, 1, 0]))
        assert [r.request_id for r in log if isinstance(r, Rejected)] == [0]
        assert [r.request_id for r in log if isinstance(r, Finished)] == [1, 2]


class TestPreempted:
    def test_a_preempted_request_is_no_hit(self):
        """Where nothing is shared the hit rate is 0, though a preempted request finds its own blocks again."""
        alone = requests([(0.0, 4097, 3000)] * 8, block=512)
        computed = {}
        for caching in (False, True):
            knobs = ClusterSpec.coupled(nodes=1, prefix_caching=caching, device_tokens=40_000)
            log = Cluster(knobs, MODEL).run(alone)
            assert run_summary(log, SLO())["token_hit_rate"] == 0.0
            computed[caching] = sum(r.computed_tokens for r in log if isinstance(r, Prefilled))
        assert computed[False] > computed[True] > 8 * 4097  # some were preempted, and found their blocks

    def test_what_others_computed_is_a_hit(self):
        """A request that is preempted keeps the hits of its first admission, once."""
        rows = [(0.0, 4097, 1), *((60.3, 4097, 3000) for _ in range(8))]
        knobs = ClusterSpec.coupled(nodes=1, prefix_caching=True, device_tokens=40_000)
        log = Cluster(knobs, MODEL).run(requests(rows, block=512, families=[0, *range(8)]))
        spans = [(r.request_id, r.reused_tokens) for r in log if isinstance(r, Prefilled)]
        assert len(spans) > len(rows)
        assert [(i, reused) for i, reused in spans if reused] == [(1, 4096)]

    @settings(max_examples=40, deadline=None)
    @given(rows=ROWS, capacity=CAPACITY, policy=st.sampled_from(list(POLICIES.values())))
    def test_without_sharing_there_is_no_hit(self, rows, capacity, policy):
        """Whatever is preempted under whatever policy: requests that share nothing hit nothing."""
        log = Cluster(spec(policy, capacity, prefix_caching=True), MODEL).run(requests(rows))
        assert not any(r.reused_tokens for r in log if isinstance(r, Prefilled))


def test_a_fetching_policy_is_refused():
    """Coupled instances have no store to fetch from, and say so."""
    with pytest.raises(ValueError, match=r"ClusterSpec\.placement is KVCacheCentric.*\(remote_prefixes: a store"):
        ClusterSpec.coupled(prefix_caching=True, placement=KVCacheCentric(balancing_threshold=1.0))


def test_a_fetching_policy_that_declares_nothing_is_refused_when_it_fetches():
    """A policy of a user that declares no need is stopped at the first request it would fetch for."""

    class Undeclared:
        def place(self, request, view, estimate):
            return KVCacheCentric(balancing_threshold=1.0).place(request, view, estimate)

    rows = [(0.0, 64, 1), (0.1, 300, 200), (30.3, 96, 1), (30.4, 96, 1), (30.5, 96, 1)]
    knobs = ClusterSpec.coupled(nodes=2, prefix_caching=True, block_size_tokens=32, placement=Undeclared())
    with pytest.raises(ValueError, match="do not share their caches"):
        Cluster(knobs, MODEL).run(requests(rows, families=[0, 1, 0, 0, 0]))


def test_one_instance_does_both_stages():
    """A request placed on a coupled instance prefills and decodes there."""
    rows = [(0.1 * i, 64, 5) for i in range(6)]
    knobs = ClusterSpec.coupled(nodes=3, block_size_tokens=32, placement=LoadBalance("assigned_requests"))
    log = Cluster(knobs, MODEL).run(requests(rows))
    placed = [r for r in log if r.__struct_config__.tag == "placed"]
    assert all(r.prefill_instance == r.decode_instance for r in placed)
    assert len({r.prefill_instance for r in placed}) == 3
    assert sum(isinstance(r, FirstToken) for r in log) == 6


RESERVING = ("request_level", "orca", "sarathi", "tensorrt_llm")


def largest_batch(name, limit, **knobs):
    """Of 40 requests with prompts of 96 and answers of 50 tokens on a node for 4096 tokens."""
    policy, _ = COUPLED_SYSTEMS[name]
    knobs = {"device_tokens": 4096, "memory_block_tokens": 8, "block_size_tokens": 32, "nodes": 1} | knobs
    asked = [
        replace(each, request=replace(each.request, max_tokens=limit))
        for each in requests([(0.001 * i, 96, 50) for i in range(40)])
    ]
    log = Cluster(ClusterSpec.coupled(batching=policy, **knobs), MODEL).run(asked)
    assert sum(isinstance(r, Finished) for r in log) == 40
    return max(len(r.request_ids) for r in log if isinstance(r, DecodeStretch))


@pytest.mark.parametrize("name", RESERVING)
def test_the_worst_case_is_prompt_and_max_tokens(name):
    """Policies that never preempt admit what fits with the stated max_tokens, not with the whole window."""
    assert largest_batch(name, 929) == 4096 // (96 + 929 - 1)
    assert largest_batch(name, 417) == 4096 // (96 + 417 - 1)
    assert largest_batch("vllm", 929) > 25


@pytest.mark.parametrize("name", RESERVING)
def test_without_max_tokens_the_default_is_reserved(name):
    """`default_max_tokens` counts where a client states nothing, doubled until the recorded answer fits."""
    assert largest_batch(name, None, default_max_tokens=929) == 4
    assert largest_batch(name, None, default_max_tokens=417) == 8
    assert largest_batch(name, None, default_max_tokens=2) == 4096 // (96 + 64)
    assert largest_batch(name, 929, default_max_tokens=2) == 4


def test_the_default_is_the_assumption():
    """What clients are taken to allow is recorded among the assumptions."""
    assert assumption("B52").value == DEFAULT_MAX_TOKENS == CoupledPool().default_max_tokens


def test_reserving_stays_near_what_pages_do():
    """On conversations, reserving prompt and max_tokens costs little; reserving the whole window does."""

    def mean_ttft_s(name, **knobs):
        policy, _ = COUPLED_SYSTEMS[name]
        numbers = RunningSummary(SLO())
        spec = ClusterSpec.coupled(nodes=8, batching=policy, **knobs)
        trace = make_twin("conversation", requests=600)
        Cluster(spec, paper_node_latency(), log=numbers.read).run(trace.requests())
        return numbers.numbers()["ttft_mean_s"]

    paged = mean_ttft_s("vllm")
    assert mean_ttft_s("tensorrt_llm") < 1.5 * paged
    assert mean_ttft_s("tensorrt_llm", default_max_tokens=200_000) > 2 * paged


def test_a_default_refuses_nobody():
    """A default leaves room for the prompt, as servers' defaults do: who fits without it is served with it."""
    assert largest_batch("tensorrt_llm", None, default_max_tokens=10**6) == 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=20), st.integers(64, 512))
def test_device_cache_never_loses_count(rows, capacity):
    """Acquire, keep and release in any order leave nothing pinned, and never more kept than fits (I3)."""
    cache = DeviceCache(capacity, block_size_tokens=32)
    for i, (family, blocks) in enumerate(rows):
        keys = tuple(family * 100 + k for k in range(blocks))
        request = Request(id=i, arrival_s=0.0, input_tokens=blocks * 32, block_keys=keys, block_size_tokens=32)
        if blocks * 32 > capacity:
            continue
        held = cache.acquire(request, cache.matched(request))
        for computed in range(len(held), blocks + 1):
            held = cache.keep(request, held, computed)
            cache.check()
        assert cache.pinned_tokens == blocks * 32
        cache.release(held)
        cache.make_room(capacity // 2)
        cache.check()
    assert cache.pinned_tokens == 0


OVERLOAD = [
    TracedRequest(
        Request(id=i, arrival_s=0.5 * i, input_tokens=8000, block_keys=tuple(range(100 * i, 100 * i + 16))), 800
    )
    for i in range(150)
]


@pytest.mark.parametrize(
    "admission",
    [EarlyRejection(), EarlyRejection(with_coming=True), PredictiveRejection(decode_s=25.0), LengthPredicting()],
)
def test_policies_of_the_decode_load_refuse_under_overload(admission):
    """The views of coupled instances show who decodes and who is on the way, so policies that look there act."""
    limits, model = SLO(ttft_s=30.0, tbt_s=0.03), paper_node_latency()
    cluster = Cluster(ClusterSpec.coupled(nodes=2, admission=admission, slo=limits), model)
    log = cluster.run(OVERLOAD)
    assert check_log(log) == ()
    assert sum(isinstance(r, Rejected) for r in log) > 30


def test_views_show_who_decodes_and_who_is_on_the_way():
    """A request is on its way until its prompt is computed, then it decodes since then; its context is counted."""
    rows = [(0.0, 64, 40), (8.3, 96, 40), (8.4, 128, 40)]
    views = []
    cluster = Cluster(spec(VLLM(), 4096), MODEL, seen=lambda one: views.append(one.view))
    log = cluster.run(requests(rows))
    first_s = next(r.at_s for r in log if isinstance(r, FirstToken) and r.request_id == 0)
    (decode,) = views[2].decode
    assert [(served.request_id, served.starts_s) for served in decode.decoding] == [(0, first_s)]
    assert [(served.request_id, served.input_tokens) for served in decode.coming] == [(1, 96)]
    assert decode.requests == 2
    assert decode.present_tokens >= 64
    assert views[0].lengths.longer[-1][0] == 0
