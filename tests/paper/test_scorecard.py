"""The scorecard joins claims with verdicts on record, and forgets neither."""

import json
import math

import pytest

from mooncake_lab.figures.scorecard import VERDICT_COLOURS, VERDICT_HATCHES
from mooncake_lab.paper import Verdict, claim, claimed, claims, comparison_table, unless_twin
from mooncake_lab.paper.scorecard import NOT_EXECUTED, scorecard


def write(folder, topic, *rows):
    """A chapter's record, as the experiments write it: missing numbers are null."""
    table = comparison_table(rows).frame()
    rows = [
        dict(row, ours=None if math.isnan(row["ours"]) else row["ours"]) for row in table.to_dict(orient="records")
    ]
    (folder / f"{topic}.json").write_text(json.dumps({"topic": topic, "numbers": {"beside_papers": rows}}))


def test_every_claim_is_accounted_for_without_any_record(tmp_path):
    """An empty folder gives every claim once; what can be measured here was not executed."""
    card = scorecard(tmp_path)
    assert [row.claim.id for row in card.rows] == [each.id for each in claims()]
    assert {row.verdict for row in card.rows if row.claim.reach == "here"} == {NOT_EXECUTED}
    assert NOT_EXECUTED not in {row.verdict for row in card.rows if row.claim.reach != "here"}


def test_a_verdict_is_the_chapters(tmp_path):
    """What a chapter judged appears with its number, and nothing else changes."""
    write(tmp_path, "stages", claimed(claim("F28"), 320.0), claimed(claim("A25"), 30.0))
    rows = {row.claim.id: row for row in scorecard(tmp_path).rows}
    assert (rows["F28"].ours, rows["A25"].ours) == (320.0, 30.0)
    assert rows["F28"].verdict == claimed(claim("F28"), 320.0).verdict.value
    assert rows["F01"].verdict == NOT_EXECUTED


def test_a_claim_judged_on_two_workloads_shows_both(tmp_path):
    """Two rows with one claim's id are two judgements."""
    write(tmp_path, "stages", claimed(claim("F28"), 320.0), claimed(claim("F28"), 160.0))
    assert [row.ours for row in scorecard(tmp_path).rows if row.claim.id == "F28"] == [320.0, 160.0]


def test_totals_add_up(tmp_path):
    """Rows and columns of the totals sum to the number of judgements."""
    write(tmp_path, "stages", claimed(claim("F28"), 320.0))
    card = scorecard(tmp_path)
    totals = card.totals()
    assert totals.loc["all", "judgements"] == len(card.rows)
    assert totals.drop(index="all")["judgements"].sum() == len(card.rows)
    assert (totals.drop(columns="judgements").sum(axis=1) == totals["judgements"]).all()


def test_rows_without_a_claim_and_files_that_are_no_record_are_passed_over(tmp_path):
    """A chapter's other rows, and the build's provenance, are not claims."""
    rows = [{"verdict": "reproduced", "ours": 1.0, "claim": ""}]
    (tmp_path / "x.json").write_text(json.dumps({"topic": "x", "numbers": {"beside_papers": rows}}))
    (tmp_path / "provenance.json").write_text(json.dumps({"scale": "smoke"}))
    assert len(scorecard(tmp_path).rows) == len(claims())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"topic": "x", "numbers": {"beside_papers": [{"verdict": "reproduced", "claim": "Z99"}]}}, "'Z99'"),
        ({"topic": "x", "numbers": {"beside_papers": [{"ours": 1.0}]}}, "not a chapter's record"),
    ],
)
def test_a_bad_record_is_named(tmp_path, content, complaint):
    """An unknown claim, or a row without a verdict, is said with the file."""
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"x\.json .*{complaint}"):
        scorecard(tmp_path)


def test_what_a_twin_was_made_to_have_is_counted_apart(tmp_path):
    """Judgements that wait for a released trace have their own column; without any there is none."""
    write(tmp_path, "store", unless_twin(claimed(claim("F22"), 0.5), "twin"), claimed(claim("A14"), None))
    totals = scorecard(tmp_path).totals()
    assert totals.loc["all", Verdict.TRACE_NOT_HERE.value] == totals.loc["FAST'25", "trace not here"] == 1
    assert totals.loc["all", Verdict.OUT_OF_SCOPE.value] == sum(each.reach == "scope" for each in claims())
    (tmp_path / "store.json").unlink()
    assert Verdict.TRACE_NOT_HERE.value not in scorecard(tmp_path).totals()


def test_every_verdict_has_a_look_of_its_own():
    """The figure draws each verdict, and no two with the same colour and hatch."""
    names = {*(verdict.value for verdict in Verdict), NOT_EXECUTED}
    assert set(VERDICT_COLOURS) == names
    looks = {(VERDICT_COLOURS[name], VERDICT_HATCHES.get(name)) for name in names}
    assert len(looks) == len(names)
