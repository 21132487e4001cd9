"""The piggyback chapter's tables: policies timed, peaks at the balance, and the real engine's riders."""

import pytest

from mooncake_lab.book.chapters.piggyback.experiment import (
    POLICIES,
    MeasuredGain,
    MeasuredRiders,
    ModelledRun,
    beside_closed_form,
    beside_papers,
    gain_medians,
    rider_accounts,
)
from mooncake_lab.book.chapters.piggyback.model import (
    account_sweep,
    beside_orca,
    breakdown,
    closed_rounds,
    decode_places,
    peaks,
    predictions,
    ratio_sweep,
    sawtooth,
    time_per_token,
)
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.paper import Verdict, claim, claims

RIDERS = MeasuredRiders(model="lab-tiny", fused_tokens=(8, 16), riders=(1, 3), context_tokens=8, rounds=2)
GAIN = MeasuredGain(model="lab-tiny", fused_tokens=8, total_tokens=16, batch=3, requests=6, rounds=2)


class TestModelled:
    def test_gains_peak_at_the_balance(self):
        """For every length and chunk the best P:D of the sweep is the whole number next to the balance."""
        best = ratio_sweep().query("fused_tokens > 0")
        best = best.loc[best.groupby(["label", "fused_tokens"])["gain"].idxmax()]
        merged = best.merge(peaks(), on=["label", "fused_tokens"], suffixes=("", "_balance"))
        assert len(merged) == 9
        assert (merged["ratio"] - merged["ratio_balance"]).abs().max() <= 2.0

    def test_prefill_is_flat_and_decode_falls(self):
        """A prefill token costs the same at every batch; a decode token ever less."""
        totals = time_per_token().groupby(["stage", "batch"])["ms"].sum()
        assert totals["prefill"].max() / totals["prefill"].min() < 1.001
        assert totals["decode"].is_monotonic_decreasing

    def test_the_saw_has_its_teeth_at_tiles(self):
        """With tiles the time steps up after each multiple of 128 and nowhere else beyond the first."""
        tiled = sawtooth(400).query("tiles").set_index("tokens")["ms"]
        assert tiled[257] > 1.2 * tiled[256]
        assert tiled[300] < 1.01 * tiled[257]

    def test_attention_is_not_gained(self):
        """Piggybacking shrinks the linear part of every round and no other."""
        table = breakdown().pivot_table(
            index=["label", "fused_tokens", "part"], columns="scheme", values="seconds"
        )
        smaller = table["SARATHI"] < table["baseline"]
        assert set(smaller[smaller].index.get_level_values("part")) == {"linear"}

    def test_accounts_disagree_in_one_direction(self):
        """The marginal account promises most and the mean of both orders least."""
        table = account_sweep()
        assert (table["marginal"] > table["by_token"]).all()
        assert (table["by_token"] > table["by_order"]).all()

    def test_schemes_are_in_order(self):
        """SARATHI above Orca-best above the baseline at the balance, as in Figure 11a."""
        table = beside_orca().pivot_table(index="label", columns="scheme", values="gain")
        assert (table["SARATHI"] > table["Orca-best"]).all()
        assert (table["Orca-best"] >= table["baseline"]).all()

    def test_places_are_full_or_nobody_is_alone(self):
        """Decodes run alone only where every place is taken, and the gains are those of the sweep."""
        table = decode_places((2, 14, 60))
        assert table["places_filled"].between(0, 1 + 1e-12).all()
        assert table.loc[table["decodes_alone"] > 0, "places_filled"].to_numpy() == pytest.approx(1.0)
        sweep = ratio_sweep(["1K"])
        assert set(table["gain"].round(9)) <= set(sweep["gain"].round(9))

    def test_beside_papers(self):
        """The claims on throughput are reproduced, the step at a tile needs its GPU."""
        frame = beside_papers(predictions(), ratio_sweep(["1K"])).frame()
        assert set(frame["claim"]) == {each.id for each in claims() if each.chapter == "05_piggyback"}
        table = frame.set_index("quantity")["verdict"]
        assert table[claim("S09").sentence] == Verdict.NEEDS_HARDWARE
        for name in ("S01", "S02", "S03"):
            assert table[claim(name).sentence] in {Verdict.REPRODUCED, Verdict.CONDITIONAL}
        assert table[claim("S16").sentence] == Verdict.ARITHMETIC
        assert table[claim("S06").sentence] == Verdict.CALIBRATED


class TestPolicies:
    def test_simulated_rounds_come_near_the_closed_ones(self):
        """The baseline agrees exactly; the others come closer with more rounds, from above."""
        few, many = (
            beside_closed_form(
                run(vary(ModelledRun(rounds=rounds), scheme=POLICIES), cache=False), closed_rounds()
            ).set_index("scheme")["apart_percent"]
            for rounds in (2, 6)
        )
        assert few["baseline"] == pytest.approx(0, abs=1e-9)
        for name in ("Orca-best", "SARATHI"):
            assert few[name] > many[name] > 0


class TestEngine:
    def test_riders(self):
        """Each round times a chunk, decodes and both, for every width and number of riders."""
        table = run(RIDERS, cache=False)
        assert table.groupby(["fused", "decodes"]).size().tolist() == [2] * 4
        assert (table[["chunk_s", "decodes_s", "both_s"]] > 0).all(axis=None)
        accounts = rider_accounts(table)
        assert (accounts["by_token_ms"] > accounts["marginal_ms"]).all()
        assert (accounts["marginal_low_ms"] <= accounts["marginal_ms"]).all()

    def test_every_policy_generates_the_same_tokens(self):
        """Who shares an iteration changes no token of anybody, and each scheme is held against its own round."""
        table = run(GAIN, cache=False)
        assert table["same_tokens"].all()
        assert (table.query("scheme == 'baseline'")["gain"] == 1).all()
        assert gain_medians(table)["scheme"].tolist() == list(POLICIES)
