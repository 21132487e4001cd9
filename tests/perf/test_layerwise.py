"""Layer-wise prefill as recurrences: bounds that hold for any times, and the chapter's example."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.perf.layerwise import layerwise_times, serialized_s

SECONDS = st.integers(0, 1000).map(float)  # whole numbers, so that sums are exact
LAYERS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=12)


@given(LAYERS)
def test_overlap_is_never_slower_and_never_beats_any_of_the_three(layers):
    """The whole takes at most the sum, and at least the largest of loading, computing and storing."""
    load, compute, store = zip(*layers, strict=True)
    total = layerwise_times(load, compute, store).total_s
    assert max(sum(load), sum(compute), sum(store)) <= total <= serialized_s(load, compute, store)


@given(LAYERS)
def test_each_layer_keeps_its_order(layers):
    """A layer is computed after it was loaded and after the layer before it, and stored after it was computed."""
    load, compute, store = zip(*layers, strict=True)
    times = layerwise_times(load, compute, store)
    for k in range(len(layers)):
        begun = times.computed_s[k] - compute[k]
        assert begun >= times.loaded_s[k]
        assert begun >= (times.computed_s[k - 1] if k else 0.0)
        assert times.stored_s[k] - store[k] >= times.computed_s[k]


@given(SECONDS, SECONDS, st.integers(1, 80))
def test_only_the_last_layer_of_a_fast_store_is_seen(compute, store, layers):
    """Equation (eq-transfer-exposed): where storing a layer takes no longer than computing one."""
    each = min(store, compute)
    times = layerwise_times([0.0] * layers, [compute] * layers, [each] * layers)
    assert times.stored_s[-1] - times.computed_s[-1] == each


def test_three_layers_by_hand():
    """The chapter's example: 12 in place of 18."""
    load, compute, store = [2.0] * 3, [3.0] * 3, [1.0] * 3
    times = layerwise_times(load, compute, store)
    assert times.computed_s == (5, 8, 11)
    assert times.stored_s == (6, 9, 12)
    assert (times.total_s, serialized_s(load, compute, store)) == (12, 18)


@pytest.mark.parametrize(
    ("load", "compute", "said"),
    [([], [], "at least 1"), ([1.0], [1.0, 1.0], "equally many"), ([-1.0], [1.0], "-1")],
)
def test_what_is_no_prefill_is_refused(load, compute, said):
    """No layers, layers that do not match, and negative times are a sentence."""
    with pytest.raises(ValueError, match=said):
        layerwise_times(load, compute, [1.0] * len(compute))
