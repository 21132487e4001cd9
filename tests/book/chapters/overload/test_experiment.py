"""Overload experiments: laws at a small scale, what the oracle may know, and the live crowd."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from mooncake_lab.book.chapters.overload import claims as beside
from mooncake_lab.book.chapters.overload import experiment as topic
from mooncake_lab.book.chapters.overload.experiment import stages
from mooncake_lab.book.chapters.overload.live import LiveCrowd
from mooncake_lab.book.experiments import run, vary, where
from mooncake_lab.book.paper import Verdict, claims
from mooncake_lab.core import Prefilled, Rejected
from mooncake_lab.metrics import check_log

FULL = topic.Overload(
    workload="uniform", first=260, prefill_nodes=8, decode_nodes=1, tbt_limit_s=0.04, every_s=2.0
)


@pytest.fixture(scope="module")
def rows():
    """Five policies on the same crowd of requests that are alike."""
    names = ("after_prefill", "early", "committed", "predictive", "oracle")
    return run(vary(FULL, policy=names), cache=False).set_index("policy")


class TestOverload:
    def test_the_baseline_wastes_all_that_decode_refuses(self, rows):
        """It refuses on arrival only for prefill, so that nearly all its rejections come after prefill."""
        assert rows["rejected_late"]["after_prefill"] > 0.9 * rows["rejected"]["after_prefill"] > 0

    def test_waste_falls_in_the_order_of_table_3(self, rows):
        """Baseline, early rejection, prediction: the seconds of prefill for nothing fall in this order."""
        waste = rows["wasted_prefill_s"]
        assert waste["after_prefill"] > waste["early"] > waste["predictive"] >= waste["committed"]

    @pytest.mark.parametrize("policy", ["after_prefill", "early", "length_predicting", "adaptive"])
    def test_logs_keep_the_invariants(self, policy):
        """Nothing is lost and causes precede effects, also for those who are refused after prefill."""
        replay = dataclasses.replace(FULL, policy=policy, first=150)
        requests, trace = replay.requests()
        log, _ = replay.replay(requests, trace.block_size_tokens)
        assert check_log(log) == ()
        late = {r.request_id for r in log if isinstance(r, Rejected) and r.stage == "decode"}
        assert late <= {r.request_id for r in log if isinstance(r, Prefilled)}

    def test_seeds_are_stretches_of_the_trace(self):
        """Another seed is another window, from second 0 on and in order."""
        one, two = (dataclasses.replace(FULL, seed=seed).requests()[0] for seed in (1, 2))
        assert one[0].request.id != two[0].request.id
        times = [traced.request.arrival_s for traced in one]
        assert times == sorted(times)
        assert times[0] == 0.0


class TestStages:
    def test_early_rejection_alternates(self):
        """All or nothing, and each stage decodes what the one before prefilled."""
        found = list(stages(0.8, 0.5, predicted=False, count=6))
        assert [stage.prefill for stage in found] == [0.8, 0.0] * 3
        assert [stage.decode for stage in found[1:]] == [stage.prefill for stage in found[:-1]]

    def test_prediction_is_steady(self):
        """From the second stage on nothing changes."""
        found = list(stages(0.8, 0.5, predicted=True, count=6))
        assert {(stage.decode, stage.prefill) for stage in found[1:]} == {(0.5, 0.5)}


def replays(baseline=4000, early=3600, predictive=3400, twins=3, correlation=-0.4):
    """Invented rows at both TTFT limits."""
    counts = {"after_prefill": baseline, "early": early, "predictive": predictive}
    return pd.DataFrame(
        [
            {
                "policy": policy, "twin": twin, "ttft_limit_s": limit_s, "rejected_share": (count + twin) / 23_000,
                "correlation": correlation, "decode_swing": 0.1, "peak_lag_s": 30.0,
                "prefill_load": 0.7, "decode_load": 0.9,
            }
            for policy, count in counts.items() for twin in range(twins) for limit_s in (15.0, 30.0)
        ]
    )  # fmt: skip


class TestBesidePapers:
    def test_every_claim_of_the_chapter_is_graded_once(self):
        """No claim that the ledger gives to this chapter is left out or decided twice."""
        rows = replays()
        table = beside.beside_papers(rows, {"elsewhere": where(rows, ttft_limit_s=15.0)})
        graded = [row.claim for row in table.rows if row.decides]
        assert sorted(graded) == sorted(c.id for c in claims() if c.chapter == "11_overload")

    def test_the_order_is_lost_at_one_limit(self):
        """At one limit early rejection gains nothing, so that the order does not hold whatever the other says."""
        rows = replays()
        rows.loc[(rows["policy"] == "early") & (rows["ttft_limit_s"] == 15.0), "rejected_share"] = 4010 / 23_000
        for judged, verdict in ((replays(), Verdict.CONDITIONAL), (rows, Verdict.NOT_REPRODUCED)):
            table = beside.beside_papers(judged, {}).frame()
            assert table[table["claim"] == "A123"]["verdict"].tolist() == [verdict]

    def test_a_mean_ratio_is_compared_and_its_interval_decides(self):
        """Our number is a mean, as the paper's is; an order needs both ends of its interval."""
        rows = replays()
        early = (rows["policy"] == "early") & (rows["ttft_limit_s"] == 30.0)
        shares = rows.loc[(rows["policy"] == "after_prefill") & (rows["ttft_limit_s"] == 30.0), "rejected_share"]
        for first, verdict in ((0.95, Verdict.CONDITIONAL), (1.02, Verdict.NOT_REPRODUCED)):
            ratios = np.full(len(shares), 0.95)
            ratios[0] = first
            rows.loc[early, "rejected_share"] = shares.to_numpy() * ratios
            limit_s, policy, (ratio, low, high) = beside.highest_ratio(rows)
            assert (limit_s, policy) == (30.0, "early")
            assert low <= ratio <= high
            assert ratio < 1
            (row,) = [each for each in beside.beside_papers(rows, {}).rows if each.claim == "A123"]
            assert row.ours == ratio
            assert row.verdict is verdict

    def test_counts_are_means_at_the_printed_limit(self):
        """The baseline's count is the mean over twins at 30 s, and replays at 15 s do not move it."""
        rows = replays()
        rows.loc[rows["ttft_limit_s"] == 15.0, "rejected_share"] *= 2
        table = beside.beside_papers(rows, {}).frame().set_index("claim")
        assert table["ours"]["A16"] == 4001
        assert table["ours"]["A18"] == 3401

    def test_figure_9_moves_as_the_notes_say(self):
        """The samples give the correlation that the ledger of claims has, and a peak after half a minute."""
        moves = beside.paper_movement()
        assert moves["correlation"] == pytest.approx(-0.5236, abs=1e-3)
        assert 30 <= moves["peak_lag_s"] <= 45
        assert len(beside.paper_series()) == 81

    def test_the_interval_of_a_ratio_contains_it(self):
        """For two policies whose ratio is two in every stretch, it is two with no width."""
        table = pd.DataFrame(
            {"seed": np.repeat(range(5), 2), "policy": ["a", "b"] * 5, "q": [2, 1, 4, 2, 6, 3, 8, 4, 10, 5]}
        )
        assert beside.ratio_with_interval(table, "q", "a", "b") == pytest.approx((2.0, 2.0, 2.0))


class TestPrompts:
    def test_every_prompt_is_counted_once(self, rows):
        """Rejected on arrival, rejected after prefill and kept have all tokens of the requests between them."""
        row = rows.reset_index().set_index("policy").loc["early"]
        kept = row["requests"] - row["rejected"]
        tokens = kept * row["kept_tokens"] + row["rejected_late"] * row["late_rejected_tokens"]
        tokens += (row["rejected"] - row["rejected_late"]) * row["arrival_rejected_tokens"]
        sent = sum(traced.request.input_tokens for traced in FULL.requests()[0])
        assert tokens == pytest.approx(sent)


@pytest.mark.slow
def test_old_views_make_early_rejection_swing_and_prediction_damps_it():
    """With views up to 20 s old, early rejection swings more than with fresh ones, and more than prediction."""
    alike = dataclasses.replace(FULL, placement="random", speed=1.0, first=600)
    swing = run(vary(alike, view_age_s=(0.0, 20.0), policy=("early", "predictive")), cache=False)
    swing = swing.set_index(["view_age_s", "policy"])["decode_swing"]
    assert swing[20.0, "early"] > 2 * swing[0.0, "early"]
    assert swing[20.0, "early"] > 2 * swing[20.0, "predictive"]


class TestLiveCrowd:
    @pytest.fixture(scope="class")
    @staticmethod
    def crowd():
        """Ten requests for two places, under two policies, live and simulated."""
        small = LiveCrowd(
            policies=("after_prefill", "committed"),
            requests=10,
            every_s=0.06,
            slots=2,
            prompt_tokens=64,
            answer_tokens=40,
        )
        return run(small, cache=False).set_index(["policy", "world"])

    @pytest.mark.slow  # four bursts of some 15 s each, at a pace that a crowded machine can keep
    def test_both_pools_scarce(self):
        """Where the metronome makes both pools scarce, each request ends live as it does in the simulation."""
        both = LiveCrowd(
            requests=10, every_s=0.55, prefill_s=0.8, step_s=0.3, step_s_per_request=0.05, slots=3,
            ttft_limit_s=1.2, prompt_tokens=64, answer_tokens=20,
        )  # fmt: skip
        found = run(both, cache=False)
        live, simulated = (
            found[found.world == world].set_index("policy")["ends"].str.split(", ").to_dict()
            for world in ("live", "simulated")
        )
        assert live == simulated
        for policy, ends in simulated.items():
            decode = {"decode after prefill"} if policy == "after_prefill" else {"decode on arrival"}
            assert {"finished", "prefill"} | decode <= set(ends), policy
        assert simulated["after_prefill"] != simulated["early"] != simulated["predictive"]

    def test_everybody_ends(self, crowd):
        """Requests are answered or refused, on arrival or after prefill, in both worlds."""
        ends = crowd[["finished", "refused_on_arrival", "refused_after_prefill"]].sum(axis=1)
        assert (ends == 10).all()
        assert (crowd["finished"] > 0).all()

    def test_only_the_baseline_prefills_in_vain(self, crowd):
        """It refuses nobody on arrival and somebody later; who counts the coming does the reverse."""
        baseline, counting = crowd.loc["after_prefill"], crowd.loc["committed"]
        assert (baseline["refused_on_arrival"] == 0).all()
        assert (baseline["wasted_prefill_s"] > 0).all()
        assert (counting["refused_on_arrival"] > 0).all()
        assert (counting[["refused_after_prefill", "wasted_prefill_s"]] == 0).all(axis=None)

    def test_prefill_takes_what_the_metronome_says(self, crowd):
        """Ten prompts under the baseline take ten beats, and in processes that share a machine a little more."""
        beats = 10 * LiveCrowd().prefill_s
        live, simulated = (crowd.loc["after_prefill", world]["prefill_s"] for world in ("live", "simulated"))
        assert simulated == pytest.approx(beats)
        assert live >= beats * (1 - 1e-6)
