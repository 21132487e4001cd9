"""`mooncake-lab verdicts`: what it prints, what it explains, and how it fails."""

import json
import math
import re

import pytest
from typer.testing import CliRunner

from mooncake_lab.book.paper import claim, claimed, claims, comparison_table, detail
from mooncake_lab.book.paper.scorecard import scorecard
from mooncake_lab.cli import app


@pytest.fixture
def records(tmp_path):
    """Two chapters' records: a reproduced claim with a detail, a lower bound, a contradiction and a fit."""
    replicas = claim("S15")
    rows = {
        "pipeline": [
            claimed(replicas, 1.4, requests=2000),
            detail(claimed(replicas, 9.0, requests=2000), "another trace"),
        ],
        "endtoend": [claimed(claim("A01"), 650.0, requests=1000, bound="at least")],
        "transfer": [claimed(claim("F42"), 88.2), claimed(claim("F41"), 91.4)],
    }
    for topic, of_topic in rows.items():
        table = comparison_table(of_topic).frame().to_dict(orient="records")
        plain = [{**row, "ours": None if math.isnan(row["ours"]) else row["ours"]} for row in table]
        content = {"topic": topic, "numbers": {"beside_papers": plain}}
        (tmp_path / f"{topic}.json").write_text(json.dumps(content))
    return tmp_path


def verdicts(*arguments):
    """Run the command."""
    return CliRunner().invoke(app, ["verdicts", *map(str, arguments)])


def test_the_table_has_a_line_per_claim_and_the_totals(records):
    """Each claim is one line with its number, band, evidence and verdict; the totals are the scorecard's."""
    result = verdicts("--from", records)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    by_id = {line.split()[0]: line for line in lines[1 : 1 + len(claims())]}
    assert set(by_id) == {each.id for each in claims()}
    assert re.search(r"  conditionally at least +as assumed, and not with ", by_id["A01"])
    assert "≥ 650 %" in by_id["A01"]
    assert "350 to 787.5 %" in by_id["A01"]
    assert lines[-1].split()[-1] == str(len(claims()))


def test_json_holds_every_claim_and_the_same_totals(records):
    """`--json` prints one object whose totals are those of the scorecard."""
    found = json.loads(verdicts("--from", records, "--json").stdout)
    assert [each["id"] for each in found["claims"]] == [each.id for each in claims()]
    assert found["totals"]["all"] == scorecard(records).totals().loc["all"].to_dict()


@pytest.mark.parametrize(
    ("identifier", "said"),
    [
        ("S15", ("1.4× is within 1.184 to 1.85×", "simulated", "pipeline.json", "not counted")),
        ("A01", ("is a lower bound", "the condition is", "above 0 %", "endtoend.json", "up to a factor of 1.5")),
        ("F42", ("agrees with 88.4 %, which its other numbers give", "the paper contradicts itself")),
        ("F41", ("calibrated. 91.4 % is within", "agreement predicts nothing")),
        ("F11", ("out of scope. The claim is about production",)),
    ],
)
def test_an_explanation_says_why(records, identifier, said):
    """Sentence, fact, conditions, yardstick, evidence, deciding row, number, reason and note of one claim."""
    result = verdicts("--from", records, "--explain", identifier)
    assert result.exit_code == 0, result.stderr
    for text in (claim(identifier).sentence, claim(identifier).conditions, claim(identifier).note, *said):
        assert text in result.stdout


def test_one_claim_as_json(records):
    """`--explain ID --json` prints one object."""
    found = json.loads(verdicts("--from", records, "--explain", "A01", "--json").stdout)
    assert (found["ours"], found["bound"], found["band"]) == (650.0, "at least", [350.0, 787.5])


def test_failures_say_why(records, tmp_path_factory):
    """An unknown claim and a folder without records are bad usage; a record that is none is a failure."""
    unknown = verdicts("--from", records, "--explain", "Z99")
    empty = verdicts("--from", tmp_path_factory.mktemp("empty"))
    (records / "x.json").write_text(json.dumps({"topic": "x", "numbers": {"beside_papers": [{"claim": "F01"}]}}))
    broken = verdicts("--from", records)
    assert [each.exit_code for each in (unknown, empty, broken)] == [2, 2, 1]
    assert "no claim 'Z99'; there are " in unknown.stderr
    assert "contains no records" in empty.stderr
    assert "x.json is not a chapter's record" in broken.stderr
