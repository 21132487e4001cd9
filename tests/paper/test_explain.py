"""Numbers and yardsticks in words say what is judged."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.paper import claimed, claims, factor, judge, order, within
from mooncake_lab.paper.comparison import band_text, marked_if_twin, number_text
from mooncake_lab.paper.explain import why, yardstick_in_words
from mooncake_lab.paper.scorecard import Scored

JUDGED = [each for each in claims() if each.reach == "here"]


@given(st.floats(-1e12, 1e12) | st.integers(-(10**9), 10**9))
def test_a_number_is_read_back_to_four_digits(value):
    """Whole numbers below ten million are written in full, and none has more digits than an integer or four."""
    text = number_text(value, "")
    read = float(text.replace(",", "").replace("−", "-"))
    assert read == pytest.approx(value, rel=5.1e-4)
    assert ("e" in text) == (abs(value) >= 1e7 or 0 < abs(value) < 1e-4)
    if "e" not in text and (abs(value) >= 1000 or value == int(value)):
        assert read == round(value)
    assert number_text(value, "percent") == f"{text} %"


@pytest.mark.parametrize("each", claims(), ids=lambda each: each.id)
def test_the_words_name_what_the_yardstick_tests(each):
    """The side of the direction, where there is one, then both ends of the band, and how wide it is."""
    yardstick, unit = each.yardstick, each.fact.unit
    words, band = yardstick_in_words(yardstick, each), band_text(yardstick, each.fact)
    side = None if yardstick.threshold is None else number_text(yardstick.threshold, unit)
    if yardstick.grade == "order":
        assert words.startswith("the direction only: ")
        assert words.endswith(f" {side}")
        assert band.split(maxsplit=1)[1] == side
        return
    low, high = yardstick.limits(each.fact.value)
    assert band == (
        f"exactly {number_text(low, unit)}"
        if low == high
        else f"{number_text(low, '')} to {number_text(high, unit)}"
    )
    assert band in words
    assert words.startswith("first the direction: ") == (side is not None)
    assert side is None or f" {side}; then the band: " in words
    wide = (
        f"a factor of {yardstick.band:g}" if yardstick.grade == "factor" else f"{yardstick.band * 100:g} % of it"
    )
    assert words.endswith(f"up to {wide}")


@given(st.sampled_from(JUDGED), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 1.001, 2.0, 100.0]))
def test_the_reason_of_a_verdict_shows_the_numbers_that_lead_to_it(each, times):
    """Ours always, and the limit of the direction or the band, whichever it failed or kept."""
    ours, unit = each.fact.value * times, each.fact.unit
    verdict = claimed(each, ours, requests=10**9).verdict.value
    text = why(Scored(claim=each, verdict=verdict, ours=ours))
    assert text.startswith(number_text(ours, unit))
    if each.yardstick.has_direction(ours):
        assert band_text(each.yardstick, each.fact) in text
    else:
        assert text.endswith(f" {number_text(each.yardstick.threshold, unit)}.")


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
    return judge(paper, ours, yardstick, evidence="simulated").value


def test_a_row_from_a_twin_says_so():
    """Others are unchanged."""
    row = claimed(JUDGED[0], JUDGED[0].fact.value, requests=10**9)
    assert marked_if_twin(row, twin=False) == row
    assert marked_if_twin(row, twin=True).quantity == f"{row.quantity} (on the twin)"
