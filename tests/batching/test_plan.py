"""What a policy sees."""

import msgspec
import pytest

from mooncake_lab.batching import Limits, Plan, Progress, Segment

LIMITS = {
    "max_batch_tokens": 8,
    "max_requests": 2,
    "block_size_tokens": 4,
    "capacity_blocks": 10,
    "free_blocks": 10,
}


class TestProgress:
    def test_a_new_request_has_its_prompt_pending(self):
        """Nothing is cached, all of the prompt is to be computed."""
        request = Progress(request_id=1, arrival=0, prompt_tokens=7)
        assert (request.pending_tokens, request.decoding) == (7, False)

    def test_a_reused_prefix_is_not_pending(self):
        """A reused prefix is not computed."""
        request = Progress(request_id=1, arrival=0, prompt_tokens=7, cached_tokens=4)
        assert (request.pending_tokens, request.decoding) == (3, False)

    def test_a_decode_has_one_token_pending(self):
        """The token generated last is the one to compute."""
        request = Progress(request_id=1, arrival=0, prompt_tokens=7, cached_tokens=9, generated_tokens=3)
        assert (request.num_tokens, request.pending_tokens, request.decoding) == (10, 1, True)

    def test_a_preempted_request_has_all_it_knows_pending(self):
        """Recomputation takes the generated tokens as a part of the prompt."""
        request = Progress(request_id=1, arrival=0, prompt_tokens=7, generated_tokens=3)
        assert (request.pending_tokens, request.decoding) == (10, False)

    def test_the_last_prompt_token_is_no_decode(self):
        """One pending prompt token is prefill: no token was generated yet."""
        assert not Progress(request_id=1, arrival=0, prompt_tokens=7, cached_tokens=6).decoding


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

    def test_replaced_limits_are_checked(self):
        """Changed limits are checked like new ones."""
        with pytest.raises(ValueError, match="free_blocks is 99"):
            msgspec.structs.replace(Limits(**LIMITS), free_blocks=99)


class TestPlan:
    def test_counts_its_tokens_by_kind(self):
        """A plan knows its prefills, its decodes and the tokens they make together."""
        chunk = Segment(1, "prefill", 5, 0, emits=False)
        step = Segment(2, "decode", 1, 8, emits=True)
        plan = Plan(segments=(chunk, step))
        assert (plan.prefills, plan.decodes, plan.new_tokens) == ((chunk,), (step,), 6)
