"""KV-Runahead: the closed form against the wavefront, the exact search against all partitions, traffic, bounds."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncake_lab.perf import LinkLatency
from mooncake_lab.perf.runahead import (
    Runahead,
    best_bounds,
    equal_work_bounds,
    even_bounds,
    gathered_s,
    runahead_s,
    traffic_tokens,
)

COST = Runahead(
    layers=32,
    project_s_per_token=1e-7,
    rest_s_per_token=3e-7,
    pair_s=1e-10,
    kv_bytes_per_token=16384,
    link=LinkLatency(3e11, 1e-6),
)
FREE = replace(COST, link=LinkLatency(1e30))
NEXT_TO_NOTHING = replace(COST, project_s_per_token=0.0, rest_s_per_token=0.0, pair_s=5e-324)

costs = st.builds(
    lambda layers, project, rest, pair, bandwidth, latency: Runahead(
        layers=layers,
        project_s_per_token=project,
        rest_s_per_token=rest,
        pair_s=pair,
        kv_bytes_per_token=16384,
        link=LinkLatency(bandwidth, latency),
    ),
    st.integers(1, 12),
    st.floats(0, 1e-5),
    st.floats(0, 1e-5),
    st.floats(0, 1e-7),
    st.floats(1e8, 1e12),
    st.floats(0, 1e-4),
)
partitions = st.lists(st.integers(1, 300), min_size=1, max_size=6).map(
    lambda sizes: [sum(sizes[: i + 1]) for i in range(len(sizes))]
)


def wavefront_s(cost, bounds):
    """Seconds to the first token, stepped through layer by layer and process by process."""
    slices = list(zip([0, *bounds], bounds, strict=False))
    done = [0.0] * len(slices)
    link_free = [0.0] * len(slices)
    for _ in range(cost.layers):
        arrived_s = 0.0
        for process, (start, stop) in enumerate(slices):
            ready_s = max(done[process] + cost.project_s_per_token * (stop - start), arrived_s)
            link_free[process] = max(ready_s, link_free[process]) + cost.send_s(stop)
            arrived_s = link_free[process] + cost.link.latency_s
            after_s = cost.slice_s(start, stop) - cost.project_s_per_token * (stop - start)
            done[process] = ready_s + after_s
    return done[-1]


@given(costs, partitions)
def test_the_longest_path_is_the_wavefront(cost, bounds):
    """The closed form gives what stepping through all layers and processes gives."""
    assert runahead_s(cost, bounds) == pytest.approx(wavefront_s(cost, bounds), rel=1e-9, abs=1e-15)


@settings(max_examples=60)
@given(costs, st.integers(2, 13), st.integers(1, 4), st.sampled_from([1, 16, 100]))
@example(NEXT_TO_NOTHING, 2, 2, 1)
def test_the_search_is_exact(cost, grains, processes, grain):
    """No partition into whole grains is faster than the one found: all of them are tried."""
    processes, tokens = min(processes, grains), grains * grain
    found = best_bounds(cost, tokens, processes, grain_tokens=grain)
    cuts = combinations(range(grain, tokens, grain), processes - 1)
    best_s = min(runahead_s(cost, [*cut, tokens]) for cut in cuts)
    assert runahead_s(cost, found) == pytest.approx(best_s, rel=1e-12)
    assert found[-1] == tokens
    assert all(bound % grain == 0 for bound in found)


@given(st.integers(20, 50_000), st.integers(1, 8))
def test_with_a_free_network_all_finish_together(tokens, processes):
    """Equal work: slices get shorter to the back, and no two differ by more than a token's work."""
    bounds = equal_work_bounds(FREE, tokens, processes)
    sizes = [b - a for a, b in pairwise([0, *bounds])]
    work = [FREE.slice_s(a, b) for a, b in pairwise([0, *bounds])]
    assert all(later <= earlier + 1 for earlier, later in pairwise(sizes))
    assert max(work) - min(work) <= 2 * FREE.slice_s(tokens - 1, tokens)


@given(st.integers(2, 4), st.integers(6, 14))
def test_equal_work_is_where_the_search_ends(processes, grains):
    """Without a network, the exact search finds slices whose slowest is within a grain of equal work."""
    deep, tokens = replace(FREE, layers=1000), grains * 1000
    found = best_bounds(deep, tokens, processes, grain_tokens=1000)
    slowest = max(deep.slice_s(a, b) for a, b in pairwise([0, *found]))
    assert deep.work_s(tokens) / processes <= slowest * (1 + 1e-12)
    assert slowest <= deep.work_s(tokens) / processes + deep.slice_s(tokens - 1000, tokens)


@given(costs, partitions)
def test_nobody_beats_the_work(cost, bounds):
    """All layers but one take at least an equal share of the work each; one process does exactly all of it."""
    layer_s = cost.work_s(bounds[-1])
    assert runahead_s(cost, bounds) >= (cost.layers - 1) * layer_s / len(bounds) * (1 - 1e-9)
    assert runahead_s(cost, bounds[-1:]) == pytest.approx(cost.layers * layer_s, abs=1e-15)


@given(costs, partitions, st.floats(1, 100))
def test_a_faster_link_never_hurts(cost, bounds, factor):
    """Time to the first token does not rise with bandwidth."""
    faster = replace(cost, link=LinkLatency(cost.link.bytes_per_s * factor, cost.link.latency_s))
    assert runahead_s(faster, bounds) <= runahead_s(cost, bounds) * (1 + 1e-12)


@given(costs, st.integers(1, 50), st.integers(1, 6))
def test_gathering_costs_the_last_slice_and_all_other_keys(cost, each, processes):
    """Of even slices the last attends to most; a dense kernel computes the rest of its rectangle as well."""
    tokens = each * processes
    gather_s = cost.send_s(tokens - each) + cost.link.latency_s * (processes > 1)
    layer_s = cost.slice_s(tokens - each, tokens) + gather_s
    assert gathered_s(cost, tokens, processes, causal=True) == pytest.approx(cost.layers * layer_s)
    masked = each * (each - 1) / 2
    dense_s = cost.layers * (layer_s + cost.pair_s * masked)
    assert gathered_s(cost, tokens, processes) == pytest.approx(dense_s)


def test_front_loaded_slices_send_more():
    """[260, 110, 70, 60] sends 1070 tokens a layer, even slices of 500 tokens 750."""
    assert traffic_tokens([260, 370, 440, 500]) == 1070
    assert traffic_tokens(even_bounds(500, 4)) == 750


@pytest.mark.parametrize(("processes", "dense", "causal"), [(4, 6.4, 3.2), (8, 14.2, 7.1)])
def test_super_linear_only_beside_a_dense_kernel(processes, dense, causal):
    """The bound `(1/p + 1/p^2) / 2` is 2p^2/(p+1) below a dense kernel on one device, half below a causal."""
    share = (1 / processes + 1 / processes**2) / 2
    assert 1 / share == pytest.approx(dense, abs=0.05)
    assert 0.5 / share == pytest.approx(causal, abs=0.05)
    assert 0.5 / share < processes
    even = even_bounds(9600, processes)
    rectangles = sum((b - a) * b for a, b in pairwise([0, *even])) / processes
    assert rectangles / 9600**2 == pytest.approx(share)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: runahead_s(COST, [5, 5]), "every slice needs a token"),
        (lambda: runahead_s(COST, []), "every slice needs a token"),
        (lambda: even_bounds(3, 4), "3 pieces for 4 processes"),
        (lambda: best_bounds(COST, 100, 3, grain_tokens=64), "2 pieces for 3 processes"),
        (lambda: replace(COST, pair_s=-1.0), "negative cost"),
    ],
)
def test_impossible_partitions_are_refused(call, said):
    """Empty slices, more processes than pieces and negative costs are refused in a sentence."""
    with pytest.raises(ValueError, match=said):
        call()
