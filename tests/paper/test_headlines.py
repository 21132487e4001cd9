"""The headlines are the scorecard's numbers, and nothing beside them."""

import importlib
import json

import pytest

from mooncake_lab.paper import claim, claimed, claims, comparison_table, headlines, scorecard
from mooncake_lab.paper.facts import read_rows
from mooncake_lab.paper.scorecard import Headlines


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
    assert row.results == ("reproduced",)
    assert row.evidence == ("simulated",)
    assert "28 / 40 / 62 % | 29 / 39 / 66 % | reproduced |" in made.markdown()
    assert made.evidence() == "Our numbers in this table are simulated."


def test_another_record_gives_another_row(tmp_path):
    """A number that leaves its band changes verdict and text; mixed verdicts are counted."""
    row = row_of(headlines(card(tmp_path, F07=66.5, F08=39.3, F09=-5.0)), "F07")
    assert row.ours == "−5 / 39 / 66 %"
    assert row.results == ("1 not reproduced", "2 reproduced")


@pytest.mark.parametrize(("ours", "said", "why"), [(-14.0, "−14 %", False), (81.2, "+81 %", True)])
def test_a_reason_is_shown_while_its_verdict_stands(tmp_path, ours, said, why):
    """Where the direction came out, nothing is said to be reversed; a change has its sign."""
    row = row_of(headlines(card(tmp_path, A32=ours)), "A32")
    assert row.ours == said
    assert bool(row.why) == why
    assert row.result.startswith("not reproduced: " if why else "reproduced")


def test_a_bound_is_marked(tmp_path):
    """A grid that ended early gives at least so much."""
    row = row_of(headlines(card(tmp_path, A01=(650.0, "at least"))), "A01")
    assert row.ours == "≥ 650 %"


def test_the_table_in_a_notebook_has_verdict_cells(tmp_path):
    """Its HTML has a labelled cell for each verdict, in the verdict's colour, and escapes what it shows."""
    text = headlines(card(tmp_path, F07=66.5, F08=39.3, F09=28.6))._repr_html_()
    assert text.count('<td class="verdict" data-label="verdict">') == 8
    assert '<span class="verdict-reproduced">reproduced</span>' in text
    assert "tool&amp;agent" in text


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"claims": "F01;Z99"}, "'Z99', which is no claim"),
        ({"claims": "F01;F15"}, "has the units percent, ratio"),
        ({"claims": "F30"}, "has the units s"),
        ({"when": "splendid"}, "'splendid', which is no verdict"),
    ],
)
def test_a_bad_row_is_named(tmp_path, monkeypatch, change, complaint):
    """An unknown claim or verdict, and units that cannot stand together, are said with the headline."""
    first = read_rows("headlines.csv")[0]
    module = importlib.import_module("mooncake_lab.paper.scorecard")
    monkeypatch.setattr(module, "read_rows", lambda _: [first | change])
    with pytest.raises(ValueError, match=rf"headline 'capacity over vLLM.*{complaint}"):
        headlines(scorecard(tmp_path))
