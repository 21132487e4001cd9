"""Scope and assumptions: complete, consistent, and equal to what the book's pages say."""

import re
from pathlib import Path

import pytest

from mooncake_lab.paper import assumption, assumptions, claims, constant, index, scope
from mooncake_lab.paper.pages import PAGES, main, refreshed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_show_the_tables_of_the_data(name):
    """The committed page equals the page made anew; if not, run `python -m mooncake_lab.paper.pages book`."""
    page = (ROOT / "book" / name).read_text(encoding="utf-8")
    assert refreshed(page) == page


def test_refreshing_twice_changes_nothing_more(tmp_path):
    """Making the tables anew is idempotent and keeps the prose."""
    for name in PAGES:
        (tmp_path / name).write_text((ROOT / "book" / name).read_text(encoding="utf-8"), encoding="utf-8")
    main(tmp_path)
    main(tmp_path)
    for name in PAGES:
        assert (tmp_path / name).read_text(encoding="utf-8") == (ROOT / "book" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["prose only", "% table: FAST'26\n% end of table"])
def test_a_page_without_its_table_is_an_error(page):
    """A page without a mark, or with a mark of no table, is refused."""
    with pytest.raises(ValueError, match="table"):
        refreshed(page)


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
