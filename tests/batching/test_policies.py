"""What sets each policy apart, and what it does when blocks run short."""

import pytest

from mooncake_lab.batching import (
    VLLM,
    DecodeOnly,
    Limits,
    Orca,
    PrefillOnly,
    Progress,
    SplitFuse,
    TensorRTLLM,
    gantt,
    named_policy,
    trace_plans,
)


def limits(blocks=100, **changes):
    fields = {"max_batch_tokens": 64, "max_requests": 4, "block_size_tokens": 4, "capacity_blocks": blocks}
    return Limits(**{**fields, "free_blocks": blocks, **changes})


def new(request_id, prompt_tokens, **changes):
    return Progress(request_id=request_id, arrival=request_id, prompt_tokens=prompt_tokens, **changes)


def decoding(request_id, cached_tokens, **changes):
    """A request that has generated one token, with blocks of 4 tokens."""
    held = -(-cached_tokens // 4)
    return new(
        request_id,
        cached_tokens,
        **{"cached_tokens": cached_tokens, "generated_tokens": 1, "held_blocks": held, **changes},
    )


def tokens(plan):
    return [(segment.request_id, segment.new_tokens) for segment in plan.segments]


ALL_ALONE = [
    "request_level",
    "orca",
    "vllm",
    "vllm_chunked",
    "vllm_today",
    "splitfuse",
    "tensorrt_llm",
    "sarathi",
    "sarathi_serve",
]


class TestAlone:
    @pytest.mark.parametrize("name", ALL_ALONE)
    def test_larger_than_the_cache(self, name):
        """A request that the whole cache cannot hold is refused at once with the reason; the next one runs."""
        requests = [new(1, 20, max_new_tokens=30), new(2, 20, max_new_tokens=5)]
        log = trace_plans(named_policy(name), requests, limits(blocks=8), {1: 30, 2: 5})
        assert gantt(log) == {1: "r    ", 2: "Pdddd"}
        refusal = log[0].plan.rejected[0]
        assert refusal.reason == "it needs 49 tokens of KVCache (20 of them its prompt); the whole cache holds 32"

    @pytest.mark.parametrize("name", ALL_ALONE)
    def test_outgrows_the_cache(self, name):
        """Without a stated limit a request runs until the cache is full, and is refused then."""
        log = trace_plans(named_policy(name), [new(1, 6)], limits(blocks=2), {1: 99})
        assert gantt(log) == {1: "Pddr"}
        assert "needs 9 tokens of KVCache" in log[-1].plan.rejected[0].reason

    @pytest.mark.parametrize("name", ["request_level", "orca", "vllm", "tensorrt_llm"])
    def test_longer_than_an_iteration(self, name):
        """A policy that never cuts refuses a prompt longer than an iteration; a reused prefix does not count."""
        policy = named_policy(name)
        refusal = policy.plan([new(1, 65)], [], limits()).rejected[0]
        assert "65 tokens of its prompt have to be computed at once" in refusal.reason
        assert tokens(policy.plan([new(1, 65, cached_tokens=4)], [], limits())) == [(1, 61)]

    @pytest.mark.parametrize("name", ALL_ALONE)
    def test_nothing_pending_is_an_error(self, name):
        """A running request without a pending token is a mistake of the instance, and is named."""
        with pytest.raises(ValueError, match="running request 7 has all its 8 known tokens"):
            named_policy(name).plan([], [new(7, 8, cached_tokens=8, held_blocks=2)], limits())


class TestOrca:
    def test_reserves_what_is_stated(self):
        """A shorter stated length is admitted where a longer one has to wait: slots, not tokens, decide."""
        running = [decoding(1, 8, max_new_tokens=9)]
        plan = Orca().plan([new(2, 8, max_new_tokens=8)], running, limits(blocks=8, free_blocks=6))
        assert tokens(plan) == [(1, 1), (2, 8)]


class TestVLLM:
    def test_watermark(self):
        """An admission leaves the watermark free, unless nothing runs."""
        policy = VLLM(watermark=0.5)
        running = [decoding(1, 7)]
        few = limits(blocks=8, free_blocks=6)
        assert tokens(policy.plan([new(2, 8)], running, few)) == [(2, 8)]
        assert tokens(policy.plan([new(2, 9)], running, few)) == [(1, 1)]
        assert tokens(policy.plan([new(2, 32)], [], limits(blocks=8))) == [(2, 32)]

    def test_shared_blocks_are_not_freed(self):
        """Preempting a request gives back only the blocks that it alone holds."""
        running = [decoding(1, 8), decoding(2, 12, shared_blocks=2), decoding(3, 12, shared_blocks=2)]
        plan = VLLM().plan([], running, limits(blocks=6, free_blocks=0))
        assert (plan.preempted, tokens(plan)) == ((3, 2), [(1, 1)])

    def test_blocks_shared_among_the_preempted(self):
        """Where only blocks that the preempted shared would do, the oldest gets them in the next iteration."""
        running = [decoding(1, 8), decoding(2, 8, shared_blocks=2), decoding(3, 8, shared_blocks=2)]
        plan = VLLM().plan([], running, limits(blocks=4, free_blocks=0))
        assert (plan.preempted, tokens(plan)) == ((3, 2), [])
        assert tokens(VLLM().plan([], running[:1], limits(blocks=4, free_blocks=2))) == [(1, 1)]

    def test_a_long_recomputation_is_cut(self):
        """A recomputation longer than an iteration is cut, never refused."""
        policy, few = VLLM(), limits(max_batch_tokens=10)
        plan = policy.plan([new(2, 8, generated_tokens=5)], [], few)
        assert tokens(plan) == [(2, 10)]
        rest = new(2, 8, generated_tokens=5, cached_tokens=10, held_blocks=3)
        assert tokens(policy.plan([], [decoding(1, 8), rest], few)) == [(2, 3)]

    def test_reused_prefix_that_others_hold(self):
        """Blocks of a prefix that running requests hold are not asked for again."""
        running = [decoding(1, 16, held_blocks=5)]
        tight = limits(blocks=7, free_blocks=2)
        assert tokens(VLLM(watermark=0).plan([new(2, 20, cached_tokens=16)], running, tight)) == [(1, 1)]
        sharing = new(2, 20, cached_tokens=16, held_blocks=4)
        assert tokens(VLLM(watermark=0).plan([sharing], running, tight)) == [(2, 4)]


class TestSplitFuse:
    def test_passes_of_one_size(self):
        """Every pass has exactly its tokens while prompts of as many tokens wait."""
        requests = [new(i, 5 + 7 * i % 23, max_new_tokens=9) for i in range(8)]
        log = trace_plans(SplitFuse(chunk_tokens=10), requests, limits(max_requests=8), dict.fromkeys(range(8), 4))
        for step in log:
            pending = sum(request.pending_tokens for request in (*step.waiting, *step.running))
            assert step.plan.new_tokens == min(10, pending)


class TestTensorRTLLM:
    def test_prompts_are_packed_first(self):
        """Generation has its tokens, prompts come before it in the packed batch."""
        plan = TensorRTLLM().plan([new(2, 40, max_new_tokens=4)], [decoding(1, 8, max_new_tokens=9)], limits())
        assert tokens(plan) == [(2, 40), (1, 1)]


class TestPrefillOnly:
    def test_first_token_out(self):
        """A request that has its first token is left alone until its blocks have moved."""
        plan = PrefillOnly().plan([new(2, 8)], [decoding(1, 8)], limits())
        assert tokens(plan) == [(2, 8)]

    def test_only_the_prompt_must_fit(self):
        """What will be generated elsewhere needs no room here."""
        plan = PrefillOnly().plan([new(1, 8, max_new_tokens=1000)], [], limits(blocks=2))
        assert tokens(plan) == [(1, 8)]

    @pytest.mark.parametrize(
        ("most", "planned"),
        [(None, [(1, 8), (2, 6), (3, 6)]), (14, [(1, 8), (2, 6)]), (13, [(1, 8)]), (1, [(1, 8)])],
    )
    def test_packs_up_to_its_tokens(self, most, planned):
        """A prompt joins while the iteration stays within the tokens; the first is computed however long it is."""
        waiting = [new(1, 8), new(2, 6), new(3, 6)]
        assert tokens(PrefillOnly(pack_tokens=most).plan(waiting, [], limits())) == planned

    def test_the_rest_of_a_cut_prompt_counts(self):
        """The four tokens left of a prompt that was cut take their share of the iteration."""
        rest = Progress(request_id=1, arrival=1, prompt_tokens=8, cached_tokens=4, held_blocks=1)
        plan = PrefillOnly(pack_tokens=9).plan([new(2, 6)], [rest], limits())
        assert tokens(plan) == [(1, 4)]


class TestDecodeOnly:
    def test_kvcache_on_its_way(self):
        """A request whose KVCache has not arrived is passed over, and those behind it come in."""
        late, there = new(1, 8), decoding(2, 8, held_blocks=0)
        assert tokens(DecodeOnly().plan([late, there], [], limits())) == [(2, 1)]
