"""What each claim rests on: one row for each, and nothing that does not exist."""

import importlib

import pytest

from mooncake_lab.book.paper import RULES, Basis, Grounds, Verdict, assumptions, claim, claimed, claims, grounds
from mooncake_lab.book.paper.claims import agreement
from mooncake_lab.book.paper.evidence import Tried, alternatives, flips, sensitivity, unshown
from mooncake_lab.book.paper.facts import read_rows


def rows_of(monkeypatch, changed):
    """Let evidence.csv have other rows."""
    module = importlib.import_module("mooncake_lab.book.paper.evidence")
    monkeypatch.setattr(module, "read_rows", lambda name: changed if name == "evidence.csv" else read_rows(name))


def test_every_claim_has_grounds_of_assumptions_that_exist():
    """The rows are those of the claims, and name assumptions of the list, none twice."""
    known = {each.id for each in assumptions()}
    assert set(grounds()) == {each.id for each in claims()}
    for name, each in grounds().items():
        assert set(each.assumptions) <= known, name
        assert len(set(each.assumptions)) == len(each.assumptions), name


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"id": "Z99"}, "claim 'Z99' of evidence.csv is not in claims.csv"),
        ({"assumptions": "B06;B99"}, "claim 'F01' of evidence.csv rests on 'B99'"),
        ({"basis": "guessed"}, "claim 'F01' of evidence.csv: Invalid enum value 'guessed'"),
        ({"basis": "calibrated", "condition": "B06"}, "claim 'F01' .*only what is predicted has one"),
    ],
)
def test_a_bad_row_is_named(monkeypatch, row, complaint):
    """An unknown claim, assumption or basis, and a condition of what predicts nothing, are said with the claim."""
    first, *others = read_rows("evidence.csv")
    assert first["id"] == "F01"
    rows_of(monkeypatch, [first | row, *others])
    with pytest.raises(ValueError, match=complaint):
        claims()


def test_a_missing_and_a_repeated_row_are_refused(monkeypatch):
    """Each claim has exactly one row."""
    first, *others = read_rows("evidence.csv")
    rows_of(monkeypatch, others)
    with pytest.raises(ValueError, match=r"evidence\.csv has no row for claim 'F01'"):
        claims()
    rows_of(monkeypatch, [first, first, *others])
    with pytest.raises(ValueError, match=r"claim 'F01' of evidence\.csv has two rows"):
        claims()


def test_each_rule_has_an_example_of_its_kind():
    """The table has every name of agreement once, predictions first, and each example is called by that name."""
    names = [each.agreement for each in RULES]
    assert names == ["reproduced", "conditional", "by construction", "calibrated", "arithmetic"]
    assert set(names) == {Verdict.CONDITIONAL.value} | {agreement(Grounds(basis=each)).value for each in Basis}
    for each in RULES:
        assert agreement(claim(each.example).grounds).value == each.agreement, each.example


def test_what_was_fitted_or_computed_cannot_be_called_a_prediction():
    """A number that was made by fitting or arithmetic has that basis, whatever evidence.csv says."""
    assert claim("F41").evidence == "calibrated"
    for each in claims():
        if each.evidence in {"calibrated", "arithmetic"}:
            assert each.grounds.basis.value == each.evidence, each.id


def test_a_conditional_verdict_says_its_condition():
    """The row of a chapter's table names the condition where it decides the verdict, and only there."""
    agrees, misses = (claimed("F15", ours, requests=10**6) for ours in (2.36, 1.06))
    assert (agrees.verdict, misses.verdict) == (Verdict.CONDITIONAL, Verdict.DIRECTION_ONLY)
    assert agrees.condition == claim("F15").grounds.condition != ""
    assert misses.condition == ""


def test_every_assumption_has_alternatives_or_a_reason(monkeypatch):
    """Each assumption has a row, each row a reason, and a row about no assumption is refused."""
    assert {each.assumption for each in alternatives()} == {each.id for each in assumptions()}
    assert all(each.reason for each in alternatives())
    module = importlib.import_module("mooncake_lab.book.paper.evidence")
    rows = [*read_rows("alternatives.csv"), {"assumption": "B99", "alternative": "none", "reason": "x", "how": ""}]
    monkeypatch.setattr(module, "read_rows", lambda name: rows if name == "alternatives.csv" else read_rows(name))
    with pytest.raises(ValueError, match="about 'B99'"):
        alternatives()


def test_a_condition_is_shown_by_the_record():
    """Each assumption that a condition names has a recorded alternative that changes the verdict."""
    recorded = sensitivity()
    written = {row["id"]: row["condition"] for row in read_rows("evidence.csv")}
    assert {name: unshown(written[name], tried) for name, tried in recorded.items()} == dict.fromkeys(recorded, ())


def test_a_condition_that_nothing_shows_is_found():
    """It is one that names no assumption, or one whose alternatives leave the verdict as it is."""
    rows = (
        tried("reproduced"),
        tried("direction only", "B56", "packed"),
        tried("reproduced", "B08", "large caches"),
    )
    assert unshown("prompts are not packed (B56)", rows) == ()
    assert unshown("not packed (B56), small caches (B08)", rows) == ("B08",)
    assert unshown("good luck", rows) == ("good luck",)
    assert unshown("good luck", (tried("direction only"),)) == ()


def test_a_one_sided_claim_that_an_alternative_overturns_is_found():
    """What nearly any system satisfies is satisfied at every recorded alternative."""
    one_sided = "any lightly loaded cluster satisfies it"
    kept = (tried("reproduced"), tried("reproduced", "B39", "in turns"), tried("not tried", "B33", "inlined"))
    assert unshown(one_sided, kept) == ()
    assert unshown(one_sided, (*kept, tried("not reproduced", "B15", "less memory"))) == (one_sided,)


def tried(verdict, assumption="", alternative="as assumed"):
    """A recorded verdict."""
    return Tried(claim="F78", assumption=assumption, alternative=alternative, verdict=verdict, commit="0")


def test_a_recorded_flip_is_a_condition(monkeypatch):
    """An alternative that overturns a prediction makes it conditional and is named; one not tried does not."""
    module = importlib.import_module("mooncake_lab.book.paper.evidence")
    base, same = tried("reproduced"), tried("not tried", "B02", "another form")
    other = tried("direction only", "B56", "prompts are packed")
    for found, condition in (
        ((base, same), ""),
        ((base, same, other), "as assumed, and not with prompts are packed (B56)"),
        ((tried("direction only"), tried("reproduced", "B56", "prompts are packed")), ""),
    ):
        monkeypatch.setattr(module, "sensitivity", lambda found=found: {"F78": found})
        assert claim("F78").grounds.condition == condition
        agrees = claimed("F78", claim("F78").fact.value, requests=10**6).verdict
        assert agrees is (Verdict.CONDITIONAL if condition else Verdict.REPRODUCED)


@pytest.mark.parametrize("standing", ["at least", "the paper contradicts itself"])
def test_a_flip_is_a_condition_of_other_verdicts_that_stand(monkeypatch, standing):
    """A lower bound that an alternative lowers has a condition, as agreement has; others have none."""
    module = importlib.import_module("mooncake_lab.book.paper.evidence")
    base, same = tried(standing), tried(standing, "B02", "another form")
    other = tried("not reproduced", "B37", "a slower host")
    for found, condition in (
        ((base, same), ""),
        ((base, same, other), "as assumed, and not with a slower host (B37)"),
    ):
        monkeypatch.setattr(module, "sensitivity", lambda found=found: {"A01": found})
        assert claim("A01").grounds.condition == condition
        bounded = claimed("A01", 650.0, requests=10**6, bound="at least")
        assert bounded.verdict is (Verdict.AT_LEAST_IF if condition else Verdict.AT_LEAST)
        assert bounded.condition == condition


def test_every_verdict_under_a_condition_says_which():
    """Agreement and a bound show the condition of a claim that has one, and are called so; others do not."""
    for each in claims():
        if each.reach != "here":
            continue
        row = claimed(each, each.fact.value, requests=10**9)
        under = row.verdict in {Verdict.CONDITIONAL, Verdict.AT_LEAST_IF}
        assert under is bool(row.condition), each.id
        assert under is bool(each.grounds.condition), each.id


def test_no_verdict_that_stands_hides_what_overturns_it():
    """Of each claim that agrees or is bounded as assumed, every recorded flip is in the condition."""
    for name, each in sensitivity().items():
        if claim(name).grounds.basis is Basis.PREDICTED:
            condition = claim(name).grounds.condition
            for lost in flips(each):
                assert lost.assumption in condition, name


def test_only_counts_of_a_trace_and_of_one_cache_rest_on_no_assumption():
    """A prediction that can be judged here names what the paper leaves open, unless the printed setting is whole.

    That is so where blocks of a trace are counted, or hits of one cache under LRU.
    """
    free = {
        each.id
        for each in claims()
        if each.reach == "here" and each.grounds.basis is Basis.PREDICTED and not each.grounds.assumptions
    }
    assert free == {"A09", "A10", "A12", "A13", "A101", "A102", "A103", "A104", "A105", "A106"}
