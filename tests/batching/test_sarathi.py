"""SARATHI by its arithmetic: coverage, its relatives, what chunks cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import (
    Limits,
    Orca,
    Progress,
    Sarathi,
    SarathiServe,
    trace_plans,
)

ROOM = 10**6


def requests(count, prompt_tokens):
    return [
        Progress(request_id=i, arrival=i, prompt_tokens=prompt_tokens, max_new_tokens=100) for i in range(count)
    ]


def limits(slots, tokens=ROOM):
    return Limits(
        max_batch_tokens=tokens, max_requests=slots, block_size_tokens=16, capacity_blocks=ROOM, free_blocks=ROOM
    )


def one_round(slots, pieces, decodes):
    """Plans of one steady round: from the first piece of one batch of requests to that of the next."""
    chunk = 4
    policy = Sarathi(chunk_tokens=chunk + slots - 1, chunk="fixed")
    jobs = requests(6 * slots, chunk * pieces)
    log = trace_plans(policy, jobs, limits(slots), dict.fromkeys(range(6 * slots), decodes + 1))
    starts = {s.request_id: step.index for step in reversed(log) for s in step.plan.prefills}
    return [step.plan for step in log[starts[3 * slots] : starts[4 * slots]]]


class TestCoverage:
    """Slots B, prompts of k fixed pieces, D decodes (one less than the output), in integers (SARATHI §4)."""

    @pytest.mark.parametrize("slots", [2, 3, 5])
    @pytest.mark.parametrize("pieces", [1, 2, 4])
    def test_balanced(self, slots, pieces):
        """D = (B - 1) k: every iteration holds a piece and B - 1 decodes."""
        plans = one_round(slots, pieces, (slots - 1) * pieces)
        assert len(plans) == slots * pieces
        assert all(len(plan.prefills) == 1 and len(plan.decodes) == slots - 1 for plan in plans)

    @pytest.mark.parametrize("slots", [2, 3, 5])
    @pytest.mark.parametrize("pieces", [1, 2, 4])
    @pytest.mark.parametrize("extra", [1, 2, 7])
    def test_more_decodes(self, slots, pieces, extra):
        """D above (B - 1) k: the excess is the number of iterations of nothing but decodes in a round."""
        plans = one_round(slots, pieces, (slots - 1) * pieces + extra)
        assert sum(not plan.prefills for plan in plans) == extra
        assert len(plans) == slots * pieces + extra

    def test_a_chunk_that_decodes_fill(self):
        """A fixed chunk that a full batch leaves nothing of is refused, where it would never prefill."""
        with pytest.raises(ValueError, match=r"a fixed chunk of 3 tokens leaves none .* 3 decodes"):
            Sarathi(chunk_tokens=3, chunk="fixed").plan(requests(1, 5), [], limits(4))


futures = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=8)


def plans_of(policy, jobs, slots):
    entries = {i: sum(gap for _, _, gap in jobs[: i + 1]) for i in range(len(jobs))}
    asked = [
        Progress(request_id=i, arrival=i, prompt_tokens=prompt, max_new_tokens=20)
        for i, (prompt, _, _) in enumerate(jobs)
    ]
    log = trace_plans(
        policy, asked, limits(slots), {i: out for i, (_, out, _) in enumerate(jobs)}, arrives_s=entries
    )
    return [sorted(step.plan.segments, key=lambda s: s.request_id) for step in log]


class TestRelatives:
    @given(jobs=futures, slots=st.integers(1, 5))
    @settings(max_examples=60, deadline=None)
    def test_without_a_chunk_it_is_orca_best(self, jobs, slots):
        """SARATHI with an unlimited chunk is Orca with one whole prompt per iteration, plan by plan."""
        assert plans_of(Sarathi(), jobs, slots) == plans_of(Orca(max_prefills=1), jobs, slots)

    @given(jobs=futures, slots=st.integers(1, 5))
    @settings(max_examples=60, deadline=None)
    def test_stall_free_without_a_budget_is_orca(self, jobs, slots):
        """Sarathi-Serve with an unlimited budget and room for all is Orca, plan by plan."""
        assert plans_of(SarathiServe(), jobs, slots) == plans_of(Orca(), jobs, slots)
