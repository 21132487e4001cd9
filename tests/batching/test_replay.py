"""A policy stepped through requests: its log, its clock and the chart that it draws."""

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import (
    CHUNKED_POLICIES,
    Limits,
    Orca,
    Plan,
    PrefillOnly,
    Progress,
    Refusal,
    Segment,
    VLLMChunked,
    gantt,
    named_policy,
    trace_plans,
)
from mooncake_lab.batching.batch_builder import decode_stretch_steps, steady_while_blocks_last

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


def timed(arrives_s, outputs, prompts=(4, 4, 4)):
    """Short prompts under Orca; a token takes a second."""
    jobs = [request(i, prompts[i], max_new_tokens=8) for i in range(len(outputs))]
    arrivals, futures = dict(enumerate(arrives_s)), dict(enumerate(outputs))
    limits = msgspec.structs.replace(LIMITS, max_batch_tokens=64, capacity_blocks=64, free_blocks=64)
    return trace_plans(
        Orca(), jobs, limits, futures, arrives_s=arrivals, seconds=lambda plan: float(plan.new_tokens)
    )


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

    def test_a_request_is_seen_by_the_first_iteration_that_starts_after_it(self):
        """It arrives during an iteration and is part of the next one, which is longer for it."""
        log = timed([0.0, 1.0], [3, 1])
        assert [(step.start_s, step.end_s) for step in log] == [(0, 4), (4, 9), (9, 10)]
        assert [len(step.plan.segments) for step in log] == [1, 2, 1]

    def test_the_clock_waits_where_no_request_is_there(self):
        """After a pause the next iteration starts with the arrival; one that only refuses takes no time."""
        log = timed([0.5, 20.0, 30.0], [1, 2, 1], prompts=(4, 4, 400))
        assert [(step.start_s, step.end_s) for step in log] == [(0.5, 4.5), (20, 24), (24, 25), (30, 30)]

    def test_what_comes_later_changes_nothing_before(self):
        """The iterations that start before an arrival are the same without it."""
        with_it, without = timed([0.0, 2.0, 6.0], [5, 4, 3]), timed([0.0, 2.0], [5, 4])
        before = [step for step in with_it if step.start_s < 6.0]
        assert len(before) == 2
        assert before == without[: len(before)]

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


class TestDecodeStretch:
    @given(
        requests=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 1)), max_size=8),
        piece=st.none() | st.tuples(st.integers(1, 80), st.integers(1, 9), st.integers(0, 40), st.booleans()),
        block=st.integers(1, 16),
        free=st.integers(0, 60),
    )
    @settings(max_examples=300, deadline=None)
    def test_is_the_last_step_with_enough_blocks(self, requests, piece, block, free):
        """By brute force: so many steps need no more blocks than are free, and one more does.

        Where a prompt is computed in pieces beside the decodes, or alone, they end a block before its end.
        """
        assume(requests or piece)
        limits = Limits(
            max_batch_tokens=8, max_requests=8, block_size_tokens=block, capacity_blocks=1000, free_blocks=free
        )
        decoding = [
            request(i, cached, cached_tokens=cached, generated_tokens=1, held_blocks=-(-(cached + ahead) // block))
            for i, (cached, ahead) in enumerate(requests)
        ]
        segments = [Segment(r.request_id, "decode", 1, r.cached_tokens, emits=True) for r in decoding]
        running, reserved = decoding, 0
        if piece is not None:
            left, new, cached, has_all = piece
            new = min(new, left)
            whole, held = (-(-(cached + tokens) // block) for tokens in (left, left if has_all else new))
            segments = [*segments, Segment(99, "prefill", new, cached, emits=new == left)]
            running = [*decoding, request(99, cached + left, cached_tokens=cached, held_blocks=held)]
            reserved = whole - held

        def repeats(steps):
            needed = sum(max(-(-(r.cached_tokens + steps) // block) - r.held_blocks, 0) for r in decoding)
            in_time = piece is None or steps * new <= left - block
            return in_time and needed <= max(free - reserved, 0)

        steps = steady_while_blocks_last(Idle(), Plan(segments=tuple(segments)), running, limits)
        if piece is not None and new == left:
            assert steps == 1
        else:
            assert repeats(steps)
            assert not repeats(steps + 1)

    def test_needs_decodes(self):
        """A stretch without requests is refused."""
        with pytest.raises(ValueError, match="at least one request"):
            decode_stretch_steps([], LIMITS)


ROOMY = Limits(max_batch_tokens=64, max_requests=4, block_size_tokens=4, capacity_blocks=64, free_blocks=64)
CHUNK_TOKENS = 12
PROMPT_TOKENS = {"A": 8, "B": 8, "C": 24, "D": 16}
OUTPUT_TOKENS = {"A": 6, "B": 8, "C": 3, "D": 3}
ARRIVE_LATE = {2: 3, 3: 3}

TIMELINES = {
    "request_level": ("Pddddd     ", "Pddddddd   ", "   wwwwwPdd", "   wwwwwPdd"),
    "orca": ("Pddddd  ", "Pddddddd", "   Pdd  ", "   Pdd  "),
    "vllm": ("Pdd.ddd  ", "Pdd.ddddd", "   Pdd   ", "   Pdd   "),
    "vllm_chunked": ("Pddddd   ", "pPddddddd", "   ppPdd ", "   wwpPdd"),
    "vllm_today": ("Pddddd   ", "pPddddddd", "   ppPdd ", "   wwpPdd"),
    "splitfuse": ("Pddddd   ", "pPddddddd", "   ppPdd ", "   wwpPdd"),
    "tensorrt_llm": ("Pddddd  ", "Pddddddd", "   Pdd  ", "   Pdd  "),
    "sarathi": ("Pddddd    ", "wPddddddd ", "   ppPdd  ", "   wwwpPdd"),
    "sarathi_serve": ("Pddddd   ", "pPddddddd", "   ppPdd ", "   wwpPdd"),
}


def four(**changes):
    return [
        Progress(request_id=i, arrival=i, prompt_tokens=tokens, max_new_tokens=10, **changes)
        for i, tokens in enumerate(PROMPT_TOKENS.values())
    ]


def run_four(policy, outputs=None):
    futures = dict(enumerate(outputs or OUTPUT_TOKENS.values()))
    return trace_plans(policy, four(), ROOMY, futures, arrives_s=ARRIVE_LATE)


class TestTimelines:
    @pytest.mark.parametrize("name", TIMELINES)
    def test_each_policy_has_its_own(self, name):
        """What each does with C and D, and to A and B, while prompts are computed."""
        policy = named_policy(name, chunk_tokens=CHUNK_TOKENS if name in CHUNKED_POLICIES else None)
        assert tuple(gantt(run_four(policy)).values()) == TIMELINES[name]

    def test_prefill_only_has_no_decode(self):
        """A prefill instance ends each request with its first token, and waits for the next ones."""
        log = run_four(PrefillOnly(chunk_tokens=CHUNK_TOKENS), outputs=(1, 1, 1, 1))
        assert tuple(gantt(log).values()) == ("P     ", "pP    ", "  pP  ", "  wwpP")

    def test_decode_only_joins_at_once(self):
        """A decode instance takes each request that arrives with its KVCache into the next iteration."""
        arrived = [
            Progress(
                request_id=i,
                arrival=i,
                prompt_tokens=tokens,
                cached_tokens=tokens,
                generated_tokens=1,
                max_new_tokens=10,
            )
            for i, tokens in enumerate(PROMPT_TOKENS.values())
        ]
        outputs = dict(enumerate(OUTPUT_TOKENS.values()))
        log = trace_plans(named_policy("decode_only"), arrived, ROOMY, outputs, arrives_s=ARRIVE_LATE)
        assert tuple(gantt(log).values()) == ("ddddd  ", "ddddddd", "   dd  ", "   dd  ")
