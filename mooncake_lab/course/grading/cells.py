"""From a notebook that was handed in to the code that is executed, and to what is remarked about it.

The given cells are put back, tests are left out, solutions are the student's, and of the code that a student adds
what the solution needs is kept. Whatever is left out is named. A damaged cell costs its own tasks only.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from mooncake_lab.book.rendering.notebook import Cell, read_notebook
from mooncake_lab.course.grading.added_code import AddedStatement, choose, names_of, statements_of
from mooncake_lab.course.grading.collect import printable
from mooncake_lab.course.grading.jupyter_code import JUPYTER, UNREADABLE, is_python, without_magics
from mooncake_lab.course.grading.messages import Code
from mooncake_lab.course.grading.submitted import SubmittedCell, read_submission

_MOST_LETTERS: Final = 100_000
"""Limit for all code of a notebook. A syntax tree takes a thousand times as much of the grader's memory."""
_MOST_PARTS: Final = 500
"""Between the dots of a name. Python's parser joins those of an import one by one, and keeps each step."""
_LONG_NAME: Final = re.compile(rf"(?:\.[\s\\]*+\w++[\s\\]*+){{{_MOST_PARTS}}}")
_REPLACES: Final = "it replaces what the assignment gives"
_LONGEST_LIST: Final = 400
"""Letters of left-out statements that one remark names; the next ones are in the next remark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What a student handed in, made ready."""

    code: tuple[Code, ...]
    """To execute, in order."""
    own: tuple[Code, ...]
    """The student's part of it, cell by cell."""
    remarks: tuple[str, ...]
    """What was left out, joined or taken from another place."""
    lost: Mapping[str, str]
    """Solution cells that are not there, and a sentence about each."""


@dataclass(frozen=True, slots=True)
class _Assignment:
    """The instructor's notebook."""

    given: Mapping[str, str]
    """Cells that are put back, by name."""
    solutions: Mapping[str, str]
    tests: Mapping[str, str]
    """Not executed."""

    @property
    def asked(self) -> frozenset[str]:
        """The names that solutions must define."""
        return frozenset().union(*(names_of(text).bound for text in self.solutions.values()))

    def early(self) -> Iterator[str]:
        """The given cells that need nothing of a solution: executed first, wherever the student moved them."""
        for name, text in self.given.items():
            if not names_of(text).used_now & self.asked:
                yield name


@dataclass(frozen=True, slots=True)
class _Added:
    """The code of a student in one cell that is not a solution."""

    name: str
    statements: Sequence[AddedStatement]
    """Those that the instructor's cell of this name does not have."""
    remarks: tuple[str, ...]


def prepare(path: Path, teacher: Path) -> Handed:
    """Make a notebook ready to be executed, in the order of the student.

    Raises:
        ValueError: when a file is not a notebook or holds too much code; it says which, without its folder.
    """
    assignment = _assignment(teacher)
    cells = read_submission(path)
    used = [each for each in cells if each.kind == "code" or each.name in assignment.solutions]
    letters = sum(len(each.text) for each in used)
    if letters > _MOST_LETTERS:
        raise ValueError(f"{printable(path.name)} has {letters:,} letters of code; allowed are {_MOST_LETTERS:,}")
    if any(_LONG_NAME.search(each.text) for each in used):
        raise ValueError(f"{printable(path.name)} holds a name of more than {_MOST_PARTS} parts between dots")
    remarks: list[str] = []
    lost: dict[str, str] = {}
    solutions: dict[str, str] = {}
    for name in assignment.solutions:
        if text := _solution(name, cells, remarks):
            solutions[name] = text
        else:
            lost[name] = f"{printable(path.name)} has lost the cell {name!r}, in which the solution belongs"
    remarks += lost.values()
    code, own = _in_order(used, assignment, solutions, remarks)
    return Handed(code=tuple(code), own=tuple(own), remarks=tuple(remarks), lost=MappingProxyType(lost))


def _assignment(teacher: Path) -> _Assignment:
    given: dict[str, str] = {}
    solutions: dict[str, str] = {}
    tests: dict[str, str] = {}
    for number, cell in enumerate(read_notebook(teacher).cells):
        if cell.cell_type == "code":
            name = grade_id(cell)
            kind = solutions if role(cell).get("solution") else tests if role(cell).get("grade") else given
            kind[name or f"given {number}"] = cell.text
    return _Assignment(given, solutions, tests)


def _solution(name: str, cells: Sequence[SubmittedCell], remarks: list[str]) -> str:
    """The code of a solution cell, empty where there is none; parts of a split or copied one all have its name."""
    named = [each for each in cells if each.name == name and each.text.strip()]
    found = [each for each in named if each.kind == "code"]
    if not found and named:
        found = named
        kinds = " and ".join(sorted({printable(each.kind) for each in found}))
        remarks.append(f"cell {name!r} has become {kinds}; its text was taken as code")
    if len(found) > 1:
        remarks.append(f"cell {name!r} was found in {len(found)} parts, which were joined")
    parts = [each.text for each in found]
    whole, dropped = without_magics("\n".join(parts))
    if not is_python(whole):  # a broken part must not keep the magics of the others
        each_alone = [without_magics(part) for part in parts]
        whole, dropped = (
            "\n".join(text for text, _ in each_alone),
            tuple(line for _, some in each_alone for line in some),
        )
    remarks += [f"left out of cell {name!r}: {line}" for line in dropped]
    return whole


def _in_order(
    cells: Sequence[SubmittedCell], assignment: _Assignment, solutions: Mapping[str, str], remarks: list[str]
) -> tuple[list[Code], list[Code]]:
    """The cells to execute, and those of them that are the student's."""
    early = [*assignment.early()]
    texts = {**{name: text for name, text in assignment.given.items() if name not in early}, **solutions}
    added = [
        None if each.name in solutions else _added(each, number, assignment) for number, each in _numbered(cells)
    ]
    choose(
        [one for some in added if some for one in some.statements if one.why_not != _REPLACES],
        solutions.values(),
        assignment.asked,
    )
    code = [Code("jupyter", JUPYTER), *(Code(name, assignment.given[name]) for name in early)]
    own: list[Code] = []
    for each, extra in zip(cells, added, strict=True):
        if (text := texts.pop(each.name, None)) is not None:
            code.append(Code(each.name, text))
            own += [code[-1]] if each.name in solutions else []
        if extra is not None:
            kept = [one.text for one in extra.statements if not one.why_not]
            code += [Code(extra.name, text) for text in kept]
            own += [Code(extra.name, "\n".join(kept))] if kept else []
            remarks += [*extra.remarks, *_left_out(extra)]
    code += [Code(name, text) for name, text in texts.items()]
    return code, own


def _numbered(cells: Sequence[SubmittedCell]) -> Iterator[tuple[int, SubmittedCell]]:
    """The cells, and the number of each among the code cells."""
    number = 0
    for each in cells:
        number += each.kind == "code"
        yield number, each


def _added(cell: SubmittedCell, number: int, assignment: _Assignment) -> _Added:
    """The code of a cell that is no solution; of a given cell or a test, what the student put into it."""
    theirs = assignment.given.get(cell.name, assignment.tests.get(cell.name))
    name = f"code cell {number}" if theirs is None else f"cell {cell.name!r}"
    if cell.text == theirs:
        return _Added(name, (), ())
    text, dropped = without_magics(cell.text)
    try:
        statements = statements_of(ast.parse(text))
        known = {one.text for one in statements_of(ast.parse(theirs or ""))}
    except UNREADABLE as error:
        return _Added(name, (), (f"{name} is not Python and was left out: {error}",))
    fresh = [one for one in statements if one.text not in known and one.text != "pass"]
    reserved = frozenset[str]().union(*(names_of(each).bound for each in assignment.given.values()))
    for one in fresh if cell.name in assignment.given else ():
        if one.names.bound & reserved:
            one.why_not = _REPLACES
    return _Added(name, fresh, tuple(f"left out of {name}: {line}" for line in dropped))


def _left_out(added: _Added) -> Iterator[str]:
    """Every statement of a cell that is not executed, with the reason."""
    by_reason: dict[str, list[str]] = {}
    for one in added.statements:
        if one.why_not:
            by_reason.setdefault(one.why_not, []).append(one.shown)
    for why, shown in by_reason.items():
        line = ""
        for each in shown:
            if line and len(line) + len(each) > _LONGEST_LIST:
                yield f"left out of {added.name}, because {why}: {line}"
                line = ""
            line += f"{', ' if line else ''}{each}"
        yield f"left out of {added.name}, because {why}: {line}"


def role(cell: Cell) -> dict[str, Any]:
    """What nbgrader was told of a cell."""
    told = cell.metadata.get("nbgrader")
    return told if isinstance(told, dict) else {}


def grade_id(cell: Cell) -> str:
    """The name of a cell; empty where it has none."""
    return str(role(cell).get("grade_id") or "")
