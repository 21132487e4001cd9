"""The scorecard joins claims with verdicts on record, and forgets neither."""

import importlib
import json
import math
import re

import pytest

from mooncake_lab.book.chapters.scorecard.figures import VERDICTS
from mooncake_lab.book.paper import (
    Verdict,
    claim,
    claimed,
    claims,
    comparison_table,
    detail,
    headlines,
    scorecard,
    unless_twin,
)
from mooncake_lab.book.paper.evidence import sensitivity
from mooncake_lab.book.paper.facts import read_rows
from mooncake_lab.book.paper.scorecard import NOT_EXECUTED, Headlines


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
    assert set(VERDICTS) == names
    looks = set(VERDICTS.values())
    assert len(looks) == len(names)


def card(folder, **ours):
    """A scorecard over one record that holds these numbers, or (number, words) for a bound."""
    rows = []
    for name, number in ours.items():
        value, bound = number if isinstance(number, tuple) else (number, "exact")
        rows.append(claimed(claim(name), value, requests=10**6, bound=bound))
    table = comparison_table(rows).frame().astype(object)
    table = table.where(table.notna(), None)
    content = {"topic": "x", "numbers": {"beside_papers": table.to_dict(orient="records")}}
    (folder / "x.json").write_text(json.dumps(content))
    return scorecard(folder)


def row_of(made, name):
    """The headline that rests on a claim."""
    (found,) = (row for row in made.rows if name in row.claims)
    return found


def test_there_are_eight_and_each_rests_on_claims(tmp_path):
    """Eight rows, with claims of the list, none twice; without any record none has a number of ours."""
    made = headlines(scorecard(tmp_path))
    assert isinstance(made, Headlines)
    assert len(made.rows) == 8
    used = [name for row in made.rows for name in row.claims]
    assert len(used) == len(set(used))
    assert set(used) <= {each.id for each in claims()}
    assert {row.ours for row in made.rows} == {"–"}
    assert {row.why for row in made.rows} == {""}


def test_numbers_are_the_claims_and_the_records(tmp_path):
    """The paper's numbers come from the claims, ours from the record, whole percents, in the order of the row."""
    made = headlines(card(tmp_path, F07=66.4998, F08=39.3, F09=28.617))
    row = row_of(made, "F07")
    assert row.paper == "28 / 40 / 62 %"
    assert row.ours == "29 / 39 / 66 %"
    assert row.results == ("conditional",)
    assert row.evidence == ("simulated",)
    assert "28 / 40 / 62 % | 29 / 39 / 66 % | conditional |" in made.markdown()
    assert made.evidence() == "Our numbers in this table are simulated."


def test_another_record_gives_another_row(tmp_path):
    """A number that leaves its band changes verdict and text; mixed verdicts are counted."""
    row = row_of(headlines(card(tmp_path, F07=66.5, F08=39.3, F09=-5.0)), "F07")
    assert row.ours == "−5 / 39 / 66 %"
    assert row.results == ("1 not reproduced", "2 conditional")


@pytest.mark.parametrize(
    ("ours", "said", "result"), [(-14.0, "−14 %", "conditional"), (81.2, "+81 %", "not reproduced")]
)
def test_a_change_has_its_sign(tmp_path, ours, said, result):
    """A number that is a change is shown with its sign, beside what became of it."""
    row = row_of(headlines(card(tmp_path, A32=ours)), "A32")
    assert row.ours == said
    assert row.result.startswith(result)


def test_a_bound_is_marked(tmp_path):
    """A grid that ended early gives at least so much."""
    row = row_of(headlines(card(tmp_path, A01=(650.0, "at least"))), "A01")
    assert row.ours == "≥ 650 %"
    assert row.results == ("conditionally at least",)


def test_every_result_under_a_condition_has_its_reason(tmp_path):
    """A headline that agrees, or is bounded, under a condition says under which."""
    under = {"conditional", "conditionally at least"}
    for row in read_rows("headlines.csv"):
        rests = [claim(name) for name in row["claims"].split(";")]
        if any(each.grounds.condition for each in rests):
            assert under & set(row["when"].split(";")) or row["when"] == "direction only", row["headline"]
    made = headlines(card(tmp_path, F17=36.0, F18=53.0, F19=64.0, F47=1.7, F48=6.4, A32=-14.0, F15=2.3))
    for name in ("F17", "F47", "A32", "F15"):
        assert row_of(made, name).why != "", name


def test_reasons_belong_to_verdicts(tmp_path):
    """Only the reasons of verdicts that occur are said, joined where two occur."""
    kept, missed = read_rows("headlines.csv")[0]["why"].split(";")
    for ours, said in (((498.0, 157.0, 59.0), kept), ((305.0, 157.0, 59.0), f"{kept}; {missed}")):
        made = headlines(card(tmp_path, **dict(zip(("F01", "F02", "F03"), ours, strict=True))))
        assert row_of(made, "F01").why == said


def test_what_the_reasons_say_is_on_record():
    """Each alternative that a reason names gives the verdict and number that it says."""
    recorded = {
        (name, each.assumption, each.alternative): each for name, tried in sensitivity().items() for each in tried
    }

    def of(name, assumption, words):
        found = [row for (n, b, a), row in recorded.items() if (n, b) == (name, assumption) and words in a]
        assert found, (name, assumption, words)
        return found

    def lost(name, assumption, words):
        return all(row.verdict != "reproduced" for row in of(name, assumption, words))

    assert all(row.verdict == "reproduced" for n in ("F01", "F02", "F03") for row in of(n, "B39", "fewest tokens"))
    assert {row.verdict for n in ("F07", "F08", "F09") for row in of(n, "B39", "")} == {"direction only"}
    assert lost("F03", "B39", "random")
    assert lost("F03", "B09", "")
    assert lost("F03", "B37", "")
    assert lost("F03", "B07", "")
    assert all(row.verdict == "reproduced" for n in ("F07", "F08", "F09") for row in of(n, "B17", "few gaps"))
    assert all(lost(name, "B08", "1M") for name in ("F17", "F19"))
    assert all(lost(name, "B06", "10 of 16") for name in ("F47", "F48"))
    assert all(row.ours <= 100 for row in (*of("A01", "B37", ""), *of("A01", "B58", "")))
    assert lost("A32", "B21", "a threshold of 1 ")
    assert lost("A32", "B22", "")
    assert lost("A32", "B58", "the other edition")


def test_the_table_in_a_notebook_has_verdict_cells(tmp_path):
    """Its HTML has a labelled cell for each verdict, in the verdict's colour, and escapes what it shows."""
    text = headlines(card(tmp_path, F18=53.0, F47=1.7, F48=6.4))._repr_html_()
    assert text.count('<td class="verdict" data-label="verdict">') == 8
    assert re.search(r'<span class="verdict-\w+">conditional</span>', text)
    assert "tool&amp;agent" in text


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"claims": "F01;Z99"}, "'Z99', which is no claim"),
        ({"claims": "F01;F15"}, "has the units percent, ratio"),
        ({"claims": "F30"}, "has the units s"),
        ({"when": "splendid", "why": "it is"}, "'splendid', which is no verdict"),
        ({"when": "at least", "why": "one;two"}, "2 reasons for 1 verdicts"),
    ],
)
def test_a_bad_row_is_named(tmp_path, monkeypatch, change, complaint):
    """An unknown claim or verdict, and units that cannot stand together, are said with the headline."""
    first = read_rows("headlines.csv")[0]
    module = importlib.import_module("mooncake_lab.book.paper.scorecard")
    monkeypatch.setattr(module, "read_rows", lambda _: [first | change])
    with pytest.raises(ValueError, match=rf"headline 'capacity over vLLM.*{complaint}"):
        headlines(scorecard(tmp_path))
