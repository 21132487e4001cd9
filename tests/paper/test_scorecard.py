"""The scorecard joins claims with verdicts on record, and forgets neither."""

import json
import math

import pytest

from mooncake_lab.chapters.scorecard.figures import VERDICT_COLOURS, VERDICT_HATCHES
from mooncake_lab.paper import Verdict, claim, claimed, claims, comparison_table, detail, unless_twin
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


def test_a_claim_counts_once(tmp_path):
    """One row decides a claim, others are details of it, in its own chapter or in another."""
    once = claimed(claim("F28"), 320.0)
    write(tmp_path, "stages", once, detail(once, "again"))
    write(tmp_path, "transfer", detail(claimed(claim("F28"), 160.0), "half"))
    (row,) = [row for row in scorecard(tmp_path).rows if row.claim.id == "F28"]
    assert (row.ours, row.topic, len(row.details)) == (320.0, "stages", 2)
    assert len(scorecard(tmp_path).rows) == len(claims())


def test_a_claim_decided_in_two_chapters_is_an_error(tmp_path):
    """The scorecard does not choose between two chapters; it names them."""
    for topic in ("stages", "transfer"):
        write(tmp_path, topic, claimed(claim("F28"), 320.0))
    with pytest.raises(ValueError, match="'F28' is decided 2 times, in stages, transfer"):
        scorecard(tmp_path)


def test_totals_add_up(tmp_path):
    """Rows and columns of the totals sum to the number of claims."""
    write(tmp_path, "stages", claimed(claim("F28"), 320.0))
    totals = scorecard(tmp_path).totals()
    assert totals.loc["all", "claims"] == len(claims())
    assert totals.drop(index="all")["claims"].sum() == len(claims())
    assert (totals.drop(columns="claims").sum(axis=1) == totals["claims"]).all()


def test_arithmetic_and_calibration_are_counted_apart(tmp_path):
    """What follows from printed numbers, or was fitted to them, is in columns of its own and not in reproduced."""
    write(
        tmp_path, "stages", claimed(claim("F28"), 320.0), claimed(claim("A25"), 30.0), claimed(claim("S07"), 210.0)
    )
    totals = scorecard(tmp_path).totals()
    assert [totals.loc["all", name] for name in ("reproduced", "calibrated", "arithmetic")] == [1, 1, 1]


def test_every_table_shows_band_and_evidence(tmp_path):
    """The scorecard has a cell of each for every claim, and each cell names its column."""
    html = scorecard(tmp_path)._repr_html_()
    for column in ("claim", "statement", "paper", "ours", "band", "evidence", "verdict", "chapter"):
        assert html.count(f'data-label="{column}"') == len(claims())


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
