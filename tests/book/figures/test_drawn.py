"""A figure's data, read back from what it draws."""

import csv
import io

import matplotlib as mpl
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.book.figures.drawn import DATA_TYPE, as_csv, drawn, in_words
from mooncake_lab.book.figures.style import COLOURS, new_figure, paper_points, slo_line, styled

NUMBERS = st.lists(st.floats(-1e6, 1e6, allow_nan=False, width=32), min_size=1, max_size=20)


@styled
def empty(panels=1):
    return new_figure(1, panels)


@settings(max_examples=20, deadline=None)
@given(NUMBERS)
def test_a_line_comes_back_as_its_points(values):
    """Every point of a line and of a scatter plot, with the label of its series."""
    figure, (left, right) = empty(2)
    left.plot(range(len(values)), values, label="ours", color=COLOURS["mooncake"])
    right.scatter(range(len(values)), values, label="theirs")
    rows = drawn(figure)
    for panel, series in ((1, "ours"), (2, "theirs")):
        found = [(row["x"], row["y"]) for row in rows if (row["panel"], row["series"]) == (panel, series)]
        assert found == list(enumerate(values))
    assert rows[0]["colour"] == COLOURS["mooncake"].lower()


@settings(max_examples=20, deadline=None)
@given(NUMBERS)
def test_bars_come_back_with_the_words_below_them(values):
    """From where to where each bar reaches, what it is called, and at which word it stands."""
    figure, (axes,) = empty()
    axes.bar(np.arange(len(values)) - 0.2, values, width=0.3, label="a\nlong label")
    axes.set_xticks(range(len(values)), [f"system {i}" for i in range(len(values))])
    rows = drawn(figure)
    assert [row["y_end"] for row in rows] == values
    assert [row["at"] for row in rows] == [f"system {i}" for i in range(len(values))]
    assert {row["series"] for row in rows} == {"a long label"}


def test_all_that_the_book_draws_comes_back():
    """Steps, segments, areas, horizontal bars and the paper's diamonds; neither limits nor what is hidden."""
    figure, (one, two, three) = empty(3)
    one.stairs([1.0, 2.0], [0.0, 5.0, 9.0])
    two.hlines([1.0, 2.0], [0.0, 1.0], [3.0, 4.0])
    two.barh([0.0], [7.0], height=0.5)
    three.fill_between([0.0, 1.0], [1.0, 1.0], [2.0, 2.0])
    paper_points(three, [0.5], [1.5])
    slo_line(three, 1.2, "limit")
    slo_line(three, 0.3, "limit", vertical=True)
    (hidden,) = three.plot([9], [9])
    hidden.set_visible(False)
    rows = drawn(figure)
    assert [(row["x"], row["x_end"], row["y"]) for row in rows if row["kind"] == "step"] == [(0, 5, 1), (5, 9, 2)]
    assert [(row["x"], row["x_end"]) for row in rows if row["kind"] == "segment"] == [(0, 3), (1, 4)]
    assert [(row["x"], row["x_end"]) for row in rows if row["kind"] == "bar"] == [(0, 7)]
    assert {(row["x"], row["y"]) for row in rows if row["kind"] == "edge"} >= {(0, 1), (1, 1), (0, 2), (1, 2)}
    assert [(row["x"], row["y"], row["series"]) for row in rows if row["kind"] == "point"] == [(0.5, 1.5, "paper")]


def test_a_notebook_holds_picture_and_data():
    """What Jupyter is given: the SVG, and the same as a table whose columns all say something."""
    figure, (axes,) = empty()
    axes.plot([1, 2], [3.0, 4.5], label="ours")
    axes.set(xlabel="requests (count)", ylabel="time (s)")
    bundle = figure._repr_mimebundle_()
    assert bundle["image/svg+xml"].startswith("<?xml")
    rows = list(csv.DictReader(io.StringIO(bundle[DATA_TYPE])))
    assert rows[1] == {
        "panel": "1", "x_axis": "requests (count)", "y_axis": "time (s)", "kind": "point", "series": "ours",
        "colour": mpl.colors.to_hex("C0"), "x": "2", "y": "4.5",
    }  # fmt: skip
    assert as_csv(figure) == bundle[DATA_TYPE]


def test_errors_boxes_and_gaps():
    """Error bars have their series' label, boxes their span; what is not a number is not there."""
    figure, (one, two, three) = empty(3)
    one.errorbar([1, 2], [3, 4], yerr=[0.5, 0.5], label="method", capsize=2)
    stats = {"med": 2, "q1": 1, "q3": 3, "whislo": 0, "whishi": 5}
    two.bxp([stats], positions=[1], patch_artist=True, showfliers=False, manage_ticks=False)
    two.set_xticks([1, 2], ["first", "second"])
    three.scatter([1, 2, np.nan], [1, np.nan, 3], c=["red", "green", "blue"])
    rows = drawn(figure)
    assert {row["series"] for row in rows if row["panel"] == 1} == {"method"}
    assert [(row["y"], row["y_end"], row["at"]) for row in rows if row["kind"] == "box"] == [(1, 3, "first")]
    assert [(row["x"], row["y"]) for row in rows if row["panel"] == 3] == [(1, 1)]
    assert as_csv(empty()[0]) == ""
    assert set(empty()[0]._repr_mimebundle_()) == {"image/svg+xml"}


def test_a_word_belongs_to_its_tick():
    """Between narrow ticks a point has the nearer word, beyond them none."""
    figure, (axes,) = empty()
    axes.plot([0.25, 0.5, 1.0], [0, 0, 0])
    axes.set_xticks([0.25, 0.5], ["a quarter", "a half"])
    assert [row["at"] for row in drawn(figure)] == ["a quarter", "a half", ""]


def test_the_description_says_how_far_each_series_reaches():
    """Whoever does not see the figure is told its panels, axes and series, from what is drawn."""
    figure, (left, right) = empty(2)
    left.plot([1, 2, 3], [3.0, 4.5, 1.0], label="Mooncake")
    left.set(xlabel="nodes (count)", ylabel="TTFT (s)", title="busy")
    right.barh([0.0, 1.0], [7.0, 2.5], label="vLLM")
    right.set(xlabel="wait (s)")
    assert in_words(figure) == (
        "Panel 1, busy: TTFT (s) over nodes (count). Mooncake: x from 1 to 3, y from 1 to 4.5. "
        "Panel 2: wait (s). vLLM: x from 0 to 7, y from -0.4 to 1.4."
    )
    assert f"<desc>{in_words(figure)}</desc>" in figure._repr_svg_()
