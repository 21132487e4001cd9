"""A run in one row, by hand; and that of a log that is not kept."""

import pytest
from drawn import REALISTIC, REQUESTS, clusters, simulated
from families import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.core import SLO, Arrived, DecodeStretch, Finished, FirstToken, Prefilled, Rejected
from mooncake_lab.metrics import RunningSummary, prefill_gpu_s, reused_share, run_summary
from mooncake_lab.simulation import Cluster


def prefilled(request_id, start_s, at_s, computed, reused, instance="p"):
    return Prefilled(
        at_s=at_s, request_id=request_id, instance=instance, start_s=start_s, computed_tokens=computed,
        reused_tokens=reused,
    )  # fmt: skip


LOG = [
    Arrived(at_s=0.0, request_id=0, input_tokens=100),
    Arrived(at_s=0.0, request_id=1, input_tokens=300),
    Arrived(at_s=1.0, request_id=2, input_tokens=10),
    Rejected(at_s=1.0, request_id=2, stage="admission", reason="full"),
    prefilled(0, 0.0, 2.0, 60, 40),
    FirstToken(at_s=2.0, request_id=0),
    prefilled(1, 2.0, 3.0, 240, 60),
    FirstToken(at_s=4.0, request_id=1),
    Finished(at_s=4.0, request_id=1, output_tokens=1),
    DecodeStretch(
        at_s=6.0, instance="d", start_s=4.0, steps=2, first_step_s=1.0, step_growth_s=0.0, request_ids=(0,)
    ),
    Finished(at_s=6.0, request_id=0, output_tokens=3),
]


def test_three_requests_by_hand():
    """Counts, means and shares of a log small enough to add up on paper."""
    found = run_summary(LOG, SLO(ttft_s=3.0, tbt_s=3.0))
    assert (found["requests"], found["finished"], found["rejected"]) == (3, 2, 1)
    assert found["ttft_mean_s"] == 3.0
    assert found["effective_request_capacity"] == pytest.approx(1 / 3)
    assert found["token_hit_rate"] == pytest.approx(100 / 400)
    assert found["prefill_gpu_s_per_request"] == pytest.approx(3.0 / 3)
    assert (found["output_tokens"], found["simulated_s"]) == (4, 6.0)


def test_prompts_computed_together_take_gpu_time_once():
    """Two prompts in one iteration of one instance are one span; on two instances they are two."""
    together = [prefilled(0, 0.0, 2.0, 5, 0), prefilled(1, 0.0, 2.0, 5, 0)]
    apart = [prefilled(0, 0.0, 2.0, 5, 0), prefilled(1, 0.0, 2.0, 5, 0, instance="q")]
    assert (prefill_gpu_s(together), prefill_gpu_s(apart)) == (2.0, 4.0)


def test_nobody_served_is_said():
    """Where no request received a token there is no latency, and no error."""
    found = run_summary(LOG[2:4], SLO())
    assert (found["ttft_mean_s"], found["tbt_p90_s"], found["effective_request_capacity"]) == (None, None, 0.0)
    assert reused_share(LOG[2:4]) == 0.0


@settings(max_examples=40, deadline=None)
@given(REQUESTS, clusters(), st.none() | st.floats(0.5, 8.0), st.sampled_from(["fast", "arxiv"]))
def test_a_log_that_is_not_kept_has_the_same_summary(rows, drawn, until_s, tbt):
    """Of any cluster, deaths and a horizon included; a group's prefill occupies all its nodes."""
    spec, options = drawn
    group = spec.pools[0].prefill_group
    running = RunningSummary(SLO(), tbt, prefill_group=group)
    assert Cluster(spec, REALISTIC, options, log=running.read).run(requests_of(rows), until_s) == []
    log = simulated(drawn).run(requests_of(rows), until_s)
    if any(isinstance(record, Arrived) for record in log):
        expected = run_summary(log, SLO(), tbt=tbt, prefill_group=group)
        assert running.numbers() == expected
        alone = run_summary(log, SLO())["prefill_gpu_s_per_request"]
        assert expected["prefill_gpu_s_per_request"] == pytest.approx(group * alone)


def test_nothing_has_no_summary():
    """Without a request there is nothing to summarise."""
    with pytest.raises(ValueError, match="0 requests"):
        run_summary([], SLO())
