"""The README's verdict table comes from the chapters' numbers and from nowhere else."""

import json

import pytest

from mooncake_lab.paper.claims import claims
from mooncake_lab.paper.readme import main, refreshed

README = "# A\n\n<!-- verdicts: begin -->\nold\n<!-- verdicts: end -->\n\nafter\n"


@pytest.fixture
def records(tmp_path):
    """Numbers of a chapter that judges one claim."""
    judged = next(claim for claim in claims() if claim.reach not in {"scope", "hardware"})
    row = {"claim": judged.id, "verdict": "reproduced", "ours": 1.0, "decides": True}
    content = {"topic": "store", "twin": False, "numbers": {"beside_papers": [row]}}
    (tmp_path / "store.json").write_text(json.dumps(content))
    made = {"scale": "smoke", "seed": 3, "traces": {"conversation": "ab", "synthetic": None}}
    (tmp_path / "provenance.json").write_text(json.dumps(made))
    return tmp_path


def test_the_table_counts_every_judgement_and_says_from_what(records):
    """All claims are counted once, those of chapters that did not run included; the rest of the page stays."""
    text = refreshed(README, records)
    assert text.startswith("# A\n\n<!-- verdicts: begin -->\n| claims of | reproduced |")
    assert text.endswith("<!-- verdicts: end -->\n\nafter\n")
    total = next(line for line in text.splitlines() if line.startswith("| **all**"))
    assert f"**{len(claims())}**" in total
    assert "not executed" in text
    assert "Scale smoke, seed 3, twins for synthetic." in text
    assert refreshed(text, records) == text


def test_marks_and_numbers_are_needed(records, tmp_path_factory):
    """A README without marks, or a folder without numbers, is an error that says so."""
    with pytest.raises(ValueError, match="marks"):
        refreshed("# A\n", records)
    with pytest.raises(ValueError, match="run `make book` first"):
        refreshed(README, tmp_path_factory.mktemp("empty"))


def test_the_command_writes_the_file(records, capsys):
    """Two arguments, the page and the numbers."""
    page = records / "README.md"
    page.write_text(README)
    assert main([str(page), str(records)]) == 0
    assert "reproduced" in page.read_text()
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
