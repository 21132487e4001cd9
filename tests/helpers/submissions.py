"""Submissions for tests: the teacher's notebooks with changes."""

import json
from pathlib import Path
from types import MappingProxyType

import missing_here
import pytest

SOURCES = Path(__file__).parents[2] / "notebooks" / "assignments"


needs_confinement = pytest.mark.skipif(bool(missing_here.confinement()), reason=missing_here.confinement())


def hand_in(folder: Path, topic: str, solutions=MappingProxyType({}), changes=MappingProxyType({})) -> Path:
    """The teacher's notebook with some cells replaced, by name, and with changes in the text of its solutions.

    Every change has to find its place.
    """
    notebook = json.loads((SOURCES / f"{topic}.ipynb").read_text(encoding="utf-8"))
    missing = {*solutions, *changes}
    for cell in notebook["cells"]:
        role = cell["metadata"].get("nbgrader", {})
        name, text = role.get("grade_id", ""), "".join(cell["source"])
        missing -= {name, *(old for old in changes if role.get("solution") and old in text)}
        for old, new in changes.items() if role.get("solution") else ():
            text = text.replace(old, new)
        cell["source"] = solutions.get(name, text)
    assert not missing, f"{topic}: {missing} is not in the notebook"
    path = folder / f"{topic}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path
