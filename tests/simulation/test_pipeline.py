"""Pipelines in virtual time: conservation, the event-by-event oracle, and bubbles told apart."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import simpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import (
    VLLM,
    Instance,
    Limits,
    Orca,
    RequestLevel,
    Sarathi,
    SarathiServe,
)
from mooncake_lab.core import Request, TracedRequest
from mooncake_lab.metrics.pipeline_bubbles import account, idle_share
from mooncake_lab.perf import (
    CppGroup,
    IterationCost,
    LinearCost,
    LinkLatency,
    PrefillLatency,
    chunk_seconds,
    cpp_finish_s,
    model_shape,
)
from mooncake_lab.simulation import (
    PipelineSpec,
    StageClock,
    run_pipeline,
    simulate_cpp,
)

COST = IterationCost(
    name="a test",
    linear=LinearCost(((4.0, 0.040), (128.0, 0.050), (256.0, 0.070), (1024.0, 0.22))),
    per_pair_s=2e-8,
    per_context_token_s=1.4e-6,
)
CLOCK = StageClock(cost=COST, stages=4, link=LinkLatency(1e9, 1e-5), hop_bytes_per_token=8192)
LIMITS = Limits(
    max_batch_tokens=4096, max_requests=3, block_size_tokens=16, capacity_blocks=600, free_blocks=600,
    max_request_tokens=2000,
)  # fmt: skip
SPEC = PipelineSpec(clock=CLOCK, policy=Orca(max_prefills=1), limits=LIMITS, micro_batches=4)

lengths = st.lists(st.tuples(st.integers(1, 900), st.integers(1, 12), st.floats(0, 3)), min_size=1, max_size=25)
policies = st.sampled_from(
    [Orca(max_prefills=1), Orca(), Sarathi(chunk_tokens=64), SarathiServe(chunk_tokens=96), VLLM()]
)


def requests_of(rows: Sequence[tuple[int, int, float]]) -> list[TracedRequest]:
    return [
        TracedRequest(
            Request(id=i, arrival_s=at, input_tokens=prompt, block_keys=(i,), block_size_tokens=prompt), output
        )
        for i, (prompt, output, at) in enumerate(rows)
    ]


@settings(max_examples=25)
@given(lengths, policies, st.integers(1, 5), st.integers(1, 6))
def test_every_second_of_every_stage_is_accounted_for(rows, policy, stages, batches):
    """Busy and the six causes of idleness add up to stages x makespan, and none is negative."""
    spec = replace(SPEC, clock=replace(CLOCK, stages=stages), policy=policy, micro_batches=batches)
    run = run_pipeline(spec, requests_of(rows))
    spent = account(run)
    assert sum(spent.values()) == pytest.approx(stages * run.makespan_s)
    assert min(spent.values()) >= -1e-9
    assert 0 <= idle_share(run) < 1


@settings(max_examples=25)
@given(lengths, policies, st.integers(1, 6))
def test_all_work_is_done_once(rows, policy, batches):
    """Every request gets its tokens in order, after it came; the iterations carry each prompt token once."""
    run = run_pipeline(replace(SPEC, policy=policy, micro_batches=batches), requests_of(rows))
    assert not run.rejected
    for request, (_, output, arrival) in zip(run.requests, rows, strict=True):
        assert len(request.token_s) == output
        assert request.scheduled_s is not None
        assert arrival <= request.scheduled_s < request.token_s[0]
        assert request.token_s == sorted(request.token_s)
    assert sum(run.prompt_tokens) == sum(prompt for prompt, _, _ in rows)
    assert sum(run.decodes) == sum(output - 1 for _, output, _ in rows)


def replayed_by_events(run, clock: StageClock, hops: Sequence[float]) -> np.ndarray:
    """The same iterations, every stage a resource of its own: when each ends on each stage.

    Links keep the order of what they carry, so who was sent later queues later, however small it is.
    """
    env = simpy.Environment()
    stages = [simpy.Resource(env) for _ in range(clock.stages)]
    starts, ends = np.asarray(run.start_s), np.zeros(np.shape(run.end_s))
    seconds = np.asarray(run.end_s) - starts
    queued = [[env.event() for _ in stages] for _ in seconds]

    def passing(index: int):
        yield env.timeout(starts[index, 0])
        for stage, resource in enumerate(stages):
            if index:
                yield queued[index - 1][stage]
            with resource.request() as turn:
                queued[index][stage].succeed()
                yield turn
                yield env.timeout(seconds[index, stage])
            ends[index, stage] = env.now
            yield env.timeout(hops[index])

    for index in range(len(seconds)):
        env.process(passing(index))
    env.run()
    return ends


@settings(max_examples=25)
@example(rows=[(1, 1, 0.0), (1, 1, 0.0), (1, 9, 0.0), (607, 1, 0.0), (615, 1, 0.0)], policy=Orca())
@given(lengths, policies)
def test_the_recurrence_is_what_events_say(rows, policy):
    """Played again with every stage as a queue of its own, every iteration ends at the same moment."""
    run = run_pipeline(replace(SPEC, policy=policy), requests_of(rows))
    tokens = [sum(both) for both in zip(run.prompt_tokens, run.decodes, strict=True)]
    hops = [CLOCK.link.seconds(CLOCK.hop_bytes_per_token * count) for count in tokens]
    np.testing.assert_allclose(replayed_by_events(run, CLOCK, hops), run.end_s, rtol=1e-9)


def replace_places(places: int) -> Limits:
    return Limits(
        max_batch_tokens=4096, max_requests=places, block_size_tokens=16, capacity_blocks=600, free_blocks=600,
        max_request_tokens=2000,
    )  # fmt: skip


def test_shortage_preempts_and_nothing_is_lost():
    """With too few blocks for all to grow, some are pushed out and computed again, and all get their tokens."""
    limits = Limits(max_batch_tokens=512, max_requests=4, block_size_tokens=16, capacity_blocks=9, free_blocks=9)
    spec = replace(SPEC, policy=VLLM(), limits=limits, micro_batches=1)
    run = run_pipeline(spec, requests_of([(30, 60, 0.0)] * 4))
    assert all(len(request.token_s) == 60 for request in run.requests)
    assert sum(run.prompt_tokens) > 120


def test_refused_requests_take_no_places():
    """A policy sees the whole queue: behind two refused prompts, a micro-batch fills all of its places."""
    spec = replace(SPEC, policy=RequestLevel(), limits=replace_places(2), micro_batches=1)
    run = run_pipeline(spec, requests_of([(5000, 1, 0.0), (5000, 1, 0.0), (100, 2, 0.0), (100, 2, 0.0)]))
    assert run.rejected == [0, 1]
    assert run.prompt_tokens == [200, 0]


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=10),
    st.integers(1, 6),
    st.integers(0, 30_000),
    st.floats(1e6, 1e12),
)
def test_chunked_pipelines_end_when_the_recurrence_says(sizes, nodes, reused, bandwidth):
    """Simulated event by event, with links as queues, every chunk leaves every node as `cpp_finish_s` says."""
    group = CppGroup(
        prefill=PrefillLatency(
            constant_s=0.07, per_token_s=1.1e-4, per_token_squared_s=7.4e-10, load_s_per_token=2.6e-6
        ),
        shape=model_shape("llama3-70b"),
        nodes=nodes,
        chunk_tokens=4096,
        link=LinkLatency(bandwidth, 1e-4),
        chunk_constant_s=0.003,
    )
    expected = cpp_finish_s(group, reused + sum(sizes), reused, sizes=sizes)
    np.testing.assert_allclose(simulate_cpp(group, sizes, reused), expected, rtol=1e-9)
    assert len(chunk_seconds(group, sizes, reused)) == len(sizes)


@settings(max_examples=25)
@given(lengths, policies, st.sampled_from([1, 3]))
def test_a_plan_that_stays_need_not_be_asked_for(rows, policy, stages):
    """Asked for every plan or only for those that can differ, a pipeline runs the same iterations."""
    spec = replace(SPEC, clock=replace(CLOCK, stages=stages), micro_batches=stages, policy=policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Instance, "steady_steps", lambda *_: 1)
        asked = run_pipeline(spec, requests_of(rows))
    found = run_pipeline(spec, requests_of(rows))
    np.testing.assert_allclose(found.end_s, asked.end_s, rtol=1e-12)
    for name in ("micro_batch", "prompt_tokens", "decodes", "starved"):
        assert getattr(found, name) == getattr(asked, name)
    for ours, theirs in zip(found.requests, asked.requests, strict=True):
        assert ours.token_s == pytest.approx(theirs.token_s, rel=1e-12)
        assert ours.bubble_s == pytest.approx(theirs.bubble_s, abs=1e-9)
