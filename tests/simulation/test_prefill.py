"""The simulated prefill instance against a general instance under `PrefillOnly`: prompts alone and packed."""

from collections import Counter

import numpy as np
import pytest
from drawn import REALISTIC
from families import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.batching import CountedBlocks, Instance, Limits, PrefillOnly, Progress
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import Prefilled
from mooncake_lab.metrics import check_log
from mooncake_lab.simulation import Cluster

ROWS = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 9000)), min_size=1, max_size=20).map(sorted)


def in_general(rows, pack_tokens):
    """Of each prompt, when an `Instance` under `PrefillOnly` begins and ends it."""
    bounds = Limits(
        max_batch_tokens=10**6, max_requests=64, block_size_tokens=16, capacity_blocks=10**6, free_blocks=10**6
    )
    policy = PrefillOnly(pack_tokens=pack_tokens)
    instance = Instance(policy, bounds, CountedBlocks(bounds.capacity_blocks))
    spans, coming, now = [], list(enumerate(rows)), 0.0
    while coming or instance.waiting:
        while coming and coming[0][1][0] <= now:
            i, (_, tokens) = coming.pop(0)
            instance.enqueue(Progress(request_id=i, arrival=i, prompt_tokens=tokens))
        plan = instance.plan()
        if plan.is_empty:
            now = coming[0][1][0]
            continue
        start, model = now, REALISTIC.prefill
        now += model.constant_s + sum(model.seconds(part.new_tokens) - model.constant_s for part in plan.segments)
        for request in instance.apply(plan):
            spans.append((request.request_id, start, now))
            instance.finish(request.request_id)
    return spans


def prefilled(rows, pack_tokens=1):
    """The prefills of prompts without shared prefixes on one simulated node."""
    requests = requests_of((at_s, tokens, 2, i) for i, (at_s, tokens) in enumerate(rows))
    spec = ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1, pack_tokens=pack_tokens)
    log = Cluster(spec, REALISTIC).run(requests)
    assert check_log(log) == ()
    return [record for record in log if isinstance(record, Prefilled)]


@pytest.mark.parametrize("caching", [True, False])
def test_without_prefix_caching_every_prompt_is_computed(caching):
    """The second of two equal prompts finds the first one, unless prompts are not kept."""
    spec = ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1, prefix_caching=caching)
    cluster = Cluster(spec, REALISTIC)
    log = cluster.run(requests_of([(0.0, 2048, 2, 0), (50.0, 2048, 2, 0)]))
    assert [record.reused_tokens for record in log if isinstance(record, Prefilled)] == [0, 2047 if caching else 0]
    assert len(cluster.coordinator.instances.index) == (4 if caching else 0)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from([1, 2000, 12_000]))
def test_prompts_are_computed_as_by_a_general_instance(rows, pack_tokens):
    """Without shared prefixes, each prompt begins and ends when an instance under `PrefillOnly` says."""
    found, expected = prefilled(rows, pack_tokens), in_general(rows, pack_tokens)
    assert [r.request_id for r in found] == [i for i, _, _ in expected]
    np.testing.assert_allclose([(r.start_s, r.at_s) for r in found], [span for _, *span in expected], atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 5), st.integers(1, 12))
def test_prompts_in_the_cache_take_one_token_of_an_iteration_each(pack_tokens, count):
    """Of prompts that come together, and are all there but for their last token, as many are packed as allowed."""
    rows = [(at_s, 1024, 1, i) for at_s in (0.0, 10_000.0) for i in range(count)]
    spec = ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1, pack_tokens=pack_tokens, cache_tokens=10**6)
    log = Cluster(spec, REALISTIC).run(requests_of(rows))
    starts = Counter(r.start_s for r in log if isinstance(r, Prefilled) and r.request_id >= count)
    whole, rest = divmod(count, pack_tokens)
    assert list(starts.values()) == [pack_tokens] * whole + [rest] * (rest > 0)
