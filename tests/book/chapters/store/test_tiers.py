"""The real store under a real conversation: equal tokens whatever the tier, and what reuse must and may not do."""

from dataclasses import replace

import pandas as pd
import pytest

from mooncake_lab.book.chapters.store import tiers as store_tiers
from mooncake_lab.book.experiments import run

SMALL = store_tiers.measured_conversation("smoke")


@pytest.fixture(scope="module")
def turns():
    return run(SMALL, cache=False)


@pytest.fixture(scope="module")
def tried():
    return run(replace(store_tiers.break_even_at("smoke"), around=(0.25, 1.0, 4.0)), cache=False)


def test_every_tier_answers_the_same(turns):
    """Each turn's token is that of computing all of it, and later turns contain the earlier answers."""
    assert turns["same_tokens"].all()
    assert len(turns) == len(SMALL.tiers) * SMALL.turns


def test_a_turn_reuses_the_whole_blocks_of_the_turn_before(turns):
    """Without a tier nothing is reused; with one, all blocks that the turn before filled."""
    before = {1: 0, **{turn + 1: turn * SMALL.turn_tokens + turn - 1 for turn in range(1, SMALL.turns)}}
    for row in turns.to_dict(orient="records"):
        whole = before[row["turn"]] // SMALL.block_tokens * SMALL.block_tokens
        assert row["reused_tokens"] == (0 if row["tier"] == store_tiers.NO_TIER else whole)


def test_a_wrong_answer_is_noticed(monkeypatch):
    """A tier that answered another token would be reported, not averaged away."""
    right = store_tiers._Ways._prefill

    def wrong(ways, tier, prompt):
        seconds, reused, token = right(ways, tier, prompt)
        return seconds, reused, token + (tier == "dram")

    monkeypatch.setattr(store_tiers._Ways, "_prefill", wrong)
    found = run(replace(SMALL, tiers=("none", "dram"), turns=1), cache=False).set_index("tier")["same_tokens"]
    assert found.to_dict() == {"none": True, "dram": False}


def test_equation_2_is_read_in_three_ways_of_one_size(tried):
    """The exact count at the share of the peak that was reached is what computing really took."""
    row = tried.iloc[0]
    assert row["achieved_mb_per_s"] == pytest.approx(row["share_of_peak"] * row["exact_mb_per_s"])
    assert (tried["mb_per_s"] / row["achieved_mb_per_s"]).tolist() == pytest.approx([0.25, 1.0, 4.0])


@pytest.mark.parametrize(
    ("ratios", "expected"), [([0.5, 2.0, 3.0], 2.0), ([2.0, 3.0, 4.0], None), ([0.1, 0.2, 0.3], None)]
)
def test_the_crossing_is_where_both_take_equally_long(ratios, expected):
    """Between 1 and 4 MB/s, half way on both logarithmic axes; nowhere, where no two points enclose it."""
    rows = pd.DataFrame({"mb_per_s": [1.0, 4.0, 16.0], "ratio": ratios})
    assert store_tiers.crossing_mb_per_s(rows) == (expected and pytest.approx(expected))
