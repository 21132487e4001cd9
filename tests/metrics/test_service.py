"""Effective request capacity and goodput."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.core import SLO
from mooncake_lab.metrics import effective, effective_request_capacity

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
    """Of four requests one meets both limits; one is late, one stutters, one was rejected."""
    assert list(effective(FOUR, SLO(ttft_s=30.0, tbt_s=0.1))) == [True, False, False, False]
    assert effective_request_capacity(FOUR, SLO(ttft_s=30.0, tbt_s=0.1)) == 0.25


def test_the_editions_can_disagree():
    """A request whose longest gaps break the limit may keep it on average."""
    slo = SLO(ttft_s=30.0, tbt_s=0.1)
    assert effective_request_capacity(FOUR, slo, tbt="arxiv") == 0.5


def test_a_running_request_is_not_effective_yet():
    """Good latencies so far do not make a request effective before it has finished."""
    assert effective_request_capacity(table([(1.0, 0.05, "running")]), SLO()) == 0


def test_nothing_to_count_is_an_error():
    """No request is refused."""
    with pytest.raises(ValueError, match="0 requests"):
        effective_request_capacity(table([]), SLO())


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
