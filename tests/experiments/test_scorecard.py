"""What the scorecard chapter counts and sorts."""

import json

import numpy as np
import pytest

from mooncake_lab.experiments.scorecard import by_chapter, gathered, off_by, spread
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
