"""Curves, facts and constants can be found, and say what exists when they cannot."""

import re
from pathlib import Path

import pytest

from mooncake_lab.book.paper import (
    Fact,
    assumption,
    assumptions,
    claims,
    constant,
    curve,
    data_dir,
    fact,
    index,
    scope,
)
from mooncake_lab.book.paper.facts import read_rows
from mooncake_lab.book.paper.pages import PAGES, with_tables


def test_every_file_of_numbers_is_indexed_and_every_entry_has_its_file():
    """The index and the folder of curves name the same tables."""
    assert sorted(index().index) == sorted(path.stem for path in (data_dir() / "curves").glob("*.csv"))


def test_a_curve_is_numbers_with_a_source_and_a_place():
    """Every curve has points, each once and with a source, and an entry that says what they are and where."""
    for name, entry in index().iterrows():
        table = curve(name)
        assert {"series", "x", "y", "source"} <= set(table.columns), name
        assert len(table) > 0, name
        assert table.notna().all(axis=None), name
        assert set(table["source"]) <= {"printed", "read", "derived"}, name
        assert not table.duplicated(["series", "x", "y"]).any(), name
        assert (entry[["edition", "place", "title", "x_label", "y_label", "y_unit"]] != "").all(), name
        assert ("unit" in table.columns) == (entry["y_unit"] == "one unit a row"), name


def test_a_fact_carries_unit_and_place():
    """A fact is the number of the table with the unit of its row and the place of its table."""
    found = fact("fast_table2_workloads", series="Conversation", x="avg_input_tokens")
    row = curve("fast_table2_workloads").set_index(["series", "x"]).loc[("Conversation", "avg_input_tokens")]
    assert found == Fact(
        value=row["y"],
        unit="tokens",
        edition="FAST'25",
        place=index().loc["fast_table2_workloads", "place"],
        source="printed",
        note=index().loc["fast_table2_workloads", "notes"],
    )
    assert float(found) == found.value
    assert found.cited.startswith("FAST'25 Table 2")


def test_points_are_found_by_number_and_by_text():
    """An x can be given as it is written or as the number it means, infinity included."""
    by_text = fact("arxiv_table1_cache_policies", series="LRUCache", x="inf")
    assert by_text == fact("arxiv_table1_cache_policies", series="LRUCache", x=float("inf"))


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        ({"name": "fast_fig99"}, "fast_fig09_hit_rate_vs_capacity"),
        ({"name": "fast_table2_workloads"}, "'Tool&Agent'"),
        ({"name": "fast_table2_workloads", "series": "Chat"}, "'Conversation'"),
        ({"name": "fast_table2_workloads", "series": "Conversation", "x": "mean"}, "avg_input_tokens"),
        ({"name": "fast_table2_workloads", "series": "Conversation"}, "has 4 points"),
    ],
)
def test_a_wrong_question_is_answered_with_what_there_is(arguments, listed):
    """An unknown curve, series or point raises an error that lists those there are."""
    with pytest.raises(ValueError, match=listed):
        fact(**arguments)


def test_constants_are_facts_too():
    """A constant is found by name, an unknown one is answered with the list."""
    assert constant("l_layers").place == "Table 1"
    with pytest.raises(ValueError, match="kv_bytes_per_token"):
        constant("layers")


def test_every_constant_says_where_it_comes_from():
    """Each constant has a place and a source; what is assumed or derived says how."""
    for name in (row["name"] for row in read_rows("constants.csv")):
        found = constant(name)
        assert found.place, name
        assert found.source == "printed" or found.note or name.startswith("schedule_time"), name


def test_a_torn_row_names_its_line(tmp_path, monkeypatch):
    """A row with a field too few is an error with file and line."""
    (tmp_path / "torn.csv").write_text("a,b\n1,2\n3\n", encoding="utf-8")
    monkeypatch.setattr("mooncake_lab.book.paper.facts.data_dir", lambda: tmp_path)
    with pytest.raises(ValueError, match=r"torn\.csv:3: 1 fields"):
        read_rows("torn.csv")


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_show_the_tables_of_the_data(name):
    """The committed page equals the page made anew; if not, run `python -m mooncake_lab.book.paper.pages book`."""
    page = (ROOT / "book" / name).read_text(encoding="utf-8")
    assert with_tables(page) == page


@pytest.mark.parametrize("page", ["prose only", "% table: FAST'26\n% end of table"])
def test_a_page_without_its_table_is_an_error(page):
    """A page without a mark, or with a mark of no table, is refused."""
    with pytest.raises(ValueError, match="table"):
        with_tables(page)


PAPERS = ("FAST'25", "arXiv v3", "SARATHI", "Sarathi-Serve")


def numbered(edition):
    """The figures and tables that the scope lists of an edition: kind and number."""
    return {
        (item.item.split()[0].rstrip("s"), int(number))
        for item in scope()
        if item.edition == edition and item.item.startswith(("Figure", "Table"))
        for number in re.findall(r"\d+", item.item)
    }


@pytest.mark.parametrize("edition", PAPERS)
def test_no_figure_and_no_table_is_left_out(edition):
    """From the first to the last that is listed, every figure and every table of a paper is there."""
    found = numbered(edition)
    for kind in ("Figure", "Table"):
        numbers = sorted(number for each, number in found if each == kind)
        assert numbers == list(range(1, len(numbers) + 1))
        assert numbers


@pytest.mark.parametrize("edition", PAPERS)
def test_every_figure_read_off_is_in_the_scope(edition):
    """Each figure or table that a curve of an edition, or of its artifact, comes from is listed in the scope."""
    places = index().query("edition in [@edition, @edition + ' artifact']")["place"]
    read = {
        (kind, int(number))
        for place in places
        for kind, numbers in re.findall(r"(Figure|Table)s? (\d+[ab]?(?:, \d+[ab]?)*)", place)
        for number in re.findall(r"\d+", numbers)
    }
    assert read
    assert read <= numbered(edition)


def test_every_paper_with_a_claim_is_in_the_scope():
    """An edition of a claim has its own table of scope, or a row among the companions."""
    companions = {item.item.split()[0] for item in scope() if item.edition == "Companions"}
    claiming = {claim.fact.edition.removesuffix(" artifact") for claim in claims()}
    assert claiming == {*PAPERS, *companions}


def test_what_is_redrawn_has_its_notebook():
    """A chapter that the scope calls redrawn is there."""
    for item in scope():
        if item.status == "redrawn":
            assert (ROOT / "notebooks" / f"{item.chapter}.ipynb").is_file(), item


def test_what_is_not_in_the_book_says_why():
    """Items without a chapter carry a reason, and appear once."""
    items = scope()
    assert len({(item.edition, item.item) for item in items}) == len(items)
    assert all(item.remark for item in items if not item.chapter)


def test_claims_belong_to_chapters_of_the_scope():
    """Every claim is measured in a chapter that the scope knows."""
    assert {claim.chapter for claim in claims()} <= {item.chapter for item in scope()}


def test_assumptions_are_complete():
    """Ids are unique, each assumption says what is missing, what is assumed, how much it matters, and where."""
    everything = assumptions()
    assert len({each.id for each in everything}) == len(everything)
    for each in everything:
        assert each.missing, each
        assert each.assumption, each
        assert each.sensitivity, each
        assert each.chapter, each
        assert (each.value is None) == (each.unit == ""), each
    with pytest.raises(ValueError, match="B01 "):
        assumption("B99")


def test_the_assumed_peak_rate_is_the_one_in_use():
    """The H800 rate of the assumptions is the constant behind the worked values of Eq. 2."""
    (assumed,) = (each for each in assumptions() if "H800" in each.topic)
    assert assumed.value == constant("G_h800_node").value
