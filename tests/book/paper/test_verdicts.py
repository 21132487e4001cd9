"""Claims, their yardsticks, and the verdicts on our numbers."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.book.paper import (
    Basis,
    Grounds,
    Verdict,
    Yardstick,
    claim,
    claimed,
    claims,
    compared,
    comparison_table,
    detail,
    fact,
    factor,
    judge,
    order,
    unless_twin,
    within,
)
from mooncake_lab.book.paper.claims import agreement

NUMBERS = st.floats(-1e9, 1e9).filter(lambda number: abs(number) > 1e-6)


@given(NUMBERS, st.floats(1.0, 10.0), st.floats(0.0, 1.0))
def test_the_papers_own_number_is_always_reproduced(paper, ratio, share):
    """Whatever the yardstick, being equal to the paper is being reproduced."""
    assert judge(paper, paper, factor(ratio)) is Verdict.REPRODUCED
    assert judge(paper, paper, within(share)) is Verdict.REPRODUCED


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (10.4, Verdict.REPRODUCED),
        (14.0, Verdict.DIRECTION_ONLY),
        (1.1, Verdict.DIRECTION_ONLY),
        (1.0, Verdict.NOT_REPRODUCED),
        (-10.0, Verdict.NOT_REPRODUCED),
    ],
)
def test_a_number_outside_the_band_may_still_have_the_direction(ours, verdict):
    """Against 10 within 5 % and the direction "above 1": the direction first, then the band."""
    assert judge(10.0, ours, within(0.05, sense="above", threshold=1.0)) is verdict


@pytest.mark.parametrize(("band", "refused"), [(0.4, False), (0.49, False), (0.5, True), (0.6, True), (1.0, True)])
def test_a_band_ends_before_there_is_no_effect(band, refused):
    """Around 2, with an effect above 1: a band that reaches 1 is refused, also where it just reaches it."""
    yardstick = within(band, sense="above", threshold=1.0)
    if refused:
        with pytest.raises(ValueError, match="where there is no effect"):
            yardstick.check_band(2.0)
    else:
        yardstick.check_band(2.0)


def test_a_factor_has_no_other_sign_and_zero_is_met_by_zero_alone():
    """No ratio leads from zero to another number, or from a number to one of the other sign."""
    assert judge(0.0, 0.0, factor(2.0)) is Verdict.REPRODUCED
    for paper, ours in ((0.0, 1e-9), (0.0, -1e-9), (2.0, -2.0), (-2.0, 2.0), (2.0, 0.0)):
        assert judge(paper, ours, factor(2.0)) is not Verdict.REPRODUCED


def test_an_order_claim_asks_only_for_the_side():
    """An order claim is reproduced on the right side of its threshold, however far from the paper."""
    assert judge(50, 99, order("above", 50)) is Verdict.REPRODUCED
    assert judge(50, 50, order("above", 50)) is Verdict.NOT_REPRODUCED
    assert judge(50, 50, order("at_least", 50)) is Verdict.REPRODUCED
    assert judge(50, 51, order("at_most", 50)) is Verdict.NOT_REPRODUCED


def test_what_cannot_be_measured_is_not_judged():
    """Production statistics are out of scope; a missing measurement needs hardware, a present one is judged."""
    assert judge(2.0, 2.0, within(0.1), reach="scope") is Verdict.OUT_OF_SCOPE
    assert judge(2.0, None, within(0.1), reach="hardware") is Verdict.NEEDS_HARDWARE
    assert judge(2.0, 3.0, within(0.1), reach="hardware") is Verdict.NOT_REPRODUCED


@pytest.mark.parametrize("identifier", ["F22", "A09"])
def test_a_twin_gives_no_verdict_on_what_it_was_made_to_have(identifier):
    """Not even the paper's own number: the row says what was missing, apart from what nobody outside can check."""
    each = claim(identifier)
    row = unless_twin(claimed(each, each.fact.value), "twin")
    assert row.verdict is Verdict.TRACE_NOT_HERE
    assert row.quantity.endswith("(twin, made to match)")
    assert unless_twin(claimed(each, each.fact.value), "released").verdict is Verdict.REPRODUCED
    assert unless_twin(claimed(claim("A14"), None), "twin").verdict is Verdict.OUT_OF_SCOPE


def test_out_of_scope_are_the_claims_that_say_so():
    """The verdict belongs to claims whose row in claims.csv has reach scope, six statements about production."""
    assert [each.id for each in claims() if each.reach == "scope"] == ["F11", "F12", "F13", "F14", "A14", "A15"]


@pytest.mark.parametrize("ours", [None, math.nan, math.inf])
def test_a_missing_number_is_an_error_where_it_can_be_measured(ours):
    """No number, or one that is not finite, is never turned into a verdict."""
    with pytest.raises(ValueError, match="number"):
        judge(2.0, ours, within(0.1))


@pytest.mark.parametrize(
    "knobs",
    [
        {"grade": "value"},
        {"grade": "factor", "band": 0.5},
        {"grade": "value", "band": math.nan},
        {"grade": "order", "band": 1.0, "sense": "above", "threshold": 0.0},
        {"grade": "order"},
        {"grade": "order", "sense": "above"},
        {"grade": "value", "band": 0.1, "sense": "above"},
        {"grade": "value", "band": 0.1, "sense": "over", "threshold": 1.0},
        {"grade": "exact", "band": 0.1},
    ],
)
def test_a_yardstick_without_meaning_is_refused(knobs):
    """Bands, senses and thresholds that do not fit the grade are errors."""
    with pytest.raises(ValueError, match=r"grade|sense"):
        Yardstick(**knobs)


def test_claims_have_different_ids_and_a_chapter():
    """Ids are unique, and each claim names the chapter that measures it."""
    everything = claims()
    assert len({each.id for each in everything}) == len(everything)
    assert all(each.chapter[:2].isdigit() and each.sentence and each.fact.place for each in everything)
    with pytest.raises(ValueError, match="F01"):
        claim("Z99")


def test_the_papers_own_number_satisfies_its_claim():
    """A claim's own value earns "reproduced", or a threshold claim is stated at its threshold."""
    for each in claims():
        if each.reach == "scope":
            assert claimed(each, None).verdict is Verdict.OUT_OF_SCOPE, each.id
        elif each.reach == "model":
            assert claimed(each, each.fact.value).verdict is Verdict.NEEDS_MODEL, each.id
        elif each.fact.value == each.yardstick.threshold:
            assert each.yardstick.grade == "order", each.id
        else:
            verdict = claimed(each, each.fact.value, requests=each.least_requests).verdict
            assert verdict is agreement(each.grounds), each.id


@given(NUMBERS, NUMBERS, st.floats(1.0, 10.0), NUMBERS)
def test_the_direction_is_tested_before_the_band(paper, ours, ratio, threshold):
    """A number on the wrong side is not reproduced, however near the paper's and however wide the band."""
    if ours <= threshold:
        yardstick = factor(ratio, sense="above", threshold=threshold)
        assert judge(paper, ours, yardstick) is Verdict.NOT_REPRODUCED


def test_a_band_that_reaches_no_effect_is_refused():
    """Neither a claim nor a row of a table may have one: 1.317 within 1.5 contains 1."""
    yardstick = factor(1.5, sense="above", threshold=1.0)
    with pytest.raises(ValueError, match=r"0\.878 to 1\.9755 around 1\.317 contains 1,"):
        dataclasses.replace(claim("F49"), yardstick=yardstick)
    with pytest.raises(ValueError, match="contains 1,"):
        compared("a ratio", claim("F49").fact, 1.3, yardstick, evidence="simulated")


@pytest.mark.parametrize(
    ("basis", "condition", "verdict"),
    [
        (Basis.PREDICTED, "", Verdict.REPRODUCED),
        (Basis.PREDICTED, "a router of our choice", Verdict.CONDITIONAL),
        (Basis.BY_CONSTRUCTION, "", Verdict.BY_CONSTRUCTION),
        (Basis.CALIBRATED, "", Verdict.CALIBRATED),
        (Basis.ARITHMETIC, "", Verdict.ARITHMETIC),
    ],
)
def test_only_what_predicts_without_a_condition_is_reproduced(basis, condition, verdict):
    """Agreement of any other number has another name; a miss has the same name whatever it rests on."""
    yardstick = factor(1.5, sense="above", threshold=1.0)
    agrees = agreement(Grounds(basis=basis, condition=condition))
    assert judge(2.0, 2.1, yardstick, agrees=agrees) is verdict
    assert judge(2.0, 5.0, yardstick, agrees=agrees) is Verdict.DIRECTION_ONLY
    assert judge(2.0, 0.5, yardstick, agrees=agrees) is Verdict.NOT_REPRODUCED


def test_a_paper_that_disagrees_with_itself_is_said_to():
    """Beside a printed 86 whose own bars give 88.4: a number near the bars is no miss of ours, others are."""
    each = claim("F42")
    assert each.elsewhere == 88.4
    assert claimed(each, 86.1).verdict is Verdict.CALIBRATED
    assert claimed(each, 88.2).verdict is Verdict.CONTRADICTS
    assert claimed(each, 80.0).verdict is Verdict.DIRECTION_ONLY


def test_a_lower_bound_is_neither_reproduced_nor_missed():
    """Where the grid ended, the verdict waits, unless the bound already lies beyond the band or has no effect."""
    yardstick = factor(1.5, sense="above", threshold=0.0)

    def bounded(ours):
        return judge(525.0, ours, yardstick, bound="at least")

    assert bounded(100.0) is bounded(525.0) is bounded(787.5) is Verdict.AT_LEAST
    assert bounded(800.0) is Verdict.DIRECTION_ONLY
    assert bounded(0.0) is Verdict.NOT_REPRODUCED


@pytest.mark.parametrize(
    "yardstick",
    [factor(1.5, sense="below", threshold=1), within(0.2, sense="at_most", threshold=1), order("below", 1)],
)
def test_a_lower_bound_is_below_nothing(yardstick):
    """A lower bound under a threshold does not show that the number is under it; one above refutes the claim."""

    def bounded(ours):
        return judge(0.5, ours, yardstick, bound="at least")

    assert bounded(0.5) is bounded(0.9) is bounded(0.1) is Verdict.AT_LEAST
    assert bounded(1.1) is Verdict.NOT_REPRODUCED
    assert judge(0.5, 0.5, yardstick) is Verdict.REPRODUCED


def test_a_claim_is_decided_once():
    """A second row about a claim is a detail, or the table is refused."""
    once = claimed(claim("F27"), 3e6)
    with pytest.raises(ValueError, match="two rows decide the claim 'F27'"):
        comparison_table([once, once])
    table = comparison_table([once, detail(once, "with another node")]).frame()
    assert list(table["decides"]) == [True, False]
    assert table["quantity"][1].endswith("(with another node)")


def test_a_run_below_its_least_length_judges_nothing():
    """One request fewer than a claim needs, and even the paper's own number gets no verdict."""
    for each in claims():
        if least := each.least_requests:
            assert claimed(each, each.fact.value, requests=least - 1).verdict is Verdict.TOO_SHORT, each.id
            assert claimed(each, each.fact.value, requests=least).verdict is not Verdict.TOO_SHORT, each.id


def test_the_length_of_a_run_cannot_be_forgotten():
    """A claim that hangs on it asks for it; others do not care."""
    with pytest.raises(ValueError, match="'F01' is judged on runs of at least"):
        claimed(claim("F01"), 498.0)
    assert claimed(claim("F28"), 320.0).verdict is claimed(claim("F28"), 320.0, requests=1).verdict


def test_the_table_shows_number_place_band_evidence_and_verdict():
    """A comparison table is data and HTML; each cell names its column, so that a narrow screen can stack rows."""
    mean = fact("fast_table2_workloads", series="Conversation", x="avg_input_tokens")
    table = comparison_table(
        [
            compared("mean <input>", mean, mean.value * 1.001, within(0.01), evidence="measured"),
            compared(
                "twice", mean, mean.value * 2, within(0.01, sense="above", threshold=0.0), evidence="simulated"
            ),
            claimed(claim("F34"), None),
        ]
    )
    assert list(table.frame()["verdict"]) == ["reproduced", "direction only", "needs hardware"]
    html = table._repr_html_()
    for text in ("verdict-reproduced", "verdict-direction", "verdict-out", "mean &lt;input&gt;", "Table 2"):
        assert text in html
    for column in ("quantity", "paper", "ours", "band", "evidence", "verdict"):
        assert html.count(f'data-label="{column}"') == 3
    assert list(table.frame()["band"]) == [
        "11,915 to 12,155 tokens",
        "11,915 to 12,155 tokens",
        "78.3 to 95.7 GB/s",
    ]
    assert "mean <input>" in str(table)
