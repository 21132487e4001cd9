"""Curves, facts and constants can be found, and say what exists when they cannot."""

import pytest

from mooncake_lab.paper import Fact, constant, curve, data_dir, fact, index
from mooncake_lab.paper.facts import read_rows

NAMES = list(index().index)


def test_every_file_of_numbers_is_indexed_and_every_entry_has_its_file():
    """The index and the folder of curves name the same tables."""
    assert sorted(NAMES) == sorted(path.stem for path in (data_dir() / "curves").glob("*.csv"))


@pytest.mark.parametrize("name", NAMES)
def test_a_curve_is_numbers_with_a_source(name):
    """Every curve has series, x, y and source, no empty cell, and only the three sources a paper can have."""
    table = curve(name)
    assert {"series", "x", "y", "source"} <= set(table.columns)
    assert len(table) > 0
    assert table.notna().all(axis=None)
    assert set(table["source"]) <= {"printed", "read", "derived"}
    assert not table.duplicated(["series", "x", "y"]).any()


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_says_where_its_numbers_stand(name):
    """Edition, place, title and axes are filled in; a table with a unit a row has a column for it."""
    entry = index().loc[name]
    assert (entry[["edition", "place", "title", "x_label", "y_label", "y_unit"]] != "").all()
    assert ("unit" in curve(name).columns) == (entry["y_unit"] == "one unit a row")


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


@pytest.mark.parametrize("row", read_rows("constants.csv"), ids=lambda row: row["name"])
def test_every_constant_says_where_it_comes_from(row):
    """Each constant has a place and a source; what is assumed or derived says how."""
    found = constant(row["name"])
    assert found.place
    assert found.source == "printed" or found.note or row["name"].startswith("schedule_time")


def test_a_torn_row_names_its_line(tmp_path, monkeypatch):
    """A row with a field too few is an error with file and line."""
    (tmp_path / "torn.csv").write_text("a,b\n1,2\n3\n", encoding="utf-8")
    monkeypatch.setattr("mooncake_lab.paper.facts.data_dir", lambda: tmp_path)
    with pytest.raises(ValueError, match=r"torn\.csv:3: 1 fields"):
        read_rows("torn.csv")
