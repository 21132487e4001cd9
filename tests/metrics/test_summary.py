"""A run in one row, by hand; and that of a log that is not kept."""

import json
from collections import defaultdict

import pytest
from drawn import REALISTIC, REQUESTS, clusters, simulated
from families import requests_of
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.core import SLO, Arrived, CacheChanged, DecodeStretch, Finished, FirstToken, Prefilled, Rejected
from mooncake_lab.metrics import (
    RunningSummary,
    effective_request_capacity,
    prefill_gpu_s,
    request_table,
    reused_share,
    run_summary,
)
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
    found = run_summary(LOG, SLO(ttft_s=2.0, tbt_s=3.0))  # which request 0 just keeps
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
    assert reused_share(LOG[2:4]) is found["token_hit_rate"] is None
    json.dumps(found, allow_nan=False)


def one_token_answers(count, first_id=10):
    """The records of requests that are served at once with one token."""
    for request_id in range(first_id, first_id + count):
        yield Arrived(at_s=7.0, request_id=request_id, input_tokens=10)
        yield prefilled(request_id, 7.0, 7.0, 10, 0)
        yield FirstToken(at_s=7.0, request_id=request_id)
        yield Finished(at_s=7.0, request_id=request_id, output_tokens=1)


@pytest.mark.parametrize("tbt", ["fast", "arxiv"])
def test_answers_of_one_token_have_no_part_in_tbt(tbt):
    """A hundred of them leave mean and percentile of TBT as they are; alone they have none, and are effective."""
    slo = SLO(ttft_s=30.0, tbt_s=1e-6)
    some, more = (run_summary([*LOG, *one_token_answers(count)], slo, tbt=tbt) for count in (0, 100))
    assert some["tbt_mean_s"] == some["tbt_p90_s"] == more["tbt_mean_s"] == more["tbt_p90_s"] > 0
    assert (some["output_tokens"], more["output_tokens"]) == (4, 104)
    alone = run_summary(one_token_answers(5), slo, tbt=tbt)
    assert (alone["tbt_mean_s"], alone["tbt_p90_s"], alone["effective_request_capacity"]) == (None, None, 1.0)
    running = [record for record in one_token_answers(5) if not isinstance(record, Finished)]
    assert run_summary(running, slo, tbt=tbt)["tbt_mean_s"] is None
    assert request_table(list(one_token_answers(5)))[f"tbt_{tbt}_s"].isna().all()


STRICT = SLO(ttft_s=0.5, tbt_s=0.03)


def numbers(log, tbt, prefill_group):
    """The summary from the table of requests, and from the union of prefill spans."""
    table = request_table(log)
    ttft, between = (table[name].dropna() for name in ("ttft_s", f"tbt_{tbt}_s"))
    counts = table["end"].value_counts()
    spans, busy_s = defaultdict(list), 0.0
    for record in log:
        if isinstance(record, Prefilled):
            spans[record.instance].append((record.start_s, record.at_s))
    for of_instance in spans.values():
        end_s = 0.0
        for start_s, at_s in sorted(of_instance):
            busy_s += max(at_s - max(start_s, end_s), 0.0)
            end_s = max(end_s, at_s)
    return {
        "requests": len(table),
        "finished": counts.get("finished", 0),
        "rejected": counts.get("rejected", 0),
        "ttft_mean_s": ttft.mean() if len(ttft) else None,
        **{f"ttft_p{p}_s": ttft.quantile(p / 100) if len(ttft) else None for p in (50, 90, 99)},
        "tbt_mean_s": between.mean() if len(between) else None,
        "tbt_p90_s": between.quantile(0.9) if len(between) else None,
        "effective_request_capacity": effective_request_capacity(table, STRICT, tbt=tbt),
        "token_hit_rate": reused_share(log),
        "prefill_gpu_s_per_request": prefill_group * busy_s / len(table),
        "output_tokens": table["output_tokens"].sum(),
        "simulated_s": [record.at_s for record in log if not isinstance(record, CacheChanged)][-1],
    }


@settings(max_examples=60, deadline=None)
@given(REQUESTS, clusters(), st.none() | st.floats(0.5, 8.0), st.sampled_from(["fast", "arxiv"]))
def test_a_summary_has_the_numbers_of_the_table_of_requests(rows, drawn, until_s, tbt):
    """Of any cluster, cut or not, read at once or while it runs; groups of prefill nodes and deaths included."""
    spec, options = drawn
    group = spec.pools[0].prefill_group
    running = RunningSummary(STRICT, tbt, prefill_group=group)
    assert Cluster(spec, REALISTIC, options, log=running.read).run(requests_of(rows), until_s) == []
    log = simulated(drawn).run(requests_of(rows), until_s)
    if any(isinstance(record, Arrived) for record in log):
        found = run_summary(log, STRICT, tbt=tbt, prefill_group=group)
        assert running.numbers() == found
        assert found == {name: pytest.approx(value) for name, value in numbers(log, tbt, group).items()}


def test_nothing_has_no_summary():
    """Without a request there is nothing to summarise."""
    with pytest.raises(ValueError, match="0 requests"):
        run_summary([], SLO())
