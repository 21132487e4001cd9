"""What counts besides the grader's points: lateness with extensions, adjustments with reasons, regrades."""

import pytest

from mooncake_lab.course.grading.final_points import Gradebook, LateRule, open_book
from mooncake_lab.course.grading.grade import Grade, Mark
from mooncake_lab.course.grading.inbox import UNKNOWN_DAYS
from mooncake_lab.course.grading.regrade import Regrade, ask_again, read_regrades
from mooncake_lab.course.grading.tables import as_read, as_text
from mooncake_lab.course.grading.whole_class import feedback_html, totals_csv


def given(student="ada", topic="keys", earned=8):
    """A grade of ten points."""
    marks = (Mark(task="a", points=8, earned=earned, said=""), Mark(task="b", points=2, earned=0, said=""))
    return Grade(student=student, topic=topic, marks=marks)


def book(tmp_path, rule="10%/day", **tables):
    """The book of a folder with these tables."""
    for name, text in tables.items():
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
    return open_book(tmp_path, tmp_path, LateRule.parse(rule))


@pytest.mark.parametrize(
    ("days", "extension", "points"),
    [
        ("", 0, 8),
        ("1", 0, 7),
        ("3", 0, 5),
        ("3", 2, 7),
        ("3", 9, 8),
        ("12", 0, 0),
        (UNKNOWN_DAYS, 0, 7),
        ("", 3, 8),
    ],
)
def test_each_late_day_takes_a_share_of_all_points(tmp_path, days, extension, points):
    """After the extension, a tenth of ten points for each day, and never below zero or above what was earned."""
    found = book(
        tmp_path,
        collected=f"student,assignment,days_late\nada,keys,{days}\n",
        extensions=f"student,assignment,days\nada,*,{extension}\n",
    ).final(given())
    assert found.points == points
    assert found.guessed == (days == UNKNOWN_DAYS)
    assert bool(found.told) == (points != 8)


@pytest.mark.parametrize(
    "text", ["", "10", "10%", "10/day", "-5%/day", "0%/day", "101%/day", "nan%/day", "1e1%/day"]
)
def test_a_late_rule_that_is_none_is_refused(text):
    """The sentence says how a rule is written."""
    with pytest.raises(ValueError, match=r"allowed are 0\.1%/day to 100%/day"):
        LateRule.parse(text)


def test_adjustments_are_added_and_shown(tmp_path):
    """Several of them, also of half points, and for a student whose work was not a notebook."""
    rows = "ada,keys,-1.5,late by mail\nada,keys,3,good argument\nbob,keys,7,on paper\n"
    found = book(tmp_path, adjust=f"student,assignment,points,why\n{rows}")
    assert totals_csv([given()], {"bob": "no notebook"}, found) == "student,keys,total\nada,9.5,9.5\nbob,7,7\n"
    page = feedback_html(given(), found.final(given()))
    assert "9.5 points count" in page
    assert "-1.5 points: late by mail" in page
    assert "+3 points: good argument" in page


def test_without_tables_the_graders_points_count(tmp_path):
    """Nothing is taken off, nothing is said."""
    assert open_book(tmp_path, tmp_path).final(given()).points == 8
    assert "points count" not in feedback_html(given(), Gradebook().final(given()))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("ada,keys,x,why", "points is 'x'; allowed are numbers from -1000 to 1000"),
        ("ada,keys,nan,why", "points is 'nan'"),
        ("ada,keys,inf,why", "points is 'inf'"),
        ("ada,keys,,why", "points is ''"),
        ("ada,keys,1,", "without a reason"),
        ("ada,nothing,1,why", "there is no assignment 'nothing'; allowed are keys"),
        ("ada,keys,1,late, but ill", "row 2 has 5 cells; allowed are 4"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_before_grading(tmp_path, row, said):
    """The sentence names the table and the row."""
    with pytest.raises(ValueError, match=r"adjust\.csv, row 2") as caught:
        book(tmp_path, adjust=f"student,assignment,points,why\n{row}\n")
    assert said in str(caught.value)


def test_a_row_about_nobody_is_named(tmp_path):
    """A name that was mistyped gives its points to nobody silently otherwise."""
    found = book(tmp_path, adjust="student,assignment,points,why\nadda,keys,1,why\n")
    assert found.about_nobody(["ada"]) == ["adjust.csv, row 2: there is no student 'adda'"]


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1", "-rf", "@x", "'quoted'", "O'Neil", " =x", "%s"])
def test_names_survive_the_apostrophe_against_formulas(name):
    """What a table writes of a name, a table reads as the same name."""
    written = as_text(name)
    assert not str(written).lstrip().startswith(("=", "+", "-", "@", "|", "%"))
    assert as_read(str(written)) == name.strip()


def test_a_regrade_keeps_its_reason_and_the_points_before(tmp_path):
    """The page is gone, so that the next run grades again, and the new page says why."""
    page = tmp_path / "keys.html"
    page.write_text("old")
    one = Regrade(day="2026-11-28", student="ada", assignment="keys", points_before="", why="=busy, machine")
    ask_again(tmp_path, page, {("ada", "keys"): 4}, one)
    (found,) = read_regrades(tmp_path)
    assert (found.points_before, found.why) == ("4", "=busy, machine")
    assert not page.exists()
    assert "graded again on 2026-11-28: =busy, machine; 4 points before, 8 now" in feedback_html(
        given(), None, [found]
    )


@pytest.mark.parametrize(
    ("student", "why", "said"), [("bob", "x", "graded are ada"), ("ada", " ", "may not be empty")]
)
def test_a_regrade_of_nobody_or_without_a_reason_is_refused(tmp_path, student, why, said):
    """Nothing is removed then."""
    page = tmp_path / "keys.html"
    page.write_text("old")
    one = Regrade(day="2026-11-28", student=student, assignment="keys", points_before="", why=why)
    with pytest.raises(ValueError, match=said):
        ask_again(tmp_path, page, {("ada", "keys"): 4}, one)
    assert page.exists()
    assert not read_regrades(tmp_path)
