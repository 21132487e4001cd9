"""A notebook that was handed in, read as data: what is in its cells, never what they have put out.

Jupyter and its clients write more than strict JSON: NaN in an output, a byte order mark, half a surrogate pair.
Strict files are read without building their outputs, so that a large plot costs nothing.
"""

import codecs
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from mooncake_lab.course.grading.collect import printable

_MOST_LENIENT_BYTES: Final = 10_000_000
"""Size limit for a file that is no strict JSON: all of it is built in memory, outputs included."""
_OTHER_ENCODINGS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclass(frozen=True, slots=True)
class SubmittedCell:
    """One cell of a student."""

    kind: str
    """`code`, `markdown` or `raw`."""
    name: str
    """nbgrader's name of it; empty where it has none."""
    text: str


class _Role(msgspec.Struct):
    grade_id: str | int | None = None


class _Metadata(msgspec.Struct):
    nbgrader: _Role | None = None


class _Cell(msgspec.Struct):
    """What is read of a cell; everything else is passed over."""

    cell_type: str = "code"
    source: str | list[str] | None = None
    input: str | list[str] | None = None
    """The source of a code cell in nbformat 3."""
    metadata: _Metadata | None = None


class _Worksheet(msgspec.Struct):
    cells: list[_Cell] = []


class _File(msgspec.Struct):
    cells: list[_Cell] | None = None
    worksheets: list[_Worksheet] | None = None
    """Where nbformat 3 has the cells."""


def read_submission(path: Path) -> list[SubmittedCell]:
    """The cells of a notebook file (nbformat 3 or 4).

    Raises:
        ValueError: when the file is not a notebook; it says which file and why, without the folder.
    """
    name = printable(path.name)
    raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if raw.startswith(_OTHER_ENCODINGS) or b"\0" in raw[:4]:
        raise ValueError(f"{name} is UTF-16 or UTF-32 text; a notebook is UTF-8")
    if not raw.strip():
        raise ValueError(f"{name} is empty")
    try:
        file = msgspec.json.decode(raw, type=_File)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if len(raw) > _MOST_LENIENT_BYTES:
            raise ValueError(
                f"{name} has {len(raw):,} bytes and is no strict JSON ({error}); such files are read up to"
                f" {_MOST_LENIENT_BYTES:,} bytes, so clear its outputs"
            ) from error
        file = _leniently(raw, name)
    sheets = [each.cells for each in file.worksheets or []]
    cells = [each for some in (file.cells or [], *sheets) for each in some]
    if file.cells is None and not sheets:
        raise ValueError(f"{name} is not a Jupyter notebook: it has no cells")
    return [_submitted(each) for each in cells]


def _submitted(cell: _Cell) -> SubmittedCell:
    role = cell.metadata.nbgrader if cell.metadata else None
    name = str(role.grade_id or "") if role else ""
    text = cell.source if cell.source is not None else cell.input
    return SubmittedCell(cell.cell_type, _whole(name), _whole("".join(text or "")))


def _leniently(raw: bytes, name: str) -> _File:
    """As Python's `json` reads it, with NaN and halves of surrogate pairs; fields of odd types are empty."""
    try:
        told = json.loads(raw.decode("utf-8", "surrogatepass"), strict=False, parse_int=float)
    except RecursionError as error:
        raise ValueError(f"{name} is not a Jupyter notebook: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{name} is not a Jupyter notebook: {error}") from error
    found = _mapping(told)
    sheets = found.get("worksheets")
    return _File(
        cells=_cells(found["cells"]) if isinstance(found.get("cells"), list) else None,
        worksheets=[_Worksheet(_cells(_mapping(each).get("cells"))) for each in _items(sheets)] or None,
    )


def _cells(told: Any) -> list[_Cell]:
    cells: list[_Cell] = []
    for each in map(_mapping, _items(told)):
        role = _mapping(_mapping(each.get("metadata")).get("nbgrader"))
        name, kind = role.get("grade_id"), each.get("cell_type")
        cells.append(
            _Cell(
                cell_type=kind if isinstance(kind, str) else "code",
                source=_text(each.get("source")),
                input=_text(each.get("input")),
                metadata=_Metadata(_Role(name if isinstance(name, str) else "")),
            )
        )
    return cells


def _text(told: Any) -> str | None:
    """A text, or the lines of one; None where there is neither."""
    if isinstance(told, str):
        return told
    return "".join(line for line in _items(told) if isinstance(line, str)) if isinstance(told, list) else None


def _items(told: Any) -> Iterable[Any]:
    return told if isinstance(told, list) else ()


def _mapping(told: Any) -> Mapping[str, Any]:
    return told if isinstance(told, dict) else {}


def _whole(text: str) -> str:
    """A text that UTF-8 can hold: surrogate pairs joined, and halves of them replaced."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
