"""A yardstick and a verdict in words say what is judged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.book.paper import claimed, claims
from mooncake_lab.book.paper.comparison import band_text, number_text
from mooncake_lab.book.paper.scorecard import Scored
from mooncake_lab.cli.verdicts import why, yardstick_in_words

JUDGED = [each for each in claims() if each.reach == "here"]


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
