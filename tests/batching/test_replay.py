"""The driver without a clock, and the chart it draws."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import (
    Limits,
    Plan,
    PrefillOnly,
    Progress,
    Refusal,
    RequestLevel,
    Segment,
    VLLMChunked,
    gantt,
    trace_plans,
)
from mooncake_lab.batching.steady import decode_stretch_steps

LIMITS = Limits(max_batch_tokens=16, max_requests=4, block_size_tokens=4, capacity_blocks=8, free_blocks=8)


@dataclass(frozen=True, slots=True)
class Idle:
    """A policy that never does anything."""

    def plan(self, waiting, running, limits):  # noqa: ARG002 - it looks at nothing
        return Plan()


@dataclass(frozen=True, slots=True)
class Restless:
    """A policy that admits the first and pushes it out again, for ever."""

    def plan(self, waiting, running, limits):  # noqa: ARG002 - it minds no limits
        if running:
            return Plan(preempted=(running[0].request_id,))
        first = waiting[0]
        return Plan(segments=(Segment(first.request_id, "prefill", 1, first.cached_tokens, emits=False),))


@dataclass(frozen=True, slots=True)
class Greedy:
    """A policy that knows no limits."""

    def plan(self, waiting, running, limits):  # noqa: ARG002 - it looks at the queue alone
        return Plan(
            segments=tuple(Segment(r.request_id, "prefill", r.pending_tokens, 0, emits=True) for r in waiting)
        )


@dataclass(frozen=True, slots=True)
class Picky:
    """A policy that refuses every request."""

    def plan(self, waiting, running, limits):  # noqa: ARG002 - it looks at the queue alone
        return Plan(rejected=tuple(Refusal(request.request_id, "picky") for request in waiting))


def request(request_id, prompt_tokens, **changes):
    return Progress(request_id=request_id, arrival=request_id, prompt_tokens=prompt_tokens, **changes)


class TestTracePlans:
    def test_a_policy_that_does_nothing_is_stuck(self):
        """Doing nothing while a request waits is an error, never a hang."""
        with pytest.raises(ValueError, match=r"does nothing in iteration 0 while requests \[1\] are there"):
            trace_plans(Idle(), [request(1, 4)], LIMITS, {1: 1})

    def test_a_policy_that_never_ends_is_stopped(self):
        """A policy that undoes its own work is stopped after the iterations allowed."""
        with pytest.raises(ValueError, match="is not done after 50 iterations"):
            trace_plans(Restless(), [request(1, 4)], LIMITS, {1: 1}, max_iterations=50)

    def test_a_broken_plan_is_refused(self):
        """The driver checks every plan before it acts."""
        with pytest.raises(ValueError, match="computes 17 tokens; allowed are 16"):
            trace_plans(Greedy(), [request(1, 17)], LIMITS, {1: 1})

    def test_idle_until_somebody_arrives(self):
        """Iterations before the first arrival are empty, and no request is stuck."""
        log = trace_plans(RequestLevel(), [request(1, 4)], LIMITS, {1: 2}, enters_at={1: 2})
        assert gantt(log) == {1: "  Pd"}

    def test_no_requests_no_iterations(self):
        """Nothing to do is done at once."""
        assert trace_plans(Idle(), [], LIMITS, {}) == []


class TestGantt:
    def test_letters(self):
        """A cut prompt, its end, decodes, a preemption with recomputation, waiting."""
        limits = Limits(max_batch_tokens=4, max_requests=2, block_size_tokens=4, capacity_blocks=4, free_blocks=4)
        log = trace_plans(VLLMChunked(), [request(1, 6), request(2, 5)], limits, {1: 6, 2: 6})
        assert gantt(log) == {1: "pPddddd     ", 2: "wpPdxwwpPddd"}

    def test_refused(self):
        """A refused request has one letter."""
        assert gantt(trace_plans(Picky(), [request(1, 4)], LIMITS, {1: 1})) == {1: "r"}

    def test_waiting_behind_a_long_prompt(self):
        """A prefill instance works the queue off in order."""
        prompts = [request(1, 24), request(2, 8), request(3, 8)]
        log = trace_plans(PrefillOnly(), prompts, LIMITS, {1: 1, 2: 1, 3: 1})
        assert gantt(log) == {1: "pP ", 2: "wP ", 3: "wwP"}


class TestDecodeStretch:
    @given(
        requests=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 1)), min_size=1, max_size=8),
        block=st.integers(1, 16),
        free=st.integers(0, 60),
    )
    @settings(max_examples=200, deadline=None)
    def test_is_the_last_step_with_enough_blocks(self, requests, block, free):
        """By brute force: these steps need no more blocks than are free, and one more does."""
        limits = Limits(
            max_batch_tokens=8, max_requests=8, block_size_tokens=block, capacity_blocks=1000, free_blocks=free
        )
        decoding = [
            request(i, cached, cached_tokens=cached, generated_tokens=1, held_blocks=-(-(cached + ahead) // block))
            for i, (cached, ahead) in enumerate(requests)
        ]

        def needed(steps):
            return sum(max(-(-(r.cached_tokens + steps) // block) - r.held_blocks, 0) for r in decoding)

        steps = decode_stretch_steps(decoding, limits)
        assert needed(steps) <= free < needed(steps + 1)

    def test_needs_decodes(self):
        """A stretch without requests is refused."""
        with pytest.raises(ValueError, match="at least one request"):
            decode_stretch_steps([], LIMITS)
