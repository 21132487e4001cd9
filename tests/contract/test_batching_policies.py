"""What every batching policy keeps to, on small caches and large, short prompts and long."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import (
    BATCHING_POLICIES,
    VLLM,
    DecodeOnly,
    Limits,
    Orca,
    PrefillOnly,
    Progress,
    RequestLevel,
    Sarathi,
    SarathiServe,
    SplitFuse,
    TensorRTLLM,
    VLLMChunked,
    VLLMToday,
    named_policy,
    trace_plans,
)
from mooncake_lab.batching.batch_builder import decode_stretch_steps

EVERY = {
    "request_level": lambda _: RequestLevel(),
    "orca": lambda _: Orca(),
    "orca, one prompt": lambda _: Orca(max_prefills=1),
    "vllm": lambda _: VLLM(),
    "vllm, wide watermark": lambda _: VLLM(watermark=0.3),
    "vllm_chunked": lambda chunk: VLLMChunked(chunk_tokens=chunk),
    "vllm_today": lambda chunk: VLLMToday(chunk_tokens=chunk),
    "vllm_today, wide watermark": lambda chunk: VLLMToday(chunk_tokens=chunk, watermark=0.3),
    "splitfuse": lambda chunk: SplitFuse(chunk_tokens=chunk),
    "tensorrt_llm": lambda _: TensorRTLLM(),
    "sarathi": lambda chunk: Sarathi(chunk_tokens=chunk),
    "sarathi_serve": lambda chunk: SarathiServe(chunk_tokens=chunk),
    "prefill_only": lambda chunk: PrefillOnly(chunk_tokens=chunk),
    "decode_only": lambda _: DecodeOnly(),
}
NEVER_CUTS = {n for n in EVERY if n.split(",")[0] in {"request_level", "orca", "vllm", "tensorrt_llm"}}
RESERVES = {
    "request_level", "orca", "orca, one prompt", "tensorrt_llm", "sarathi", "prefill_only",
}  # fmt: skip
STALL_FREE = EVERY.keys() - {"vllm", "vllm, wide watermark", "prefill_only"}
NEVER_MIXES = {"request_level", "vllm", "vllm, wide watermark", "prefill_only", "decode_only"}


@dataclasses.dataclass(frozen=True)
class World:
    """Requests, their futures, and the limits they meet."""

    requests: list[Progress]
    output_tokens: dict[int, int]
    arrives_s: dict[int, int]
    limits: Limits
    chunk_tokens: int | None

    def run(self, name, output_tokens=None):
        return trace_plans(
            EVERY[name](self.chunk_tokens),
            self.requests,
            self.limits,
            output_tokens or self.output_tokens,
            arrives_s=self.arrives_s,
            max_iterations=20_000,
        )


@st.composite
def worlds(draw, name="orca"):
    """Up to nine requests on an instance that may be far too small for them."""
    block = draw(st.sampled_from([1, 2, 4, 16]))
    max_requests = draw(st.integers(1, 6))
    capacity = draw(st.integers(1, 40))
    window = draw(st.none() | st.integers(1, 80))
    limits = Limits(
        max_batch_tokens=max_requests + draw(st.integers(0, 60)),
        max_requests=max_requests,
        block_size_tokens=block,
        capacity_blocks=capacity,
        free_blocks=capacity,
        max_request_tokens=window,
    )
    requests, outputs, enters, now = [], {}, {}, 0
    for arrival in range(draw(st.integers(1, 9))):
        request_id = draw(st.integers(0, 10**6).filter(lambda number: number not in outputs))
        prompt = draw(st.integers(1, 60))
        output = draw(st.integers(1, 25))
        if window is not None:
            output = max(1, min(output, window - prompt + 1))
        if name == "prefill_only":
            output = 1
        there = prompt if name == "decode_only" else draw(st.integers(0, (prompt - 1) // block)) * block
        started = int(name == "decode_only")
        now += draw(st.integers(0, 8))
        outputs[request_id] = output + started
        enters[request_id] = now
        requests.append(
            Progress(
                request_id=request_id,
                arrival=arrival,
                prompt_tokens=prompt,
                cached_tokens=there,
                generated_tokens=started,
                max_new_tokens=draw(st.sampled_from([None, output + started, output + started + 9])),
            )
        )
    return World(requests, outputs, enters, limits, draw(st.none() | st.integers(1, 40)))


def segments_of(log, request_id):
    return [segment for step in log for segment in step.plan.segments if segment.request_id == request_id]


def refused(log):
    return {refusal.request_id: refusal.reason for step in log for refusal in step.plan.rejected}


def preempted(log):
    return [request_id for step in log for request_id in (*step.plan.preempted, *step.plan.swapped)]


def served(step):
    return {segment.request_id for segment in step.plan.segments}


def may_be_refused(world, request, name):
    """The oracle: whether the limits, or the growth of the request, rule it out."""
    limits = world.limits
    capacity = limits.capacity_blocks * limits.block_size_tokens
    window = limits.max_request_tokens
    grown = request.prompt_tokens + world.output_tokens[request.request_id] - 1
    stated = grown if request.max_new_tokens is None else request.prompt_tokens + request.max_new_tokens - 1
    if window is not None:
        stated = max(grown, min(stated, window))
    if name == "prefill_only":
        stated = request.prompt_tokens
    at_once = request.prompt_tokens - request.cached_tokens
    return (
        stated > capacity
        or (window is not None and request.prompt_tokens > window)
        or (name in NEVER_CUTS and at_once > limits.max_batch_tokens)
    )


def ends_exactly_once(name, world, log):
    """Each request is finished or refused, once, and refused exactly where the limits rule it out (I1)."""
    finished = [request_id for step in log for request_id in step.finished]
    ended = finished + [refusal.request_id for step in log for refusal in step.plan.rejected]
    assert sorted(ended) == sorted(world.output_tokens)
    assert set(refused(log)) == {r.request_id for r in world.requests if may_be_refused(world, r, name)}


def conserves_tokens(_name, world, log):
    """A finished request emitted its tokens, and computed none twice unless it was preempted."""
    for request in world.requests:
        if request.request_id in refused(log):
            continue
        segments = segments_of(log, request.request_id)
        emitted = sum(segment.emits for segment in segments)
        assert emitted == world.output_tokens[request.request_id] - request.generated_tokens
        if request.request_id not in preempted(log):
            last = request.prompt_tokens + world.output_tokens[request.request_id] - 1
            edges = [request.cached_tokens, *(s.cached_tokens + s.new_tokens for s in segments)]
            assert [s.cached_tokens for s in segments] == edges[:-1]
            assert edges[-1] == last


def holds_limits(_name, world, log):
    """Tokens of an iteration, running requests and KVCache blocks stay within the limits, and none leaks."""
    limits = world.limits
    for step, after in pairwise(log):
        assert step.plan.new_tokens <= limits.max_batch_tokens
        assert len(after.running) <= limits.max_requests
        held = sum(-(-r.cached_tokens // limits.block_size_tokens) for r in after.running)
        assert held + after.limits.free_blocks == limits.capacity_blocks
    last = log[-1]
    gone = {*last.finished, *(refusal.request_id for refusal in last.plan.rejected)}
    assert {r.request_id for r in (*last.running, *last.waiting)} <= gone


def conserves_work(_name, _world, log):
    """No iteration is empty while a request is there (I4)."""
    for step in log:
        if step.waiting or step.running:
            assert step.plan.segments or step.plan.rejected


def admits_none_while_one_leaves(_name, _world, log):
    """An iteration that preempts admits no request: no preempted request is overtaken."""
    for step in log:
        if preempted([step]):
            assert served(step) <= {request.request_id for request in step.running}


def serves_in_order_of_arrival(_name, world, log):
    """Requests start in the order in which they arrived."""
    starts = {}
    for step in log:
        for segment in step.plan.segments:
            starts.setdefault(segment.request_id, step.index)
    order = [starts[r.request_id] for r in world.requests if r.request_id in starts]
    assert order == sorted(order)


def plans_again_the_same(name, world, log):
    """Asked again, a policy decides the same, and what it was given is as it was (I6, I7)."""
    policy = EVERY[name](world.chunk_tokens)
    for step in log:
        waiting, running = list(step.waiting), list(step.running)
        assert policy.plan(waiting, running, step.limits) == step.plan
        assert (tuple(waiting), tuple(running)) == (step.waiting, step.running)


def does_not_see_the_future(name, world, log):
    """Two futures that agree so far get the same plans so far (I6)."""
    started = {request.request_id: request.generated_tokens for request in world.requests}
    shorter = {i: max(started[i] + 1, tokens - 3) for i, tokens in world.output_tokens.items()}
    for step, twin in zip(log, world.run(name, shorter), strict=False):
        assert step.plan == twin.plan
        if step.finished or twin.finished:
            break


def repeats_decodes(_name, _world, log):
    """A plan of nothing but decodes stays the plan for as many steps as `decode_stretch_steps` says."""
    for start, step in enumerate(log):
        ids = [segment.request_id for segment in step.plan.segments]
        all_decode = len(step.plan.decodes) == len(ids) == len(step.running) > 0
        if not all_decode or step.plan.rejected:
            continue
        for later in log[start : start + decode_stretch_steps(step.running, step.limits)]:
            same = [r.request_id for r in later.running] == [r.request_id for r in step.running]
            if not same or len(later.waiting) > len(step.waiting):
                break
            assert [segment.request_id for segment in later.plan.segments] == ids
            assert not preempted([later])


def never_preempts(_name, _world, log):
    """A policy that reserves the worst case on admission preempts no request."""
    assert not preempted(log)


def stalls_no_decode(_name, _world, log):
    """A running decode is in every plan until it is done, refused or preempted."""
    for step in log:
        decoding = {request.request_id for request in step.running if request.decoding}
        assert decoding <= served(step) | set(preempted([step])) | set(refused([step]))


def never_mixes(_name, _world, log):
    """No plan holds both prefill and decode."""
    for step in log:
        assert not (step.plan.prefills and step.plan.decodes)


def computes_whole_prompts(_name, _world, log):
    """Each prefill is all of its prompt that was not reused."""
    for step in log:
        assert all(segment.emits for segment in step.plan.prefills)


def takes_one_prompt(_name, world, log):
    """At most one prompt an iteration, and chunk and decodes together make at most the chunk size."""
    for step in log:
        assert len(step.plan.prefills) <= 1
        if world.chunk_tokens is not None:
            assert step.plan.new_tokens <= max(world.chunk_tokens, len(step.plan.decodes))


def admits_only_when_empty(_name, _world, log):
    """No request enters while a batch runs."""
    for step in log:
        inside = {request.request_id for request in step.running}
        if inside - set(refused([step])):
            assert served(step) <= inside


def keeps_its_budget(_name, world, log):
    """Tokens of an iteration are at most the budget, or as many as there are decodes."""
    budget = world.chunk_tokens or world.limits.max_batch_tokens
    for step in log:
        assert step.plan.new_tokens <= max(budget, len(step.plan.decodes))


LAWS = {
    ends_exactly_once: set(EVERY),
    conserves_tokens: set(EVERY),
    holds_limits: set(EVERY),
    conserves_work: set(EVERY),
    admits_none_while_one_leaves: set(EVERY),
    serves_in_order_of_arrival: set(EVERY),
    plans_again_the_same: set(EVERY),
    does_not_see_the_future: set(EVERY),
    repeats_decodes: set(EVERY),
    never_preempts: RESERVES,
    stalls_no_decode: STALL_FREE,
    never_mixes: NEVER_MIXES,
    computes_whole_prompts: NEVER_CUTS & RESERVES,
    takes_one_prompt: {"sarathi"},
    admits_only_when_empty: {"request_level"},
    keeps_its_budget: {"sarathi_serve"},
}
"""The laws, and the policies that promise them."""


@pytest.mark.parametrize("name", EVERY)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_run_keeps_the_laws_of_its_policy(name, data):
    """Small caches or large, early arrivals or late: each run keeps every law that its policy promises."""
    world = data.draw(worlds(name))
    log = world.run(name)
    for law, policies in LAWS.items():
        if name in policies:
            law(name, world, log)


class TestNames:
    def test_no_field_names_an_output_length(self):
        """Nothing a policy gets, or is made of, speaks of the output (I6)."""
        names = [*Progress.__struct_fields__, *Limits.__struct_fields__]
        for name in BATCHING_POLICIES:
            names += [field.name for field in dataclasses.fields(named_policy(name))]
        assert not [name for name in names if "output" in name]
