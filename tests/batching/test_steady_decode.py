"""`SteadyDecodeOnly` against an `Instance` under `DecodeOnly` that plans each iteration."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import (
    CountedBlocks,
    DecodeOnly,
    DecodingRequest,
    Instance,
    Limits,
    Progress,
    SteadyDecodeOnly,
)

ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(2, 30)), min_size=1, max_size=8).map(
    sorted
)
"""Of each request the iteration before which it comes, its context, and the tokens of its answer."""


def iterations_of(rows):
    """Iterations after which all requests are done, whatever waits for what."""
    return rows[-1][0] + sum(outputs for *_, outputs in rows) + 1


def planned(rows, capacity, max_requests):
    """The batch of each iteration, and the requests that have outgrown the memory."""
    limits = Limits(
        max_batch_tokens=99, max_requests=max_requests, block_size_tokens=1, capacity_blocks=capacity,
        free_blocks=capacity,
    )  # fmt: skip
    instance = Instance(DecodeOnly(), limits, CountedBlocks(capacity), checks=True)
    batches, outgrown, tokens = [], [], {}
    for step in range(iterations_of(rows)):
        for i, (at, context, _) in enumerate(rows):
            if at == step:
                progress = {"prompt_tokens": context, "cached_tokens": context, "generated_tokens": 1}
                instance.enqueue(Progress(request_id=i, arrival=i, **progress))
                tokens[i] = 1
        plan = instance.plan()
        while plan.rejected:
            assert not plan.segments
            outgrown += [refusal.request_id for refusal in plan.rejected]
            plan = instance.plan()
        batches.append({segment.request_id for segment in plan.segments})
        for request in instance.apply(plan):
            tokens[request.request_id] += 1
            if tokens[request.request_id] == rows[request.request_id][2]:
                instance.finish(request.request_id)
    return batches, outgrown


def steady(rows, capacity, max_requests):
    """The same, many iterations at a time."""
    decodes = SteadyDecodeOnly[DecodingRequest](capacity, max_requests)
    batches, outgrown = [], []
    while len(batches) < iterations_of(rows):
        now = len(batches)
        for i, (at, context, outputs) in enumerate(rows):
            if at == now:
                counts = {"cached_tokens": context, "output_tokens": outputs, "produced_tokens": 0}
                decodes.waiting.append(DecodingRequest(request_id=i, joining_tokens=1, **counts))
        decodes.admit()
        while (alone := decodes.make_room()) is not None:
            outgrown.append(alone.request_id)
            decodes.admit()
        steps = min([at for at, *_ in rows if at > now], default=iterations_of(rows)) - now
        if decodes.running:
            steps = min(steps, decodes.steady_steps())
        batches += [set(decodes.running)] * steps
        produced = decodes.produced_tokens(steps)
        assert all(produced[done.request_id] == done.output_tokens for done in decodes.apply(steps))
    return batches, outgrown


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(20, 200), st.integers(1, 5))
def test_each_iteration_has_the_batch_that_decode_only_plans(rows, capacity, max_requests):
    """Requests join, are swapped out, outgrow the memory and finish as if each iteration were planned."""
    rows = [(at, min(context, capacity - 1), outputs) for at, context, outputs in rows]
    assert steady(rows, capacity, max_requests) == planned(rows, capacity, max_requests)


def test_an_answer_of_one_token_joins_no_batch():
    """It is complete with the token that prefill computed."""
    decodes = SteadyDecodeOnly[DecodingRequest](100)
    request = DecodingRequest(request_id=0, cached_tokens=9, output_tokens=1, produced_tokens=0, joining_tokens=1)
    decodes.waiting.append(request)
    assert decodes.admit() == [request]
    assert (decodes.running, decodes.context_tokens, request.produced_tokens) == ({}, 0, 1)


def test_all_requests_are_taken_out():
    """Those of the batch come first, then those that wait; nothing is left."""
    decodes = SteadyDecodeOnly[DecodingRequest](100, 1)
    for i in range(2):
        request = DecodingRequest(request_id=i, cached_tokens=9, output_tokens=9, produced_tokens=1)
        decodes.waiting.append(request)
    decodes.admit()
    assert [request.request_id for request in decodes.clear()] == [0, 1]
    assert (decodes.running, len(decodes.waiting)) == ({}, 0)
