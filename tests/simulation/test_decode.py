"""The decode instance: closed-form stretches against a simulator that takes every step."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import CountedBlocks, DecodeOnly, Instance, Limits, Progress
from mooncake_lab.cluster import Attempt, ClusterSpec, Coordinator, CoordinatorRules, DecodePool, events
from mooncake_lab.conductor import LatencyEstimator, LoadBalance
from mooncake_lab.core import Request
from mooncake_lab.metrics import token_times_s
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import EventLoop
from mooncake_lab.simulation.instances import DecodeInstance

MODEL = LatencyModel(
    name="by hand",
    shape=model_shape("llama3-70b"),
    prefill=PrefillLatency(constant_s=0.0, per_token_s=0.0, per_token_squared_s=0.0),
    decode=DecodeLatency(0.5, 0.125, 2**-10),  # powers of two: sums are exact, so boundaries are unambiguous
    hybrid=HybridLatency(floor_s=1.0, per_token_s=0.0, per_token_squared_s=0.0, per_context_token_s=0.0),
    transfer=LinkLatency(1e12),
    dram=LinkLatency(1e12),
)


def coordinator(log, capacity):
    """One that knows a prefill instance p and a decode instance d."""
    made = Coordinator(
        ClusterSpec.small(placement=LoadBalance()),
        LatencyEstimator(MODEL),
        CoordinatorRules(),
        write=log.append,
        extend=lambda request, _: request,
    )
    made.on(events.InstanceUp(at_s=0.0, instance="p", role="prefill"), 0.0)
    made.on(events.InstanceUp(at_s=0.0, instance="d", role="decode", capacity_tokens=capacity), 0.0)
    return made


def simulate(joins, capacity=10**9, max_requests=None):
    """The log, and what the coordinator believes of the instance in the end."""
    loop, log = EventLoop(), []
    conductor = coordinator(log, 10**9)

    def report(event):
        conductor.on(event, loop.now_s)

    instance = DecodeInstance(
        loop, "d", MODEL, DecodePool(device_tokens=capacity, max_requests=max_requests), report
    )

    def feed(i, context, outputs):
        attempt = Attempt(i, 1)
        request = Request(id=i, arrival_s=0.0, input_tokens=context, block_keys=(i,), block_size_tokens=10**6)
        report(events.RequestArrived(at_s=loop.now_s, request=request))
        report(
            events.PrefillDone(
                at_s=loop.now_s, attempt=attempt, instance="p", start_s=loop.now_s, computed_tokens=context,
                reused_tokens=0,
            )
        )  # fmt: skip
        report(events.KVArrived(at_s=loop.now_s, attempt=attempt, start_s=loop.now_s, bytes=1))
        report(events.KVLoaded(at_s=loop.now_s, attempt=attempt))
        instance.join(attempt, context_tokens=context, output_tokens=outputs, shown_tokens=0, shows_computed=True)

    for i, (at_s, context, outputs) in enumerate(joins):
        loop.call_later(at_s, feed, i, context, outputs)
    loop.run()
    return log, conductor.instances.by_name["d"]


def step_by_step(joins, capacity=10**9, max_requests=99):
    """Every token's time on an `Instance` under `DecodeOnly`, one step after the other: the general way."""
    bounds = Limits(
        max_batch_tokens=99,
        max_requests=max_requests,
        block_size_tokens=1,
        capacity_blocks=capacity,
        free_blocks=capacity,
    )
    instance = Instance(DecodeOnly(), bounds, CountedBlocks(capacity))
    times, coming, now = {i: [] for i in range(len(joins))}, list(enumerate(joins)), 0.0
    while coming or instance.waiting or instance.running:
        if not (instance.waiting or instance.running):
            now = max(now, coming[0][1][0])
        while coming and coming[0][1][0] <= now:
            i, (_, context, _) = coming.pop(0)
            instance.enqueue(
                Progress(request_id=i, arrival=i, prompt_tokens=context, cached_tokens=context, generated_tokens=1)
            )
        plan = instance.plan()
        for segment in plan.segments:  # prefill computed the first token; it is shown on admission
            times[segment.request_id] = times[segment.request_id] or [now]
        if plan.segments:
            now += MODEL.decode.step_s(len(plan.segments), sum(s.cached_tokens for s in plan.segments))
        for request in instance.apply(plan):
            times[request.request_id].append(now)
            if len(times[request.request_id]) == joins[request.request_id][2]:
                instance.finish(request.request_id)
        instance.check()
    return times


# no two joins lie a multiple of 2**-10 s apart, and all steps do: so no join coincides with a step boundary,
# where rounding would decide whether it still makes it
JOINS = st.lists(
    st.tuples(st.integers(0, 40).map(lambda n: n * math.sqrt(0.5)), st.integers(1, 4000), st.integers(2, 30)),
    min_size=1,
    max_size=10,
    unique_by=lambda join: join[0],
).map(sorted)


def assert_same_times(log, expected):
    found = dict(token_times_s(log))
    assert found.keys() == {i for i, times in expected.items() if times}
    for request_id, times in found.items():
        np.testing.assert_allclose(times, expected[request_id], rtol=0, atol=1e-9)


class TestExactness:
    @settings(max_examples=80, deadline=None)
    @given(JOINS)
    def test_every_token_comes_when_the_slow_simulator_says(self, joins):
        """Token times from stretches equal those of a general instance that takes every step."""
        log, _ = simulate(joins)
        assert_same_times(log, step_by_step(joins))

    @settings(max_examples=80, deadline=None)
    @given(JOINS, st.integers(100, 5000))
    def test_little_memory_swaps_and_rejects_as_in_general(self, joins, capacity):
        """Where requests wait, are swapped out or outgrow the memory, token times are equal too."""
        joins = [(at_s, min(context, capacity - 1), outputs) for at_s, context, outputs in joins]
        log, _ = simulate(joins, capacity)
        assert_same_times(log, step_by_step(joins, capacity))

    @settings(max_examples=80, deadline=None)
    @given(JOINS, st.integers(100, 5000), st.integers(1, 4))
    def test_no_more_requests_decode_at_once_than_allowed(self, joins, capacity, max_requests):
        """With a limit of requests, too, token times are those of a general instance with that limit."""
        joins = [(at_s, min(context, capacity - 1), outputs) for at_s, context, outputs in joins]
        log, _ = simulate(joins, capacity, max_requests)
        assert_same_times(log, step_by_step(joins, capacity, max_requests))

    def test_events_do_not_grow_with_output_length(self):
        """A thousand times more tokens of one request is still one stretch."""
        short, long = (simulate([(0.0, 10, n)])[0] for n in (10, 10_000))
        assert len(short) == len(long)
