"""Latencies from run logs."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.core import SLO, Arrived, DecodeStretch, Finished, FirstToken, Placed, Prefilled, Rejected
from mooncake_lab.metrics import (
    effective,
    effective_request_capacity,
    highest_passing,
    request_table,
    step_ends_s,
    tbt_longest_gaps_s,
    tbt_mean_gap_s,
    token_times_s,
    ttft_s,
)
from mooncake_lab.metrics.latency import tbt_of_gaps_s

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


@given(st.lists(st.floats(0.001, 100.0), min_size=1, max_size=100), st.integers(1, 10))
def test_a_share_of_gaps_is_rounded_up_exactly(gaps, tenths):
    """Of n gaps the longest n * tenths / 10 count, rounded up: seven of seventy, though 0.1 * 70 is above 7."""
    count = -(-len(gaps) * tenths // 10)
    longest = sorted(gaps)[-count:]
    assert tbt_of_gaps_s(gaps, share=tenths / 10) == pytest.approx(np.mean(longest))


def test_no_share_of_gaps_is_refused():
    """A share is above 0 and at most 1."""
    for share in (0, 1.1):
        with pytest.raises(ValueError, match=f"share of longest gaps is {share}"):
            tbt_longest_gaps_s(times([1.0]), share=share)


@pytest.mark.parametrize("definition", [tbt_longest_gaps_s, tbt_mean_gap_s])
def test_a_single_token_has_no_time_between_tokens(definition):
    """One token, or none, gives no TBT by either definition."""
    assert definition(np.array([3.0])) is definition(np.array([])) is None


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


LIMITS = st.floats(0.01, 50.0)


def table(rows):
    """A request table of (ttft, tbt, end)."""
    return pd.DataFrame(
        {
            "ttft_s": [row[0] for row in rows],
            "tbt_fast_s": [row[1] for row in rows],
            "tbt_arxiv_s": [row[1] / 2 for row in rows],
            "end": [row[2] for row in rows],
        }
    )


FOUR = table(
    [(1.0, 0.1, "finished"), (40.0, 0.1, "finished"), (1.0, 0.15, "finished"), (math.nan, math.nan, "rejected")]
)


def test_a_request_must_finish_within_both_limits():
    """Of four requests one meets both limits; one is late, one stutters, one was rejected; a running one waits."""
    slo = SLO(ttft_s=30.0, tbt_s=0.1)
    assert list(effective(FOUR, slo)) == [True, False, False, False]
    assert effective_request_capacity(FOUR, slo) == 0.25
    assert effective_request_capacity(FOUR, slo, tbt="arxiv") == 0.5
    assert effective_request_capacity(table([(1.0, 0.05, "running")]), SLO()) == 0
    with pytest.raises(ValueError, match="0 requests"):
        effective_request_capacity(table([]), SLO())


def test_an_answer_of_one_token_is_effective_by_its_ttft():
    """It has no gap that could be too long; without a first token a request is never effective."""
    one_token = table(
        [(1.0, math.nan, "finished"), (40.0, math.nan, "finished"), (math.nan, math.nan, "finished")]
    )
    for tbt in ("fast", "arxiv"):
        assert list(effective(one_token, SLO(ttft_s=30.0, tbt_s=0.1), tbt=tbt)) == [True, False, False]


@given(
    st.lists(
        st.tuples(LIMITS, LIMITS, st.sampled_from(["finished", "rejected", "running"])), min_size=1, max_size=30
    ),
    LIMITS,
    LIMITS,
    LIMITS,
)
def test_a_looser_limit_never_loses_a_request(rows, ttft, tbt, more):
    """Effective request capacity lies in 0 to 1 and grows with either limit."""
    tight = effective_request_capacity(table(rows), SLO(ttft_s=ttft, tbt_s=tbt))
    assert 0 <= tight <= 1
    assert tight <= effective_request_capacity(table(rows), SLO(ttft_s=ttft + more, tbt_s=tbt))
    assert tight <= effective_request_capacity(table(rows), SLO(ttft_s=ttft, tbt_s=tbt + more))


LOADS = st.floats(1e-3, 1e3)


@given(limit=LOADS, low=LOADS, factor=st.floats(1.01, 1e4), tolerance=st.floats(1e-3, 0.5))
def test_a_monotone_oracle_is_found_to_the_tolerance(limit, low, factor, tolerance):
    """Where everything up to a limit passes, the answer passes and the limit is within the tolerance above it."""
    high = low * factor
    found = highest_passing(lambda load: load <= limit, low, high, relative_tolerance=tolerance)
    if limit < low:
        assert found is None
    elif limit >= high:
        assert found == high
    else:
        assert found is not None
        assert low <= found <= limit < found * (1 + tolerance)


@given(limit=LOADS, low=LOADS, factor=st.floats(1.01, 1e4))
def test_the_search_is_logarithmic(limit, low, factor):
    """Each look halves the logarithm of what is left: two looks at the ends, the rest by that law."""
    looks: list[float] = []
    highest_passing(lambda load: looks.append(load) or load <= limit, low, low * factor, relative_tolerance=0.05)
    assert len(looks) <= 2 + max(0, math.ceil(math.log2(math.log(factor) / math.log(1.05))) + 1)
    assert len(set(looks)) == len(looks)


@given(answers=st.lists(st.booleans(), min_size=40, max_size=40))
def test_an_oracle_that_changes_its_mind_still_gets_a_load_that_passed(answers):
    """However unruly the simulation, the answer passed, and one not farther above than the tolerance did not."""
    said: dict[float, bool] = {}

    def passes(load: float) -> bool:
        return said.setdefault(load, answers[len(said)])

    found = highest_passing(passes, 1.0, 100.0, relative_tolerance=0.1)
    if found is None:
        assert said == {1.0: False}
        return
    assert said[found]
    assert found == 100.0 or any(found < load <= found * 1.1 * (1 + 1e-9) and not said[load] for load in said)


@pytest.mark.parametrize(
    ("low", "high", "tolerance", "named"),
    [(0.0, 1.0, 0.1, "0.0"), (2.0, 1.0, 0.1, "2.0"), (1.0, math.inf, 0.1, "inf"), (1.0, 2.0, 0.0, "tolerance")],
)
def test_bounds_that_are_none_are_refused(low, high, tolerance, named):
    """Bounds must be positive and rising, the tolerance positive; the error names what is wrong."""
    with pytest.raises(ValueError, match=named):
        highest_passing(lambda _: True, low, high, relative_tolerance=tolerance)
