"""From a notebook that was handed in to the code that is executed, and to what is remarked about it.

The teacher's cells are put back, tests are left out, solutions are the student's, and of the cells that a student
adds the definitions are kept. What only Jupyter understands is left out and named.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mooncake_lab.batch.notebook import Cell, read_notebook
from mooncake_lab.course.grading.collect import printable
from mooncake_lab.course.grading.messages import Code

_MOST_LETTERS: Final = 100_000
"""Limit for all code cells of a notebook. A syntax tree takes a thousand times as much of the grader's memory."""
_PLAIN_CALLS: Final = frozenset(
    {"dict", "list", "set", "tuple", "frozenset", "range", "namedtuple"}
    | {"OrderedDict", "defaultdict", "deque", "Counter"}
)
"""What an assignment in an added cell may call: it makes a value and computes nothing."""
_UNREADABLE: Final = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What `ast.parse` may raise for text that is not Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What a student handed in, made ready."""

    code: tuple[Code, ...]
    """To execute, in order."""
    own: tuple[Code, ...]
    """The student's part of it."""
    remarks: tuple[str, ...]
    """What was left out or joined."""


@dataclass(frozen=True, slots=True)
class _Theirs:
    """A code cell of a student."""

    name: str
    """Empty for one that is not of the assignment."""
    text: str


def prepare(path: Path, teacher: Path) -> Handed:
    """Make a notebook ready to be executed, in the order of the student.

    Raises:
        ValueError: when a file is not a notebook or holds too much code, or a solution cell is missing; it says
            which, without the folders of the teacher.
    """
    source = [cell for cell in read_notebook(teacher).cells if cell.cell_type == "code"]
    names = {name for cell in source if (name := grade_id(cell))}
    theirs = [
        _Theirs(name if (name := grade_id(cell)) in names else "", cell.text)
        for cell in read_notebook(path).cells
        if cell.cell_type == "code"
    ]
    letters = sum(len(each.text) for each in theirs)
    if letters > _MOST_LETTERS:
        raise ValueError(f"{printable(path.name)} has {letters:,} letters of code; allowed are {_MOST_LETTERS:,}")
    given = {grade_id(cell) or f"given {i}": cell.text for i, cell in enumerate(source) if not _is_students(cell)}
    solutions: dict[str, str] = {}
    remarks: list[str] = []
    for name in (grade_id(cell) for cell in source if role(cell).get("solution")):
        parts = [without_magics(each.text) for each in theirs if each.name == name]
        if not parts:
            raise ValueError(f"{printable(path.name)} has lost the cell {name!r}, in which the solution belongs")
        if len(parts) > 1:
            remarks.append(f"cell {name!r} was found in {len(parts)} parts, which were joined")
        remarks += [f"left out of cell {name!r}: {line}" for _, dropped in parts for line in dropped]
        solutions[name] = "\n".join(text for text, _ in parts)
    code, told = _in_order(theirs, given, solutions)
    return Handed(
        code=tuple(code),
        own=tuple(each for each in code if each.name not in given),
        remarks=(*remarks, *told),
    )


def _is_students(cell: Cell) -> bool:
    """Whether nothing of a cell of the assignment is put back: a solution, or a test, which is not run."""
    return bool(role(cell).get("solution") or role(cell).get("grade"))


def _in_order(
    theirs: Sequence[_Theirs], given: Mapping[str, str], solutions: Mapping[str, str]
) -> tuple[list[Code], list[str]]:
    """The cells to execute; what of the teacher's is missing comes first."""
    there = {each.name for each in theirs}
    code = [Code(name, text) for name, text in given.items() if name not in there]
    remarks: list[str] = []
    done: set[str] = set()
    for number, each in enumerate(theirs, start=1):
        if each.name in done:
            continue
        if each.name in given or each.name in solutions:
            done.add(each.name)
            code.append(Code(each.name, given.get(each.name, "") or solutions.get(each.name, "")))
        elif not each.name:
            text, told = _added(f"code cell {number}", each.text)
            remarks += told
            code += [Code(f"code cell {number}", text)] if text else []
    return code, remarks


def role(cell: Cell) -> dict[str, Any]:
    """What nbgrader was told of a cell."""
    told = cell.metadata.get("nbgrader")
    return told if isinstance(told, dict) else {}


def grade_id(cell: Cell) -> str:
    """The name of a cell; empty where it has none."""
    return str(role(cell).get("grade_id") or "")


def without_magics(text: str) -> tuple[str, tuple[str, ...]]:
    """A cell without the lines that only Jupyter understands, and those lines.

    Nothing is changed in a cell that is Python as it stands: `%` may begin a line inside an expression.
    """
    if _is_python(text):
        return text, ()
    kept: list[str] = []
    dropped: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(("%", "!", "?")) or (stripped.endswith("?") and "#" not in stripped):
            dropped.append(stripped)
            kept.append(f"{line[: len(line) - len(line.lstrip())]}pass")
        else:
            kept.append(line)
    return "\n".join(kept), tuple(dropped)


def _added(name: str, text: str) -> tuple[str, list[str]]:
    """What is kept of a cell that a student added: definitions."""
    try:
        tree = ast.parse(without_magics(text)[0])
    except _UNREADABLE as error:
        return "", [f"{name} is not Python and was left out: {error}"]
    return "\n".join(ast.unparse(statement) for statement in filter(_defines, tree.body)), []


def _defines(statement: ast.stmt) -> bool:
    """Whether a statement makes something that a solution may use, and computes nothing."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.ClassDef():
            return True
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            calls = [each for each in ast.walk(value) if isinstance(each, ast.Call)]
            loops = any(isinstance(each, ast.comprehension | ast.Await) for each in ast.walk(value))
            return not loops and all(isinstance(c.func, ast.Name) and c.func.id in _PLAIN_CALLS for c in calls)
        case _:
            return False


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except _UNREADABLE:
        return False
    return True
