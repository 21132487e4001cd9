"""The README's results come from the chapters' numbers and from nowhere else."""

import json
import re

import pytest

from mooncake_lab.book.paper.claims import claims
from mooncake_lab.book.paper.pages import main, with_results

README = "# A\n\n<!-- results: begin -->\nold\n<!-- results: end -->\n\nafter\n"


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


def test_the_results_count_every_claim_and_say_from_what(records):
    """Eight rows, then all claims, each once, those of chapters that did not run included; the rest stays."""
    text = with_results(README, records)
    assert text.startswith("# A\n\n<!-- results: begin -->\n| headline | paper | ours | result |")
    assert text.endswith("<!-- results: end -->\n\nafter\n")
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 2 + 8
    (number, counts) = re.findall(r"The book judges (\d+) claims\. (.+)", text)[0]
    assert int(number) == len(claims()) == sum(int(each) for each in re.findall(r"\* \((\d+)", counts))
    assert counts.startswith("Predictions that agree: *reproduced* (1, of which 1 about Mooncake). Not decided: ")
    assert "Some chapters were not executed" in text
    assert "scale smoke, seed 3 and generated twins of the traces synthetic." in text
    assert with_results(text, records) == text


def test_marks_and_numbers_are_needed(records, tmp_path_factory):
    """A README without marks, or a folder without numbers, is an error that says so."""
    with pytest.raises(ValueError, match="marks"):
        with_results("# A\n", records)
    with pytest.raises(ValueError, match="run `make book` first"):
        with_results(README, tmp_path_factory.mktemp("empty"))


def test_the_command_writes_the_file(records, capsys):
    """Two arguments, the page and the numbers."""
    page = records / "README.md"
    page.write_text(README)
    assert main([str(page), str(records)]) == 0
    assert "1 reproduced" in page.read_text()
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
