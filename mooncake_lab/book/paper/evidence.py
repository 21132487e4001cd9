"""What the verdict of a claim rests on: whether our number predicts, under which assumptions and condition.

`data/paper/evidence.csv` has one row for each claim. `RULES` says what each kind of agreement is called; the
scorecard, the front page of the book and the notes on the data show this one table.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from mooncake_lab.book.paper.facts import read_rows, rows_of, told
from mooncake_lab.core import carried_folder

REPRODUCED: Final = "reproduced"
STANDING: Final = (REPRODUCED, "at least", "the paper contradicts itself")
"""The verdicts that speak for our number as it was computed: what overturns one is a condition of it."""


class Basis(StrEnum):
    """What a number of ours that agrees with the paper's is worth."""

    PREDICTED = "predicted"
    BY_CONSTRUCTION = "by construction"
    CALIBRATED = "calibrated"
    ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grounds:
    """What the verdict of one claim rests on.

    Raises:
        ValueError: when a claim that predicts nothing has a condition.
    """

    basis: Basis
    assumptions: tuple[str, ...] = ()
    """Ids of the assumptions that the figure of the claim uses."""
    condition: str = ""
    """What has to hold for a predicted number to agree; empty where no choice of ours decides the verdict."""

    def __post_init__(self) -> None:
        if self.condition and self.basis is not Basis.PREDICTED:
            raise ValueError(
                f"the basis is {self.basis.value!r} and the condition {self.condition!r};"
                " only what is predicted has one"
            )


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of agreement."""

    agreement: str
    """What the verdict is called."""
    rule: str
    example: str
    """The id of a claim of this kind."""
    why: str
    """Why it is of this kind."""


RULES: Final = (
    Rule(
        "reproduced",
        "Our number is a prediction. We fitted nothing to it or to another number of its figure, or the recorded"
        " alternative without the fit gives the same verdict. What the paper does not print of the setting is an"
        " assumption, and no recorded alternative to an assumption changes the verdict.",
        "S01",
        "the table prints the setting, and our model of the machine is fitted to other figures only",
    ),
    Rule(
        "conditional",
        "Our number agrees, but a named condition decides the verdict. An alternative to an assumption gives"
        " another verdict, or a model was fitted to a curve of the same figure, or the claim only bounds a number"
        " from one side, and almost any system keeps the bound.",
        "F15",
        "with another router for the local caches, the ratio is outside the band",
    ),
    Rule(
        "by construction",
        "Our code was written to have this property.",
        "S19",
        "the batching policy first puts all decodes into an iteration",
    ),
    Rule(
        "calibrated",
        "We fitted a model to this number or to another number of its figure, or chose a setting or a definition"
        " by them, and the verdict depends on it.",
        "A19",
        "the nodes of the replay are fitted to the box plot that has this mean",
    ),
    Rule(
        "arithmetic",
        "The number follows from printed numbers.",
        "F27",
        "it is the printed memory of a node, divided by the size of the KVCache of a token",
    ),
)
"""How agreement is called, the predictions first."""


def grounds() -> dict[str, Grounds]:
    """What each claim rests on, by its id, in the order of `data/paper/evidence.csv`.

    Raises:
        ValueError: when a claim has no row, two rows, or an assumption that does not exist, or a row is about no
            claim; it names the row.
    """
    claims = {row["id"] for row in read_rows("claims.csv")}
    assumptions = {row["id"] for row in read_rows("assumptions.csv")}
    found: dict[str, Grounds] = {}
    for row in read_rows("evidence.csv"):
        name, where = row["id"], f"claim {row['id']!r} of evidence.csv"
        if name not in claims:
            raise ValueError(f"{where} is not in claims.csv")
        if name in found:
            raise ValueError(f"{where} has two rows; each claim has one")
        named = tuple(filter(None, row["assumptions"].split(";")))
        if unknown := [each for each in named if each not in assumptions]:
            raise ValueError(f"{where} rests on {unknown[0]!r}, which is not in assumptions.csv")
        found[name] = told(row | {"assumptions": named}, Grounds, where)
    if missing := sorted(claims - set(found)):
        raise ValueError(f"evidence.csv has no row for claim {missing[0]!r}; each claim has one")
    recorded = sensitivity()
    return {name: _with_condition(each, recorded.get(name, ())) for name, each in found.items()}


def _with_condition(on: Grounds, tried: "Sequence[Tried]") -> Grounds:
    """The grounds with the condition that the recorded alternatives ask for, added to what is written."""
    lost = [each for each in flips(tried) if each.assumption not in named(on.condition)]
    if on.basis is not Basis.PREDICTED or not lost:
        return on
    said = "; ".join(f"{each.alternative} ({each.assumption})" for each in lost)
    return replace(on, condition=f"{on.condition or 'as assumed'}, and not with {said}")


_ASSUMPTION: Final = re.compile(r"\bB\d\d\b")
ONE_SIDED: Final = ("any lightly loaded cluster satisfies it", "only the order is judged, and most models have it")
"""Conditions of claims that bound a number from one side: no alternative has to show them."""


def named(condition: str) -> frozenset[str]:
    """The assumptions that a condition names."""
    return frozenset(_ASSUMPTION.findall(condition))


def unshown(condition: str, tried: "Sequence[Tried]") -> tuple[str, ...]:
    """What a condition claims without evidence: assumptions no recorded alternative to which changes the verdict.

    The whole condition where it names none, unless it says that the claim is one-sided and no alternative changes
    the verdict. Only of a claim that is reproduced as assumed can alternatives say so; of others, nothing is
    returned.
    """
    if not condition or [each.verdict for each in tried[:1]] != [REPRODUCED]:
        return ()
    shown = {each.assumption for each in flips(tried)}
    if condition in ONE_SIDED and not shown:
        return ()
    return tuple(sorted(named(condition) - shown)) if named(condition) else (condition,)


ALTERNATIVES: Final = "alternatives.csv"
SENSITIVITY: Final = "sensitivity.csv"
"""What `python -m mooncake_lab.book.chapters.sensitivity` records in `data/measured`."""
AS_ASSUMED: Final = "as assumed"
"""The alternative of a row that changes nothing."""
NO_OTHER: Final = "none"
"""The alternative to an assumption in whose place nothing else is reasonable."""
NOT_TRIED: Final = "not tried"
"""The verdict of a row whose experiment cannot express the alternative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another reasonable choice in place of an assumption."""

    assumption: str
    alternative: str
    """What is assumed in its place; `none` where nothing else is reasonable."""
    reason: str
    """Why it is reasonable; or why there is none, or none that can be tried."""
    how: str = ""
    """What `mooncake_lab.book.chapters.sensitivity` sets; empty where it cannot be tried."""


def alternatives() -> tuple[Alternative, ...]:
    """Every alternative, in the order of `data/paper/alternatives.csv`.

    Raises:
        ValueError: when one is of an assumption that does not exist.
    """
    found = tuple(
        told(row, Alternative, f"{row['assumption']} of {ALTERNATIVES}") for row in read_rows(ALTERNATIVES)
    )
    assumed = {row["id"] for row in read_rows("assumptions.csv")}
    if unknown := sorted({each.assumption for each in found} - assumed):
        raise ValueError(f"{ALTERNATIVES} is about {unknown[0]!r}, which is not in assumptions.csv")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What becomes of a claim at one alternative."""

    claim: str
    assumption: str = ""
    alternative: str
    ours: float | None = None
    verdict: str
    """Without regard to any condition; or `not tried`."""
    commit: str
    """Of the code that computed it."""


def sensitivity() -> dict[str, tuple[Tried, ...]]:
    """By claim, the verdict as assumed and at each alternative, as recorded; empty without a record."""
    path = carried_folder("measured") / SENSITIVITY
    found: dict[str, tuple[Tried, ...]] = {}
    if path.is_file():
        for row in rows_of(path):
            each = told(row, Tried, f"{row['claim']} of {SENSITIVITY}")
            found[each.claim] = (*found.get(each.claim, ()), each)
    return found


def flips(tried: Sequence[Tried]) -> tuple[Tried, ...]:
    """The alternatives at which a claim that agrees as assumed, or is bounded, gets another verdict."""
    assumed = [each.verdict for each in tried if not each.assumption]
    if len(assumed) != 1 or assumed[0] not in STANDING:
        return ()
    return tuple(each for each in tried if each.verdict not in {*assumed, NOT_TRIED})
