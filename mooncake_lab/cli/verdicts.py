"""`mooncake-lab verdicts`: every claim and its verdict, from the records of the chapters."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec
import typer

from mooncake_lab.book.paper.claims import Claim, Verdict, Yardstick
from mooncake_lab.book.paper.comparison import band_text, number_text
from mooncake_lab.book.paper.evidence import Basis, sensitivity
from mooncake_lab.book.paper.scorecard import NOT_EXECUTED, Scorecard, Scored, scorecard
from mooncake_lab.cli.options import Json, fail, failing

_SIDES: Final[Mapping[str, str]] = MappingProxyType(
    {"above": "above", "at_least": "at least", "below": "below", "at_most": "at most"}
)
_SOURCES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "printed": "printed in the paper",
        "read": "read off a figure",
        "derived": "computed from numbers of the paper",
        "assumed": "assumed",
    }
)
_EVIDENCE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "measured": "our number comes from real code, or is counted in a released trace",
        "simulated": "a model predicts our number",
        "calibrated": "we fitted a model, or chose the load, by the paper's number",
        "arithmetic": "our number follows from printed numbers",
    }
)
_BASES: Final[Mapping[Basis, str]] = MappingProxyType(
    {
        Basis.PREDICTED: "agreement is a prediction",
        Basis.BY_CONSTRUCTION: "our code was written to agree, so agreement predicts nothing",
        Basis.CALIBRATED: "we fitted or chose something by this figure, so agreement predicts nothing",
        Basis.ARITHMETIC: "our number follows from printed numbers, so agreement predicts nothing",
    }
)
_STATED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "before": "before the code that computes our number",
        "with": "together with that code, or with a first result of ours",
        "after": "after our number was known",
    }
)
_WITHOUT_NUMBER: Final[Mapping[str, str]] = MappingProxyType(
    {
        Verdict.TOO_SHORT: "The run has fewer requests than the claim needs.",
        Verdict.NEEDS_HARDWARE: "The claim is about hardware that was not here.",
        Verdict.NEEDS_MODEL: "The claim is about a model that was not here; another one's number is not judged.",
        Verdict.TRACE_NOT_HERE: "The trace was not here, and its twin was made to have this property.",
        Verdict.OUT_OF_SCOPE: "The claim is about production, which nobody outside can measure.",
        NOT_EXECUTED: "No chapter has recorded a number for this claim.",
    }
)
_COLUMNS = ("id", "place", "paper", "ours", "band", "evidence", "basis", "verdict", "condition")


def verdicts(
    from_: Annotated[
        Path, typer.Option("--from", metavar="DIR", help="Folder with the records of the chapters, TOPIC.json.")
    ] = Path("book/_generated"),
    explain: Annotated[
        str | None, typer.Option(metavar="ID", help="Explain the verdict on one claim, e.g. F01.")
    ] = None,
    json_: Json = False,
) -> None:
    """Print the verdict on each claim of the papers, with the paper's number, ours, and the band.

    The command reads the records that `make book` or `mooncake-lab batch` wrote; it runs no experiment.

    Example: mooncake-lab verdicts --explain F01
    """
    if not any(from_.glob("*.json")):
        fail(
            "verdicts", f"{from_} contains no records; run `make book`, or name another folder with --from", code=2
        )
    with failing("verdicts"):
        card = scorecard(from_)
    if explain is None:
        typer.echo(msgspec.json.encode(_numbers(card)) if json_ else _table(card))
        return
    chosen = [row for row in card.rows if row.claim.id == explain]
    if not chosen:
        fail("verdicts", f"no claim {explain!r}; there are {', '.join(row.claim.id for row in card.rows)}", code=2)
    typer.echo(msgspec.json.encode(_fields(chosen[0])) if json_ else explained(chosen[0]))


def _table(card: Scorecard) -> str:
    lines = [_COLUMNS, *(_cells(row) for row in card.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*(line.rstrip() for line in shown), "", card.totals().to_string()])


def _cells(row: Scored) -> tuple[str, ...]:
    fact = row.claim.fact
    return (
        row.claim.id,
        fact.cited,
        number_text(fact.value, fact.unit),
        bounded_text(row),
        band_text(row.claim.yardstick, fact),
        row.claim.evidence,
        row.claim.grounds.basis.value,
        row.verdict,
        row.condition,
    )


def _numbers(card: Scorecard) -> dict[str, Any]:
    totals = {str(name): {str(key): int(n) for key, n in row.items()} for name, row in card.totals().iterrows()}
    return {"claims": [_fields(row) for row in card.rows], "totals": totals}


def _fields(row: Scored) -> dict[str, Any]:
    claim = row.claim
    low, high = claim.yardstick.limits(claim.fact.value)
    return {
        "id": claim.id,
        "sentence": claim.sentence,
        "edition": claim.fact.edition,
        "place": claim.fact.place,
        "source": claim.fact.source,
        "conditions": claim.conditions,
        "unit": claim.fact.unit,
        "paper": claim.fact.value,
        "ours": row.ours,
        "bound": row.bound,
        "band": [low if abs(low) < float("inf") else None, high if abs(high) < float("inf") else None],
        "yardstick": yardstick_in_words(claim.yardstick, claim),
        "evidence": claim.evidence,
        "stated": claim.stated,
        "basis": claim.grounds.basis.value,
        "assumptions": list(claim.grounds.assumptions),
        "verdict": row.verdict,
        "condition": row.condition,
        "why": why(row),
        "sensitivity": [
            {"assumption": each.assumption, "alternative": each.alternative, "ours": each.ours}
            | {"verdict": each.verdict, "commit": each.commit}
            for each in sensitivity().get(claim.id, ())
        ],
        "chapter": claim.chapter,
        "record": row.topic,
        "row": row.quantity,
        "details": [
            {"quantity": each.quantity, "ours": each.ours, "verdict": each.verdict, "record": each.topic}
            for each in row.details
        ],
        "note": claim.note,
    }


def explained(row: Scored) -> str:
    """The claim, its fact, its yardstick, the row that decided it, and why the verdict follows, line by line."""
    return "\n".join(f"{name + ':':<12}{text}" for name, text in _lines(row))


def yardstick_in_words(yardstick: Yardstick, claim: Claim) -> str:
    """What our number must fulfil."""
    band = band_text(yardstick, claim.fact)
    direction = ""
    if yardstick.sense is not None and yardstick.threshold is not None:
        limit = number_text(yardstick.threshold, claim.fact.unit)
        direction = f"first the direction: {_SIDES[yardstick.sense]} {limit}"
    if yardstick.grade == "order":
        return f"the direction only: {_SIDES[yardstick.sense or 'above']} {band.split(maxsplit=1)[1]}"
    how = (
        f"the paper's number up to a factor of {yardstick.band:g}"
        if yardstick.grade == "factor"
        else f"the paper's number up to {100 * (yardstick.band or 0):g} % of it"
    )
    return f"{direction}; then the band: {band}, {how}" if direction else f"the band: {band}, {how}"


def _lines(row: Scored) -> Iterator[tuple[str, str]]:
    claim = row.claim
    fact = claim.fact
    yield claim.id, claim.sentence
    yield "paper", f"{number_text(fact.value, fact.unit)}, {fact.cited}, {_SOURCES[fact.source]}"
    yield "conditions", claim.conditions
    yield "yardstick", yardstick_in_words(claim.yardstick, claim)
    yield "evidence", f"{claim.evidence}: {_EVIDENCE[claim.evidence]}"
    yield "basis", f"{claim.grounds.basis.value}: {_BASES[claim.grounds.basis]}"
    if claim.grounds.condition:
        yield "condition", claim.grounds.condition
    if claim.grounds.assumptions:
        yield "assumes", ", ".join(claim.grounds.assumptions)
    yield "stated", f"{claim.stated}: claim and band were written {_STATED[claim.stated]}"
    yield "chapter", claim.chapter
    if row.topic:
        yield "decided by", f"the row {row.quantity!r} of beside_papers in {row.topic}.json"
    yield "ours", "no number" if row.ours is None else bounded_text(row)
    yield "verdict", f"{row.verdict}. {why(row)}"
    for each in row.details:
        ours = "no number" if each.ours is None else number_text(each.ours, fact.unit)
        yield "detail", f"{each.quantity}: {ours}, {each.verdict}, not counted"
    for each in sensitivity().get(claim.id, ()):
        ours = "" if each.ours is None else f"{number_text(each.ours, fact.unit)}, "
        where = f"{each.assumption}, {each.alternative}" if each.assumption else each.alternative
        yield "tried", f"{where}: {ours}{each.verdict}"
    if claim.note:
        yield "note", claim.note


def bounded_text(row: Scored) -> str:
    """Our number with its unit, and a sign where it is only a lower bound; a dash without a number."""
    if row.ours is None:
        return "–"
    return ("≥ " if row.bound == "at least" else "") + number_text(row.ours, row.claim.fact.unit)


def why(row: Scored) -> str:
    """One sentence that says why the verdict follows from our number."""
    if row.verdict in _WITHOUT_NUMBER or row.ours is None:
        return _WITHOUT_NUMBER.get(row.verdict, "")
    claim, ours = row.claim, bounded_text(row)
    band = band_text(claim.yardstick, claim.fact)
    other, limit = (
        number_text(value or 0.0, claim.fact.unit) for value in (claim.elsewhere, claim.yardstick.threshold)
    )
    missed = f"{ours} is not {_SIDES[claim.yardstick.sense or 'above']} {limit}."
    if claim.yardstick.has_direction(row.ours):
        missed = f"{ours} is outside {band}, and the claim has no direction."
    reasons: dict[str, str] = {
        Verdict.NOT_REPRODUCED: missed,
        Verdict.DIRECTION_ONLY: f"{ours} has the direction and is outside {band}.",
        Verdict.CONTRADICTS: f"{ours} is outside {band} and agrees with {other}, which its other numbers give.",
        Verdict.AT_LEAST: f"{ours} is a lower bound: the tested settings ended there, below the end of {band}.",
    }
    reasons[Verdict.AT_LEAST_IF] = reasons[Verdict.AT_LEAST]
    said = reasons.get(row.verdict, f"{ours} is within {band}.")
    return f"{said.removesuffix('.')}; the condition is: {row.condition}." if row.condition else said
