"""`mooncake-lab verdicts`: every claim and its verdict, from the records of the chapters."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from mooncake_lab.cli.options import Json, fail, failing

if TYPE_CHECKING:
    from mooncake_lab.paper.scorecard import Scorecard, Scored

_COLUMNS = ("id", "place", "paper", "ours", "band", "evidence", "verdict")


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
    from mooncake_lab.paper.explain import explain as explained
    from mooncake_lab.paper.scorecard import scorecard

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


def _table(card: "Scorecard") -> str:
    lines = [_COLUMNS, *(_cells(row) for row in card.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*(line.rstrip() for line in shown), "", card.totals().to_string()])


def _cells(row: "Scored") -> tuple[str, ...]:
    from mooncake_lab.paper.comparison import band_text, number_text
    from mooncake_lab.paper.explain import bounded_text

    fact = row.claim.fact
    return (
        row.claim.id,
        fact.cited,
        number_text(fact.value, fact.unit),
        bounded_text(row),
        band_text(row.claim.yardstick, fact),
        row.claim.evidence,
        row.verdict,
    )


def _numbers(card: "Scorecard") -> dict[str, Any]:
    totals = {str(name): {str(key): int(n) for key, n in row.items()} for name, row in card.totals().iterrows()}
    return {"claims": [_fields(row) for row in card.rows], "totals": totals}


def _fields(row: "Scored") -> dict[str, Any]:
    from mooncake_lab.paper.explain import why, yardstick_in_words

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
        "verdict": row.verdict,
        "why": why(row),
        "chapter": claim.chapter,
        "record": row.topic,
        "row": row.quantity,
        "details": [
            {"quantity": each.quantity, "ours": each.ours, "verdict": each.verdict, "record": each.topic}
            for each in row.details
        ],
        "note": claim.note,
    }
