"""Verdicts at alternatives to the assumptions: what an alternative sets, and what the record must hold."""

from dataclasses import dataclass, fields, is_dataclass, replace
from types import ModuleType

import pandas as pd
import pytest

from mooncake_lab.book.chapters import sensitivity as made
from mooncake_lab.book.chapters.overload import claims as overload_claims
from mooncake_lab.book.chapters.overload import recorded, replays
from mooncake_lab.book.experiments import vary
from mooncake_lab.book.paper import claim, claimed, claims, comparison_table
from mooncake_lab.book.paper.evidence import (
    AS_ASSUMED,
    NO_OTHER,
    NOT_TRIED,
    Alternative,
    alternatives,
    sensitivity,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubled:
    """A number and what it is multiplied by."""

    number: int = 1
    by: int = 2
    name: str = "a"

    def rows(self):
        """One row."""
        yield {"product": self.number * self.by}


def test_an_alternative_sets_a_field_of_the_experiments_it_is_about():
    """All of the class, or those with a value; claims count as tried where an experiment of theirs changed."""
    change = made.Change("Doubled[name=b].by=3; Other.by=9")
    first = change.run(vary(Doubled(), number=(1, 2)), "F01-F03")
    assert first["product"].tolist() == [2, 4]
    assert change.tried == set()
    second = change.run(vary(Doubled(), name=("a", "b")), "F09-F11 S04")
    assert second["product"].tolist() == [2, 3]
    assert change.tried == {"F09", "F10", "F11", "S04"}


def test_only_what_decides_a_claim_that_uses_the_assumption_changes():
    """Other experiments of the class stay as they are, and their claims are not tried."""
    change = made.Change("Doubled.by=3; x.share=0.5", frozenset({"F02", "F10"}))
    products = [change.run((Doubled(),), names)["product"].item() for names in ("F01-F03", "F04 F05")]
    assert products == [3, 2]
    assert [change.parameter("x", "share", names, 1) for names in ("F10", "F11")] == [0.5, 1]
    assert change.tried == {"F01", "F02", "F03", "F10"}


def test_a_value_is_compared_as_what_it_is():
    """A limit of 30 is one of 30.0, and true is True; a field may also be said not to have a value."""
    point = Doubled(number=30.0, by=True, name="a, b")
    for only, has in (
        ("number=30", True),
        ("by=true,number=30.0", True),
        ("number!=30", False),
        ("name=a, b,by!=7", True),
        ("name!=a, b", False),
        ("", True),
    ):
        assert made._has(point, only) is has, only
    assert made.only_of("name=a, b,by!=7") == [("name", True, "a, b"), ("by", False, "7")]


def test_a_setting_that_changes_nothing_was_tried():
    """An alternative that is the same as what is assumed of one claim has its verdict too."""
    change = made.Change("Doubled.by=2")
    assert change.run((Doubled(),), "F01")["product"].item() == 2
    assert change.tried == {"F01"}


def test_an_alternative_sets_a_parameter():
    """Of the function it names, and only there; numbers and truth values are read as such."""
    change = made.Change("store.whole=true; pipeline.sum_ms=1; x.share=0.5; x.router=random")
    assert change.parameter("transfer", "whole", "F40") is None
    assert change.tried == set()
    assert change.parameter("store", "whole", "F21") is True
    assert change.parameter("pipeline", "sum_ms", "S24", 0.1) == 1
    assert [change.parameter("x", name, "") for name in ("share", "router")] == [0.5, "random"]
    assert change.tried == {"F21", "S24"}


def test_an_alternative_that_sets_nothing_is_named():
    """Words in place of a setting are an error."""
    with pytest.raises(ValueError, match="'more nodes' sets nothing"):
        made.Change("more nodes").run((Doubled(),), "F01")


def test_every_setting_exists():
    """Each alternative names a field of an experiment of the chapters, or a parameter that a function asks for."""
    modules = [each for each in vars(made).values() if isinstance(each, ModuleType)]
    classes = {
        name: {field.name for field in fields(kind)}
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and is_dataclass(kind)
    }
    source = made.__loader__.get_source(made.__name__)
    for each in alternatives():
        for part in filter(None, each.how.split("; ")):
            target, only, field, _ = made._SETTING.fullmatch(part).groups()
            wanted = {field, *(name for name, _, _ in made.only_of(only or ""))}
            assert wanted <= classes.get(target, set()) or (target[0].islower() and field in source), part


def test_a_claim_that_an_alternative_does_not_reach_is_not_tried(monkeypatch):
    """Each claim has a row as assumed, and one for each alternative of its assumptions, tried or not."""

    def chapter(change):
        loss = change.run((Doubled(number=100),), "S24")["product"].iloc[0] / 100
        return comparison_table([claimed("S24", loss), claimed("S19", 0)])

    monkeypatch.setitem(made.FIGURES, "06_pipeline", chapter)
    monkeypatch.setattr(made, "alternatives", lambda: ALTERNATIVES)
    said = []
    table = pd.DataFrame(made.verdicts_of("06_pipeline", said.append))
    assert set(table["claim"]) == {"S24"}  # S19 holds by construction, so no assumption matters
    assert table["verdict"].tolist() == ["reproduced", "not reproduced", NOT_TRIED, NOT_TRIED]
    assert table["ours"].tolist()[:2] == [2.0, 1.0]
    assert table["alternative"].tolist()[0] == AS_ASSUMED
    assert len(said) == 3


def made_of(assumption, alternative, how=""):
    """An alternative."""
    return Alternative(assumption=assumption, alternative=alternative, reason="a test", how=how)


def test_where_nothing_else_is_reasonable_nothing_is_missing(monkeypatch):
    """An assumption without another choice has no row."""
    monkeypatch.setitem(made.FIGURES, "06_pipeline", lambda _: comparison_table([claimed("S24", 2.0)]))
    monkeypatch.setattr(made, "alternatives", lambda: [made_of("B50", NO_OTHER)])
    assert [row["alternative"] for row in made.verdicts_of("06_pipeline", str)] == [AS_ASSUMED]


def test_the_commit_is_that_of_the_start(monkeypatch, tmp_path):
    """Git is asked once, and a record that an earlier run has begun does not make the code another commit."""
    asked = iter(["abc"])
    outcome = {"assumption": "", "alternative": AS_ASSUMED, "verdict": "reproduced", "ours": 1.0}
    monkeypatch.setattr(made, "commit", lambda apart_from: next(asked) if apart_from.parent == tmp_path else None)
    monkeypatch.setattr(made, "carried_folder", lambda _: tmp_path)
    monkeypatch.setattr(made, "FIGURES", {"S24": None, "F23": None})
    monkeypatch.setattr(made, "verdicts_of", lambda name, **_: [{"claim": name, **outcome}])
    assert made.main([]) == 0
    assert pd.read_csv(tmp_path / "sensitivity.csv")["commit"].tolist() == ["abc", "abc"]


def test_overload_as_assumed_is_the_record_of_the_chapter(monkeypatch):
    """No replay is computed, and each claim has the number of the chapter's own table, on seven twins."""

    def nothing(points):
        assert points == []
        return pd.DataFrame()

    monkeypatch.setattr(made, "run", nothing)
    found = {row.claim: row.ours for row in made.of_overload(made.Change()).rows if row.decides}
    chapter = overload_claims.beside_papers(recorded.judged(recorded.recorded()), {})
    assert found == pytest.approx({row.claim: row.ours for row in chapter.rows if row.decides})
    assert len(found) == 11


def test_a_recorded_replay_stands_for_an_alternative(monkeypatch):
    """Other twins, another threshold on arrival and another limit on TTFT are on record, another node is not."""
    asked = []

    def counted(points):
        asked.extend(points)
        raise LookupError

    monkeypatch.setattr(made, "run", lambda points: counted(points) if points else pd.DataFrame())
    for how in ("Overload.arrival_threshold=1.0", "overload.ttft_limit_s=15.0", "Overload[twin=0].twin=7"):
        assert len(made.of_overload(made.Change(how)).rows) == 11, how
    with pytest.raises(LookupError):
        made.of_overload(made.Change("Overload.prefill_factor=none"))
    assert len(asked) == len(recorded.JUDGED_TWINS)
    low, _ = replays.fitted_points()
    assert not made._recordable(replace(low, decode_s=26.0))


def test_a_chapter_that_runs_again_replaces_its_own_rows(monkeypatch, tmp_path, capsys):
    """The rows of other chapters stay, in the order of the claims; an unknown chapter is named."""
    outcome = {"assumption": "", "alternative": AS_ASSUMED, "verdict": "reproduced"}
    monkeypatch.setattr(made, "carried_folder", lambda _: tmp_path)
    for chapter, name, ours in (("06", "S24", 2.0), ("07", "F23", 47.0), ("06", "S24", 1.5)):
        monkeypatch.setattr(made, "FIGURES", {chapter: None})
        monkeypatch.setattr(
            made, "verdicts_of", lambda _, n=name, o=ours, **_only: [{"claim": n, "ours": o, **outcome}]
        )
        assert made.main([]) == 0
    table = pd.read_csv(tmp_path / "sensitivity.csv", dtype={"commit": str})
    assert table[["claim", "ours"]].to_numpy().tolist() == [["F23", 47.0], ["S24", 1.5]]
    assert made.main(["99"]) == 2
    assert "no chapter '99'" in capsys.readouterr().err


def test_one_assumption_is_computed_alone(monkeypatch, tmp_path, capsys):
    """Only its alternatives are tried, its old rows go, all others stay, in the order of the alternatives."""
    monkeypatch.setattr(made, "carried_folder", lambda _: tmp_path)
    monkeypatch.setattr(made, "alternatives", lambda: ALTERNATIVES)
    monkeypatch.setattr(made, "commit", lambda _: "new")
    ran = []

    def chapter(change):
        ran.append(change.how)
        change.run((Doubled(),), "S24")
        return comparison_table([claimed("S24", 1.5)])

    monkeypatch.setattr(made, "FIGURES", {"06_pipeline": chapter})
    old = [
        ("F23", "B11", "whole blocks only"),
        ("S24", "", AS_ASSUMED),
        ("S24", "B48", "words only"),
        ("S24", "B50", "an alternative of before"),
    ]
    rows = [
        {"claim": c, "assumption": b, "alternative": a, "ours": 2.0, "verdict": "reproduced", "commit": "old"}
        for c, b, a in old
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "sensitivity.csv", index=False)
    assert made.main(["06_pipeline", "--assumption", "B50"]) == 0
    table = pd.read_csv(tmp_path / "sensitivity.csv", keep_default_na=False)
    assert table[["claim", "assumption", "alternative", "commit"]].to_numpy().tolist() == [
        [*old[0], "old"],
        [*old[1], "old"],
        ["S24", "B50", "half", "new"],
        ["S24", "B50", "another class", "new"],
        [*old[2], "old"],
    ]
    assert ran == ["", "Doubled.by=1", "Other.by=1"]
    assert made.main(["--assumption", "B99"]) == 2
    assert "no assumption 'B99'" in capsys.readouterr().err


ALTERNATIVES = [
    made_of("B50", "half", "Doubled.by=1"),
    made_of("B50", "another class", "Other.by=1"),
    made_of("B48", "words only"),
    made_of("B01", "of no claim here", "Doubled.by=5"),
]


def test_every_judged_claim_has_its_verdict_at_every_alternative():
    """The record has a row as assumed, and one for each alternative of each assumption of the claim's figure.

    If not, run `python -m mooncake_lab.book.chapters.sensitivity`.
    """
    recorded = sensitivity()
    for each in claims():
        if each.is_judged:
            wanted = [("", AS_ASSUMED)]
            wanted += [(a.assumption, a.alternative) for a in of_claim(each)]
            found = [(row.assumption, row.alternative) for row in recorded.get(each.id, ())]
            assert found == wanted, each.id
    assert set(recorded) == {each.id for each in claims() if each.is_judged}


def of_claim(each):
    """The alternatives to the assumptions of a claim."""
    used = each.grounds.assumptions
    return [a for a in alternatives() if a.assumption in used and a.alternative != NO_OTHER]


def test_every_alternative_that_can_be_tried_was_tried():
    """Only an alternative without a `how` is *not tried*; a claim with others has one that was tried."""
    settable = {(a.assumption, a.alternative) for a in alternatives() if a.how}
    for name, (_, *others) in sensitivity().items():
        left = {(row.assumption, row.alternative) for row in others if row.verdict == NOT_TRIED}
        assert not left & settable, name
        assert (
            len(left) < len(others)
            or not {(a.assumption, a.alternative) for a in of_claim(claim(name))} & settable
        )


def test_few_alternatives_cannot_be_tried():
    """Each has a reason, and is about something that no simulated cluster can do."""
    assert {a.assumption for a in alternatives() if not a.how and a.alternative != NO_OTHER} == {
        "B23",
        "B33",
        "B54",
    }


def test_the_record_is_of_committed_code():
    """No row names a commit with changes beside it."""
    assert {row.commit for rows in sensitivity().values() for row in rows if row.commit.endswith("+")} == set()


def test_no_claim_is_called_reproduced_against_the_record():
    """A claim that an alternative overturns has a condition, and so is conditional where it agrees."""
    for name, tried in sensitivity().items():
        verdicts = {row.verdict for row in tried} - {NOT_TRIED}
        if tried[0].verdict == "reproduced" and len(verdicts) > 1:
            assert claim(name).grounds.condition, name
