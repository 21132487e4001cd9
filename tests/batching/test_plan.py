"""What a policy sees, the rules of its plans, and the blocks that it reserves."""

import msgspec
import pytest

from mooncake_lab.batching import Limits, Plan, Progress, Refusal, Segment, check_plan
from mooncake_lab.batching.batch_builder import refusal, worst_case_blocks

LIMITS = {
    "max_batch_tokens": 8,
    "max_requests": 2,
    "block_size_tokens": 4,
    "capacity_blocks": 10,
    "free_blocks": 10,
}


class TestProgress:
    def test_a_decode_has_one_token_pending(self):
        """The token generated last is the one to compute."""
        request = Progress(request_id=1, arrival=0, prompt_tokens=7, cached_tokens=9, generated_tokens=3)
        assert (request.num_tokens, request.pending_tokens, request.decoding) == (10, 1, True)

    def test_a_preempted_request_has_all_it_knows_pending(self):
        """Recomputation takes the generated tokens as a part of the prompt."""
        request = Progress(request_id=1, arrival=0, prompt_tokens=7, generated_tokens=3)
        assert (request.pending_tokens, request.decoding) == (10, False)


class TestLimits:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"max_batch_tokens": 0}, "max_batch_tokens is 0; at least 1"),
            ({"max_requests": 0}, "max_requests is 0; at least 1"),
            ({"block_size_tokens": 0}, "block_size_tokens is 0; at least 1"),
            ({"capacity_blocks": 0, "free_blocks": 0}, "capacity_blocks is 0; at least 1"),
            ({"free_blocks": 11}, "free_blocks is 11; allowed are 0 to 10"),
            ({"free_blocks": -1}, "free_blocks is -1; allowed are 0 to 10"),
            ({"max_requests": 9}, "max_requests is 9, but an iteration computes at most 8 tokens"),
        ],
    )
    def test_refuses_what_cannot_be(self, changes, message):
        """A limit out of range is refused with its value and what is allowed."""
        with pytest.raises(ValueError, match=message):
            Limits(**{**LIMITS, **changes})


class TestPlan:
    def test_counts_its_tokens_by_kind(self):
        """A plan knows its prefills, its decodes and the tokens they make together."""
        chunk = Segment(1, "prefill", 5, 0, emits=False)
        step = Segment(2, "decode", 1, 8, emits=True)
        plan = Plan(segments=(chunk, step))
        assert (plan.prefills, plan.decodes, plan.new_tokens) == ((chunk,), (step,), 6)


TIGHT = Limits(max_batch_tokens=8, max_requests=2, block_size_tokens=4, capacity_blocks=6, free_blocks=3)
DECODING = Progress(
    request_id=1, arrival=0, prompt_tokens=8, cached_tokens=8, generated_tokens=1, held_blocks=2, shared_blocks=1
)
HALFWAY = Progress(request_id=2, arrival=1, prompt_tokens=6, cached_tokens=4, held_blocks=1)
NEW = Progress(request_id=3, arrival=2, prompt_tokens=20)
STEP = Segment(1, "decode", 1, 8, emits=True)
REST = Segment(2, "prefill", 2, 4, emits=True)


def check(plan):
    check_plan(plan, [NEW], [DECODING, HALFWAY], TIGHT)


class TestCheckPlan:
    def test_a_good_plan_passes(self):
        """A decode and the rest of a prompt, within all limits."""
        check(Plan(segments=(STEP, REST)))

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            (Plan(segments=(Segment(9, "decode", 1, 8, emits=True),)), "request 9, which is neither"),
            (Plan(segments=(STEP, STEP)), "decides twice about request 1"),
            (Plan(segments=(STEP, REST, REST)), "decides twice about request 2"),
            (Plan(segments=(STEP,), preempted=(1,)), "decides twice about request 1"),
            (Plan(segments=(STEP,), rejected=(Refusal(1, "no"),)), "decides twice about request 1"),
            (Plan(preempted=(3,)), "preempts request 3, which does not run"),
            (Plan(swapped=(3,)), "preempts request 3, which does not run"),
            (Plan(segments=(Segment(2, "prefill", 3, 4, emits=True),)), "computes 3 .* allowed are 1 to 2"),
            (Plan(segments=(Segment(2, "prefill", 0, 4, emits=False),)), "computes 0 tokens of request 2"),
            (Plan(segments=(Segment(2, "prefill", 2, 3, emits=True),)), "allowed is .*cached_tokens=4"),
            (Plan(segments=(Segment(2, "prefill", 1, 4, emits=True),)), "allowed is .*emits=False"),
            (Plan(segments=(Segment(1, "prefill", 1, 8, emits=True),)), "allowed is .*kind='decode'"),
            (Plan(segments=(Segment(3, "prefill", 9, 0, emits=False),)), "computes 9 tokens; allowed are 8"),
            (Plan(segments=(Segment(3, "prefill", 4, 0, emits=False),)), "leaves 3 requests running"),
        ],
    )  # fmt: skip
    def test_a_broken_rule_is_named(self, plan, message):
        """The error says which request or limit, and what is allowed."""
        with pytest.raises(ValueError, match=message):
            check(plan)

    def test_blocks_must_be_free(self):
        """New tokens need blocks; those of a preempted request count, but for the shared ones."""
        none_free = msgspec.structs.replace(TIGHT, free_blocks=0)
        with pytest.raises(ValueError, match="needs 1 more KVCache blocks; allowed are 0"):
            check_plan(Plan(segments=(STEP,)), [], [DECODING, HALFWAY], none_free)
        check_plan(Plan(segments=(STEP,), preempted=(2,)), [], [DECODING, HALFWAY], none_free)
        check_plan(Plan(segments=(REST,)), [], [msgspec.structs.replace(HALFWAY, held_blocks=2)], none_free)
        chunk = Segment(3, "prefill", 8, 0, emits=False)
        with pytest.raises(ValueError, match="needs 2 more KVCache blocks; allowed are 1"):
            check_plan(Plan(segments=(chunk,), swapped=(1,)), [NEW], [DECODING], none_free)


def limits(window=None):
    return Limits(
        max_batch_tokens=64,
        max_requests=4,
        block_size_tokens=4,
        capacity_blocks=10,
        free_blocks=10,
        max_request_tokens=window,
    )


def request(prompt_tokens=8, generated_tokens=0, max_new_tokens=None):
    return Progress(
        request_id=1,
        arrival=0,
        prompt_tokens=prompt_tokens,
        generated_tokens=generated_tokens,
        max_new_tokens=max_new_tokens,
    )


class TestWorstCaseBlocks:
    @pytest.mark.parametrize(("stated", "blocks"), [(1, 2), (2, 3), (5, 3), (6, 4), (999, 10), (None, 10)])
    def test_what_the_client_stated(self, stated, blocks):
        """The last token allowed is never written; without a statement it is the whole cache."""
        assert worst_case_blocks(request(max_new_tokens=stated), limits()) == blocks

    @pytest.mark.parametrize(("stated", "blocks"), [(5, 3), (9, 4), (None, 4)])
    def test_the_window_bounds_it(self, stated, blocks):
        """No request outgrows the model's context length."""
        assert worst_case_blocks(request(max_new_tokens=stated), limits(window=16)) == blocks


class TestRefusal:
    @pytest.mark.parametrize(
        ("asked", "window"),
        [
            (request(prompt_tokens=40), None),
            (request(prompt_tokens=8, max_new_tokens=33), None),
            (request(prompt_tokens=16), 16),
            (request(prompt_tokens=8, max_new_tokens=999), 40),
        ],
    )
    def test_what_just_fits(self, asked, window):
        """A request that fills cache or window to the last token is served."""
        assert refusal(asked, limits(window)) is None

    @pytest.mark.parametrize(
        ("asked", "window", "reason"),
        [
            (request(prompt_tokens=41), None, "it needs 41 tokens"),
            (request(prompt_tokens=8, max_new_tokens=34), None, "it needs 41 tokens"),
            (request(prompt_tokens=17), 16, "the model's context length is 16"),
            (request(prompt_tokens=8, max_new_tokens=999), 41, "it needs 41 tokens"),
            (request(prompt_tokens=36, generated_tokens=5), None, "it needs 41 tokens"),
        ],
    )
    def test_what_just_does_not(self, asked, window, reason):
        """One token more is refused, with the reason."""
        assert reason in refusal(asked, limits(window)).reason
