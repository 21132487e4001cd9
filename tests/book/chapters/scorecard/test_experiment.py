"""What the scorecard chapter counts and sorts."""

import json

import numpy as np
import pytest

from mooncake_lab.book.chapters.scorecard.experiment import (
    by_basis,
    by_chapter,
    by_evidence,
    by_kind,
    by_stated,
    gathered,
    headline_rows,
    off_by,
    spread,
)
from mooncake_lab.book.paper import claims

OURS = {"F28": 320.0, "A25": 1.0, "A26": 1e6}


@pytest.fixture
def card(tmp_path):
    """A scorecard over one record that judges three claims."""
    rows = [
        {"claim": name, "ours": ours, "verdict": "not reproduced", "decides": True} for name, ours in OURS.items()
    ]
    (tmp_path / "stages.json").write_text(json.dumps({"topic": "stages", "numbers": {"beside_papers": rows}}))
    return gathered(tmp_path)


def test_every_judgement_is_counted_once(card):
    """The bars of the chapters hold as many judgements as there are claims."""
    assert by_chapter(card).to_numpy().sum() == len(claims())


def test_the_farthest_comes_first(card):
    """Sorted by the distance of the ratio from one, on either side; only judged numbers appear."""
    table = off_by(card)
    assert set(table["claim"]) == set(OURS)
    assert np.all(np.diff(np.abs(np.log(table["ratio"]))) <= 0)


def test_shares_grow_with_the_band(card):
    """What is within a narrow band is within a wide one."""
    shares = spread(card)
    assert shares["numbers"] == len(OURS)
    assert 0 <= shares["within 1.1x"] <= shares["within 1.5x"] <= shares["within 2x"] <= 1


def test_every_claim_has_one_kind_of_evidence_and_one_time(card):
    """Sums over kinds of evidence, and over when claims were stated, are the number of claims, in their order."""
    for counts, values in (
        (by_evidence(card), ["measured", "simulated", "calibrated", "arithmetic"]),
        (by_stated(card), ["before", "with", "after"]),
        (by_basis(card), ["predicted", "by construction", "calibrated", "arithmetic"]),
    ):
        assert list(counts.index) == values
        assert counts["claims"].sum() == len(claims())
        assert (counts.drop(columns="claims").sum(axis=1) == counts["claims"]).all()


def test_kinds_hold_what_was_predicted_the_best_first(tmp_path):
    """Kinds of numbers are told apart; what was fitted is left out, also where it misses; conditions agree."""
    found = {"F15": "conditional", "F47": "reproduced", "F30": "not reproduced", "F31": "not reproduced"}
    found |= {"F01": "direction only", "S01": "reproduced", "S06": "direction only", "A22": "calibrated"}
    rows = [{"claim": name, "ours": 1.0, "verdict": said, "decides": True} for name, said in found.items()]
    (tmp_path / "x.json").write_text(json.dumps({"topic": "x", "numbers": {"beside_papers": rows}}))
    counts = by_kind(gathered(tmp_path))
    assert counts.to_numpy().sum() == len(found) - 2
    assert list(counts.columns) == ["reproduced", "conditional", "direction only", "not reproduced"]
    assert counts.loc["hit rates"].tolist() == [0, 1, 0, 0]
    assert counts.loc["other ratios and shares, Mooncake"].tolist() == [1, 0, 0, 0]
    assert counts.loc["other ratios and shares, other systems"].tolist() == [1, 0, 0, 0]
    assert counts.index[-1] in {"times", "gains over vLLM, and what vLLM does"}
    assert counts.loc["times"].tolist() == [0, 0, 0, 2]
    assert counts.loc["gains over vLLM, and what vLLM does"].tolist() == [0, 0, 1, 0]


def test_headlines_are_rows_of_text(card):
    """Eight rows, with the claims that they rest on."""
    rows = headline_rows(card)
    assert len(rows) == 8
    assert {name for names in rows["claims"] for name in names.split()} <= {claim.id for claim in claims()}
