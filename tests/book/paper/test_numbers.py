"""Numbers as text, limits of yardsticks, and rows from twins."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_lab.book.paper import claimed, claims, comparison_table, factor, judge, order, within
from mooncake_lab.book.paper.comparison import condition_html, judged_cells, marked_if_twin, number_text

JUDGED = [each for each in claims() if each.reach == "here"]


@given(st.floats(-1e12, 1e12) | st.integers(-(10**9), 10**9))
@example(1e7)
@example(1e7 - 1)
@example(-1e7)
def test_a_number_is_read_back_to_four_digits(value):
    """Whole numbers below ten million are written in full, and none has more digits than an integer or four."""
    text = number_text(value, "")
    read = float(text.replace(",", "").replace("−", "-"))
    assert read == pytest.approx(value, rel=5.1e-4)
    assert ("e" in text) == (abs(value) >= 1e7 or 0 < abs(value) < 1e-4)
    if "e" not in text and (abs(value) >= 1000 or value == int(value)):
        assert read == round(value)
    assert number_text(value, "percent") == f"{text} %"


@given(st.floats(1e-6, 1e6), st.floats(1.01, 10.0), st.floats(0.01, 0.9))
def test_the_limits_are_the_last_numbers_that_agree(paper, ratio, share):
    """A factor divides and multiplies, a share goes up and down by it, an order is open to one side."""
    assert factor(ratio).limits(paper) == (paper / ratio, paper * ratio)
    assert within(share).limits(paper) == pytest.approx((paper * (1 - share), paper * (1 + share)))
    assert within(share).limits(-paper) == pytest.approx((-paper * (1 + share), -paper * (1 - share)))
    for sense, limits in (("above", (ratio, math.inf)), ("at_most", (-math.inf, ratio))):
        assert order(sense, ratio).limits(paper) == limits
    for yardstick in (factor(ratio), within(share)):
        low, high = yardstick.limits(paper)
        verdicts = [judged(paper, ours, yardstick) for ours in (low, high, low * (1 - 1e-9), high * (1 + 1e-9))]
        assert verdicts == ["reproduced", "reproduced", "not reproduced", "not reproduced"]


def judged(paper, ours, yardstick):
    return judge(paper, ours, yardstick).value


def test_a_row_from_a_twin_says_so():
    """Others are unchanged."""
    row = claimed(JUDGED[0], JUDGED[0].fact.value, requests=10**9)
    assert marked_if_twin(row, twin=False) == row
    assert marked_if_twin(row, twin=True).quantity == f"{row.quantity} (on the twin)"


def test_a_lower_bound_is_printed_as_one():
    """Only a number that the experiment's grid cut off has the sign; a number that is not there is a dash."""
    about = JUDGED[0]

    def shown(ours, **bound):
        return judged_cells(ours, about.fact, about.yardstick, "measured", "reproduced", **bound)[0].html

    text = number_text(2.5, about.fact.unit)
    assert (shown(2.5), shown(2.5, bound="exact"), shown(2.5, bound="at least")) == (text, text, f"≥ {text}")
    assert shown(None, bound="at least") == "–"


def test_a_condition_stands_on_a_line_of_its_own():
    """It is escaped, and no condition is no line."""
    assert condition_html("") == ""
    assert condition_html("a < b").startswith("<br>")
    assert "condition: a &lt; b<" in condition_html("a < b")


def test_a_table_in_letters_begins_with_the_quantities():
    """Its rows have no numbers of their own before them."""
    table = comparison_table([claimed(each, each.fact.value, requests=10**9) for each in JUDGED[:2]])
    head, *rows = str(table).splitlines()
    assert head.split()[0] == "quantity"
    assert [row.strip().startswith(each.sentence[:20]) for row, each in zip(rows, JUDGED, strict=False)] == [
        True
    ] * 2
