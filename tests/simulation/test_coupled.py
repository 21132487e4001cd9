"""Coupled instances: fast-forwarded iterations against a simulator that takes every one of them."""

import itertools
import math
from bisect import insort

import msgspec
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
    VLLMToday,
)
from mooncake_lab.book.paper import assumption
from mooncake_lab.cluster import ClusterSpec, CoupledPool
from mooncake_lab.conductor import (
    KVCacheCentric,
)
from mooncake_lab.core import (
    SLO,
    FirstToken,
    Prefilled,
    Rejected,
    Request,
    TracedRequest,
    blocks_for,
)
from mooncake_lab.metrics import check_log, run_summary, token_times_s
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import DEFAULT_MAX_TOKENS, Cluster, SimulationOptions
from mooncake_lab.simulation.coupled import CachedBlocks, CoupledInstance

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
    "tensorrt_llm": TensorRTLLM(),
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
        (instance,) = cluster.executor.instances.values()
        instance.instance.check()
        assert instance.instance.blocks.free_blocks == instance.instance.limits.capacity_blocks


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


def test_a_fetching_policy_that_declares_nothing_is_refused_when_it_fetches():
    """A policy of a user that declares no need is stopped at the first request it would fetch for."""

    class Undeclared:
        def place(self, request, view, estimate):
            return KVCacheCentric(balancing_threshold=1.0).place(request, view, estimate)

    rows = [(0.0, 64, 1), (0.1, 300, 200), (30.3, 96, 1), (30.4, 96, 1), (30.5, 96, 1)]
    knobs = ClusterSpec.coupled(nodes=2, prefix_caching=True, block_size_tokens=32, placement=Undeclared())
    with pytest.raises(ValueError, match="do not share their caches"):
        Cluster(knobs, MODEL).run(requests(rows, families=[0, 1, 0, 0, 0]))


def test_the_default_is_the_assumption():
    """What clients are taken to allow is recorded among the assumptions."""
    assert assumption("B52").value == DEFAULT_MAX_TOKENS == SimulationOptions().default_max_tokens


class Stops:
    """Prefills, and then does nothing."""

    def plan(self, waiting, running, limits):
        del running
        return VLLM(watermark=0.0).plan(waiting, (), limits)


def test_a_policy_that_plans_nothing_for_running_requests_is_an_error():
    """An instance that could never go on says so."""
    with pytest.raises(ValueError, match="plans nothing for 1 requests that run"):
        Cluster(spec(Stops(), 4096), MODEL).run(requests([(0.0, 96, 50)]))


def test_a_prefix_that_leaves_during_a_plan_is_found_no_more():
    """A waiting request was shown with a prefix that a running one evicts: then it finds nothing."""
    lengths = {0: (0, 65), 1: (1, 160), 2: (0, 65)}  # family and tokens
    known = {
        i: Request(
            id=i, arrival_s=0.0, input_tokens=tokens, block_size_tokens=32,
            block_keys=tuple(100 * family + k for k in range(blocks_for(tokens, 32))),
        )
        for i, (family, tokens) in lengths.items()
    }  # fmt: skip
    first, runs, waits = (Progress(request_id=i, arrival=i, prompt_tokens=lengths[i][1]) for i in range(3))
    blocks = CachedBlocks(CoupledPool(device_tokens=160, prefix_caching=True), 32, known.__getitem__)
    assert blocks.allocate(first, 65)
    blocks.free(first)
    assert blocks.allocate(runs, 64)
    (shown,), _ = blocks.match([waits], [msgspec.structs.replace(runs, cached_tokens=64, held_blocks=4)])
    assert shown.cached_tokens == blocks.found_tokens(shown) == 64
    assert blocks.allocate(runs, 160)
    assert blocks.found_tokens(shown) == 0
    assert not blocks.fits(shown)
    blocks.free(runs)
    assert blocks.fits(shown)
    assert blocks.allocate(msgspec.structs.replace(shown, cached_tokens=0), 65)
    blocks.check([msgspec.structs.replace(shown, cached_tokens=65, held_blocks=5)])


class Shared:
    """A cache in GPU memory, driven as an `Instance` drives it, beside a recount of what is kept and used."""

    def __init__(self, capacity):
        self.requests, self.capacity = {}, capacity
        self.blocks = CachedBlocks(
            CoupledPool(device_tokens=capacity, prefix_caching=True), 32, self.requests.__getitem__
        )
        self.running, self.keys, self.kept = {}, {}, set()

    def users(self, key):
        return sum(key in keys for keys in self.keys.values())

    def come(self, family, tokens, new):
        """A request is admitted with its first tokens, if there is room for them."""
        i = len(self.requests)
        keys = tuple(family * 100 + k for k in range(blocks_for(tokens, 32)))
        self.requests[i] = Request(id=i, arrival_s=0.0, input_tokens=tokens, block_keys=keys, block_size_tokens=32)
        waits = Progress(request_id=i, arrival=i, prompt_tokens=tokens)
        ((found,), running) = self.blocks.match([waits], list(self.running.values()))
        whole = keys[: (tokens - 1) // 32]  # one token is left to compute
        prefix = list(itertools.takewhile(self.kept.__contains__, whole))
        assert found.cached_tokens == 32 * len(prefix)
        assert found.held_blocks == 2 * sum(self.users(key) > 0 for key in prefix)
        assert [one.shared_blocks for one in running] == [
            2 * sum(self.users(key) > 1 for key in self.keys[one.request_id]) for one in running
        ]
        self.advance(found, min(new, tokens - found.cached_tokens))

    def advance(self, progress, new):
        """An iteration computes new tokens of a request, if there is room for them."""
        i, cached = progress.request_id, progress.cached_tokens + new
        held = max(-(-cached // 16), progress.held_blocks)
        if held - progress.held_blocks > self.blocks.free_blocks:
            return
        generated = max(0, cached - progress.prompt_tokens + 1)
        now = msgspec.structs.replace(
            progress, cached_tokens=cached, generated_tokens=generated, held_blocks=held, shared_blocks=0
        )
        self.blocks.acquire([now])
        self.blocks.publish([now])
        self.running[i] = now
        added, removed = self.blocks.take_changes()
        assert self.kept.isdisjoint(added)
        assert self.kept.issuperset(removed)
        self.kept = self.kept.union(added).difference(removed)
        self.keys[i] = self.requests[i].block_keys[: min(cached, progress.prompt_tokens) // 32]
        own = sum(each.held_blocks for each in self.running.values())
        private = own - 2 * sum(len(keys) for keys in self.keys.values())
        assert self.kept.issuperset(key for keys in self.keys.values() for key in keys)
        assert 32 * len(self.kept) + 16 * private <= self.capacity
        if removed:  # no more than was in the way
            assert 32 * (len(self.kept) + 1) + 16 * private > self.capacity

    def leave(self, progress):
        self.blocks.release(progress)
        del self.running[progress.request_id], self.keys[progress.request_id]

    def check(self):
        self.blocks.check(list(self.running.values()))
        used = 2 * len({key for keys in self.keys.values() for key in keys})
        own = sum(each.held_blocks - 2 * len(self.keys[i]) for i, each in self.running.items())
        assert self.blocks.free_blocks == self.capacity // 16 - used - own


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ccaaal"), st.integers(0, 1), st.integers(1, 200), st.integers(1, 64)),
        min_size=1,
        max_size=40,
    ),
    st.integers(4, 32).map(lambda n: 16 * n),
)
def test_the_cache_never_loses_count(turns, capacity):
    """Whatever comes, computes and leaves: kept, shared and free blocks are those of a recount (I3)."""
    cache = Shared(capacity)
    for what, family, tokens, new in turns:
        some = list(cache.running.values())[tokens % len(cache.running)] if cache.running else None
        if what == "c":
            cache.come(family, tokens, new)
        elif some is not None and what == "a":
            cache.advance(some, min(new, max(some.pending_tokens, 1)))
        elif some is not None:
            cache.leave(some)
        cache.check()
    for progress in list(cache.running.values()):
        cache.leave(progress)
        cache.check()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(300, 420), min_size=1, max_size=6), st.integers(1, 80))
def test_the_stage_of_a_refusal_says_what_was_too_small(prompts, outputs):
    """The memory, for a request that has more tokens than fit into it; else the batching policy."""
    rows = [(10.0 * i, tokens, outputs) for i, tokens in enumerate(prompts)]
    log = Cluster(spec(VLLM(), 352, max_request_tokens=10**6), MODEL).run(requests(rows))
    received = {i: len(times) for i, times in token_times_s(log)}
    for record in log:
        if isinstance(record, Rejected):
            known = prompts[record.request_id] + received.get(record.request_id, 0)
            assert record.stage == ("capacity" if known > 352 else "batching")


def test_views_show_who_decodes_and_who_is_on_the_way():
    """A request is on its way until its prompt is computed, then it decodes since then; its context is counted."""
    rows = [(0.0, 64, 40), (8.3, 96, 40), (8.4, 128, 40)]
    cluster = Cluster(spec(VLLM(), 4096), MODEL, SimulationOptions(keep_decisions=True))
    log = cluster.run(requests(rows))
    views = [one.view for one in cluster.decisions]
    first_s = next(r.at_s for r in log if isinstance(r, FirstToken) and r.request_id == 0)
    (decode,) = views[2].decode
    assert [(served.request_id, served.starts_s) for served in decode.decoding] == [(0, first_s)]
    assert [(served.request_id, served.input_tokens) for served in decode.coming] == [(1, 96)]
    assert decode.requests == 2
    assert decode.present_tokens >= 64


@pytest.mark.parametrize("seed", range(3))
def test_a_prefix_that_is_evicted_while_an_iteration_is_planned_is_computed_again(seed):
    """Under vLLM V1 running requests may take the blocks that a waiting one was shown; still all are served."""
    rng = np.random.default_rng(seed)
    asked = []
    for number in range(60):
        prefix, tail = int(rng.integers(8)), int(rng.integers(2, 7))
        keys = (*(100 * prefix + block for block in range(64)), *(10_000 + 10 * number + k for k in range(tail)))
        request = Request(
            id=number, arrival_s=0.1 * number, input_tokens=16 * len(keys), block_keys=keys, block_size_tokens=16
        )
        asked.append(TracedRequest(request, int(rng.integers(16, 65))))
    spec = ClusterSpec.small_coupled(
        batching=VLLMToday(chunk_tokens=1024), device_tokens=7104, block_size_tokens=16, max_requests=32
    )
    log = Cluster(spec, MODEL).run(asked)
    assert [len(times) for _, times in sorted(token_times_s(log))] == [each.output_tokens for each in asked]
