"""What the scorecard chapter counts and sorts."""

import json

import numpy as np
import pytest

from mooncake_lab.chapters.scorecard.experiment import (
    by_chapter,
    by_evidence,
    by_kind,
    by_stated,
    gathered,
    headline_rows,
    off_by,
    spread,
)
from mooncake_lab.paper import claims

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
    ):
        assert list(counts.index) == values
        assert counts["claims"].sum() == len(claims())
        assert (counts.drop(columns="claims").sum(axis=1) == counts["claims"]).all()


def test_kinds_hold_what_was_predicted_the_best_first(tmp_path):
    """Seconds, hit rates and gains over vLLM are told apart; claims without a prediction of ours are left out."""
    found = {"F15": "reproduced", "F30": "not reproduced", "F31": "not reproduced", "F01": "direction only"}
    rows = [{"claim": name, "ours": 1.0, "verdict": said, "decides": True} for name, said in found.items()]
    (tmp_path / "x.json").write_text(json.dumps({"topic": "x", "numbers": {"beside_papers": rows}}))
    counts = by_kind(gathered(tmp_path))
    assert counts.to_numpy().sum() == len(found)
    assert counts.index[0] == "hit rates"
    assert counts.loc["seconds"].tolist() == [0, 0, 2]
    assert counts.loc["gains over vLLM, and what vLLM does"].tolist() == [0, 1, 0]


def test_headlines_are_rows_of_text(card):
    """Eight rows, with the claims that they rest on."""
    rows = headline_rows(card)
    assert len(rows) == 8
    assert {name for names in rows["claims"] for name in names.split()} <= {claim.id for claim in claims()}
