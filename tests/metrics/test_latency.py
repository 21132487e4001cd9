"""Latencies from run logs."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.core import Arrived, DecodeStretch, Finished, FirstToken, Placed, Prefilled, Rejected
from mooncake_lab.metrics import (
    request_table,
    step_ends_s,
    tbt_longest_gaps_s,
    tbt_mean_gap_s,
    token_times_s,
    ttft_s,
)

GAPS = st.lists(st.floats(0.001, 100.0), min_size=1, max_size=60)

LOG = (
    Arrived(at_s=0.0, request_id=0, input_tokens=10),
    Placed(at_s=0.0, request_id=0, prefill_instance="p0", decode_instance="d0", reused_tokens=0),
    Arrived(at_s=0.5, request_id=1, input_tokens=20),
    Arrived(at_s=0.6, request_id=2, input_tokens=30),
    Rejected(at_s=0.6, request_id=2, stage="arrival", reason="load"),
    Placed(at_s=0.6, request_id=1, prefill_instance="p0", decode_instance="d0", reused_tokens=4),
    Prefilled(at_s=1.0, request_id=0, instance="p0", start_s=0.0, computed_tokens=10, reused_tokens=0),
    FirstToken(at_s=1.0, request_id=0),
    DecodeStretch(
        at_s=1.3, instance="d0", start_s=1.0, steps=2, first_step_s=0.1, step_growth_s=0.1, request_ids=(0,)
    ),
    Prefilled(at_s=1.3, request_id=1, instance="p0", start_s=1.0, computed_tokens=16, reused_tokens=4),
    FirstToken(at_s=1.3, request_id=1),
    DecodeStretch(
        at_s=1.7, instance="d0", start_s=1.3, steps=2, first_step_s=0.2, step_growth_s=0.0, request_ids=(0, 1)
    ),
    Finished(at_s=1.7, request_id=0, output_tokens=5),
)
"""Request 0 gets five tokens, 1 still runs at the horizon with three, 2 is rejected."""


def times(gaps):
    """Token times with these gaps."""
    return np.concatenate([[0.0], np.cumsum(gaps)])


def test_a_stretch_expands_to_the_times_of_its_steps():
    """Steps of 1, 1.5 and 2 seconds after second 10 end at 11, 12.5 and 14.5."""
    stretch = DecodeStretch(
        at_s=14.5, instance="d0", start_s=10.0, steps=3, first_step_s=1.0, step_growth_s=0.5, request_ids=(0,)
    )
    assert step_ends_s(stretch) == pytest.approx([11.0, 12.5, 14.5])


@given(st.integers(1, 500), st.floats(0.001, 1.0), st.floats(0.0, 0.01))
def test_the_closed_form_equals_adding_step_after_step(steps, first, growth):
    """The closed form of a stretch equals the running sum of its step durations."""
    stretch = DecodeStretch(
        at_s=0.0,
        instance="d0",
        start_s=2.0,
        steps=steps,
        first_step_s=first,
        step_growth_s=growth,
        request_ids=(0,),
    )
    one_by_one = 2.0 + np.cumsum([first + k * growth for k in range(steps)])
    assert step_ends_s(stretch) == pytest.approx(one_by_one, rel=1e-9)


def test_every_token_of_a_request_gets_its_time():
    """First token, then one token a step of each stretch it took part in; finished requests come first."""
    found = [(request_id, list(np.round(at, 9))) for request_id, at in token_times_s(LOG)]
    assert found == [(0, [1.0, 1.1, 1.3, 1.5, 1.7]), (1, [1.3, 1.5, 1.7])]


def test_ttft_counts_from_arrival():
    """TTFT is first token minus arrival, and only requests with a token have one."""
    assert ttft_s(LOG) == pytest.approx({0: 1.0, 1: 0.8})


def test_a_first_token_without_arrival_is_an_error():
    """A first token of a request that never arrived names the request."""
    with pytest.raises(ValueError, match=r"request 7 .* never arrives"):
        ttft_s([FirstToken(at_s=1.0, request_id=7)])


def test_the_request_table_says_how_each_request_ended():
    """One row a request with both papers' TBT, worked by hand."""
    table = request_table(LOG)
    assert list(table.index) == [0, 1, 2]
    assert list(table["end"]) == ["finished", "running", "rejected"]
    assert list(table["output_tokens"]) == [5, 3, 0]
    assert table.loc[0, "tbt_fast_s"] == pytest.approx(0.2)
    assert table.loc[0, "tbt_arxiv_s"] == pytest.approx(0.7 / 4)
    assert math.isnan(table.loc[2, "ttft_s"])
    assert math.isnan(table.loc[1, "finish_s"])


def test_twenty_gaps_count_their_two_longest():
    """Of twenty gaps the longest 10 % are two: here 5 s and 3 s, mean 4 s."""
    assert tbt_longest_gaps_s(times([0.1] * 18 + [3.0, 5.0])) == pytest.approx(4.0)


def test_a_share_of_gaps_is_rounded_up_exactly():
    """Seventy gaps count seven, not eight, although 0.1 * 70 is above 7 in binary; eleven gaps count two."""
    assert tbt_longest_gaps_s(times([1.0] * 63 + [8.0] * 7)) == pytest.approx(8.0)
    assert tbt_longest_gaps_s(times([1.0] * 10 + [3.0])) == pytest.approx(2.0)


@pytest.mark.parametrize("definition", [tbt_longest_gaps_s, tbt_mean_gap_s])
def test_a_single_token_has_no_time_between_tokens(definition):
    """One token, or none, gives a TBT of zero by both definitions."""
    assert definition(np.array([3.0])) == definition(np.array([])) == 0


def test_a_share_outside_its_range_is_refused():
    """A share of 0 has no gap to average."""
    with pytest.raises(ValueError, match="share of longest gaps is 0"):
        tbt_longest_gaps_s(times([1.0]), share=0)


@given(GAPS)
def test_the_longest_gaps_are_at_least_average(gaps):
    """FAST'25's TBT lies between the mean gap (arXiv's) and the longest gap."""
    at = times(gaps)
    assert tbt_mean_gap_s(at) <= tbt_longest_gaps_s(at) * (1 + 1e-9)
    assert tbt_longest_gaps_s(at) <= max(gaps) * (1 + 1e-9)


@given(GAPS)
def test_all_gaps_average_to_the_mean_gap(gaps):
    """With a share of one the two definitions coincide."""
    assert tbt_longest_gaps_s(times(gaps), share=1.0) == pytest.approx(tbt_mean_gap_s(times(gaps)))


@given(GAPS, st.randoms(use_true_random=False))
def test_the_order_of_gaps_does_not_matter(gaps, random):
    """Both definitions are the same for any order of the same gaps."""
    shuffled = random.sample(gaps, len(gaps))
    for definition in (tbt_longest_gaps_s, tbt_mean_gap_s):
        assert definition(times(shuffled)) == pytest.approx(definition(times(gaps)))


@given(GAPS, st.floats(0.1, 10.0))
def test_tbt_scales_with_time(gaps, scale):
    """A run that is slower by a factor has a TBT larger by that factor."""
    for definition in (tbt_longest_gaps_s, tbt_mean_gap_s):
        assert definition(times(gaps) * scale) == pytest.approx(definition(times(gaps)) * scale)
