"""What a submission meets in the grader is what its notebook met, argument by argument, type by type."""

import io
import json
from contextlib import redirect_stdout

import pytest
from submissions import SOURCES, hand_in, needs_confinement

from mooncake_lab.course.grading.cells import prepare
from mooncake_lab.course.grading.confine import Allowance
from mooncake_lab.course.grading.grade import ASSIGNMENTS
from mooncake_lab.course.grading.remote import Submission

PATIENT = Allowance(reply_s=120, cpu_s=400, wall_s=1800)

RECORDER = """

SEEN = globals().get("SEEN", {})
def _note(place, value, depth=0):
    SEEN.setdefault(place, set()).add(type(value).__name__)
    if depth < 6:
        if isinstance(value, dict):
            for part in [*value][:3]:
                _note(place + "{}", part, depth + 1)
                _note(place + "{}[]", value[part], depth + 1)
        elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "dict_keys":
            for part in [*value][:3]:
                _note(place + "[]", part, depth + 1)
        for field in (*getattr(value, "__struct_fields__", ()), *getattr(value, "__dataclass_fields__", ())):
            _note(place + "." + field, getattr(value, field), depth + 1)
def _recorded(function, skipped):
    def call(*given, **named):
        for place, value in enumerate(given[skipped:]):
            _note(f"{function.__name__}({place})", value)
        for name, value in named.items():
            _note(f"{function.__name__}({name})", value)
        return function(*given, **named)
    call.recorded = True
    return call
def _record():
    names = globals()
    for name in ("chain_keys", "matched_blocks", "lru_hit_rate"):
        if name in names and not hasattr(names[name], "recorded"):
            names[name] = _recorded(names[name], 0)
    for kind in ("MyPolicy", "MyChunking", "MyPlacement", "MyAdmission"):
        for method in vars(names[kind]).copy() if kind in names else ():
            made = getattr(names[kind], method)
            if callable(made) and method in METHODS and not hasattr(made, "recorded"):
                setattr(names[kind], method, _recorded(made, 1))
METHODS = ("__init__", "touch", "insert", "remove", "victim", "__contains__")
METHODS += ("plan", "place", "admit", "double_check")
_record()
def seen():
    return {place: sorted(kinds) for place, kinds in SEEN.items()}
"""


def in_the_notebook(path):
    """The types that a notebook meets when it is run from its first cell to its last, hidden tests left out."""
    names = {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            text = "".join(cell["source"]).split("### BEGIN HIDDEN TESTS")[0]
            with redirect_stdout(io.StringIO()):
                exec(compile(text, "cell", "exec"), names)  # noqa: S102  # the teacher's notebook
    return {place: set(kinds) for place, kinds in names["seen"]().items()}


def in_the_grader(path, topic):
    """The types that its cells meet while all tasks of the assignment are checked."""
    found = {}
    for task in ASSIGNMENTS[topic].tasks:
        with Submission(prepare(path, SOURCES / f"{topic}.ipynb").code, PATIENT) as submission:
            assert submission.failed_cells == ()
            task.check(submission, "3")
            for place, kinds in submission.call("seen", gives=dict[str, set[str]]).items():
                found.setdefault(place, set()).update(kinds)
    return found


@needs_confinement
@pytest.mark.parametrize("topic", sorted(ASSIGNMENTS))
def test_the_grader_asks_with_the_types_of_the_notebook(topic, tmp_path):
    """Every argument has the same types in both, and every part of it has none that the notebook lacks."""
    cells = json.loads((SOURCES / f"{topic}.ipynb").read_text(encoding="utf-8"))["cells"]
    roles = [(cell["metadata"].get("nbgrader", {}), "".join(cell["source"])) for cell in cells]
    solutions = {role["grade_id"]: text + RECORDER for role, text in roles if role.get("solution")}
    path = hand_in(tmp_path, topic, solutions)
    notebook, grader = in_the_notebook(path), in_the_grader(path, topic)
    assert len(grader) >= 4
    arguments = {place for place in grader if "." not in place and "[" not in place}
    arguments -= {"double_check(estimate)"}  # the notebook has a law more
    assert {place: grader[place] for place in arguments} == {place: notebook.get(place) for place in arguments}
    parts = {
        place for place in grader.keys() & notebook.keys() if not grader[place] <= {*notebook[place], "NoneType"}
    }
    assert {place: (grader[place], notebook[place]) for place in parts} == {}
