"""Every rule of a plan, broken once."""

import msgspec
import pytest

from mooncake_lab.batching import Limits, Plan, Progress, Refusal, Segment, check_plan

LIMITS = Limits(max_batch_tokens=8, max_requests=2, block_size_tokens=4, capacity_blocks=6, free_blocks=3)
DECODING = Progress(
    request_id=1, arrival=0, prompt_tokens=8, cached_tokens=8, generated_tokens=1, held_blocks=2, shared_blocks=1
)
HALFWAY = Progress(request_id=2, arrival=1, prompt_tokens=6, cached_tokens=4, held_blocks=1)
NEW = Progress(request_id=3, arrival=2, prompt_tokens=20)
STEP = Segment(1, "decode", 1, 8, emits=True)
REST = Segment(2, "prefill", 2, 4, emits=True)


def check(plan):
    check_plan(plan, [NEW], [DECODING, HALFWAY], LIMITS)


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
        none_free = msgspec.structs.replace(LIMITS, free_blocks=0)
        with pytest.raises(ValueError, match="needs 1 more KVCache blocks; 0 are free"):
            check_plan(Plan(segments=(STEP,)), [], [DECODING, HALFWAY], none_free)
        check_plan(Plan(segments=(STEP,), preempted=(2,)), [], [DECODING, HALFWAY], none_free)
        check_plan(Plan(segments=(REST,)), [], [msgspec.structs.replace(HALFWAY, held_blocks=2)], none_free)
        chunk = Segment(3, "prefill", 8, 0, emits=False)
        with pytest.raises(ValueError, match="needs 2 more KVCache blocks; 1 are free"):
            check_plan(Plan(segments=(chunk,), swapped=(1,)), [NEW], [DECODING], none_free)
