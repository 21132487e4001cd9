"""The leaderboard shows scores, the teacher's and the optimum's line, and no name."""

import pytest

from mooncake_lab.course.grading.grade import ASSIGNMENTS, Grade, Mark
from mooncake_lab.course.grading.leaderboard import (
    OPTIMUM,
    TEACHER,
    board_of,
    page,
    pseudonym,
    read_pseudonyms,
)
from mooncake_lab.course.grading.tables import read_csv
from mooncake_lab.course.grading.whole_class import grades_csv

TASK = ASSIGNMENTS["eviction"].tasks[-1].name


def given(student, score, earned=2):
    """A grade of the open task."""
    return Grade(
        student=student, topic="eviction", marks=(Mark(task=TASK, points=2, earned=earned, said="", score=score),)
    )


def test_places_are_in_order_and_without_names(tmp_path):
    """A score counts whether or not it earned points; who has none is not listed."""
    grades = [given("ada", 0.25), given("<b>bob</b>", -0.5, 0), given("cleo", None, 0)]
    (tmp_path / "grades.csv").write_text(grades_csv(grades, {}), encoding="utf-8")
    names = {student: pseudonym(student, "a" * 32) for student in ("ada", "<b>bob</b>", "cleo")}
    places = board_of("eviction", read_csv(tmp_path / "grades.csv"), given(TEACHER, 0.4), names)
    assert [(place.who, place.score) for place in places] == [
        (OPTIMUM, 1.0),
        (TEACHER, 0.4),
        (names["ada"], 0.25),
        (names["<b>bob</b>"], -0.5),
    ]
    text = page({"eviction": places})
    assert not [name for name in ("ada", "bob", "cleo", "<script") if name in text]
    assert text.count("class=marked") == 2


def test_a_pseudonym_needs_the_secret():
    """The same student has another one in another class, and two students have different ones."""
    assert pseudonym("ada", "a" * 32) == pseudonym("ada", "a" * 32)
    assert len({pseudonym(who, secret * 32) for who in ("ada", "bob") for secret in "ab"}) == 4


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("ada,me\nbob,me\n", "is already that of ada"),
        (f"ada,{TEACHER}\n", "is already that of the page"),
        ("ada,\n", "is empty"),
    ],
)
def test_a_pseudonym_that_cannot_be_used_is_refused(tmp_path, rows, said):
    """Nobody can pass for another one, or for the teacher."""
    (tmp_path / "pseudonyms.csv").write_text(f"student,pseudonym\n{rows}")
    with pytest.raises(ValueError, match=said):
        read_pseudonyms(tmp_path)


def test_pseudonyms_are_escaped_and_short(tmp_path):
    """What students choose is text on the page."""
    (tmp_path / "pseudonyms.csv").write_text(f"student,pseudonym\nada,<img src=x onerror=alert(1)>{'x' * 99}\n")
    chosen = read_pseudonyms(tmp_path)["ada"]
    assert len(chosen) <= 40
    text = page({"eviction": board_of("eviction", [], given(TEACHER, 0.4), {})})
    assert "<img" not in text
    assert "&lt;img" in page({"eviction": [*board_of("eviction", [], None, {}), *map(_place, [chosen])]})


def _place(who):
    """A line of a board."""
    return board_of(
        "eviction", [{"student": "x", "assignment": "eviction", "task": TASK, "score": "0.5"}], None, {"x": who}
    )[1]
