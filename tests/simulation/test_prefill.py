"""The prefill instance, which computes one prompt at a time, against a general instance under `PrefillOnly`."""

import numpy as np
from drawn import REALISTIC
from families import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import CountedBlocks, Instance, Limits, PrefillOnly, Progress
from mooncake_lab.core import Prefilled
from mooncake_lab.simulation import Cluster, ClusterSpec

ROWS = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 9000)), min_size=1, max_size=20).map(sorted)


def in_general(rows):
    """Of each prompt, when an `Instance` that takes one prompt per iteration begins and ends it."""
    bounds = Limits(
        max_batch_tokens=10**5, max_requests=1, block_size_tokens=16, capacity_blocks=10**6, free_blocks=10**6
    )
    instance = Instance(PrefillOnly(), bounds, CountedBlocks(bounds.capacity_blocks))
    spans, coming, now = [], list(enumerate(rows)), 0.0
    while coming or instance.waiting:
        while coming and coming[0][1][0] <= now:
            i, (_, tokens) = coming.pop(0)
            instance.enqueue(Progress(request_id=i, arrival=i, prompt_tokens=tokens))
        plan = instance.plan()
        if plan.is_empty:
            now = coming[0][1][0]
            continue
        start = now
        now += REALISTIC.prefill.seconds(plan.new_tokens, 0)
        (request,) = instance.apply(plan)
        spans.append((request.request_id, start, now))
        instance.finish(request.request_id)
    return spans


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_prompts_are_computed_as_by_a_general_instance(rows):
    """Without shared prefixes, each prompt begins and ends when an instance under `PrefillOnly` says."""
    requests = requests_of((at_s, tokens, 2, i) for i, (at_s, tokens) in enumerate(rows))
    log = Cluster(ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1), REALISTIC).run(requests)
    found, expected = [r for r in log if isinstance(r, Prefilled)], in_general(rows)
    assert [r.request_id for r in found] == [i for i, _, _ in expected]
    np.testing.assert_allclose([(r.start_s, r.at_s) for r in found], [span for _, *span in expected], atol=1e-9)
