"""Sample submissions to every assignment, from right to malicious, and their grades in the guide for teachers.

`PYTHONPATH=tests/helpers python tests/course/test_samples.py` grades them and writes the table into book/teach.md.
"""

import json
import re
import tempfile
from itertools import accumulate
from pathlib import Path

import pytest
from submissions import SOURCES, hand_in, needs_confinement

from mooncake_lab.course.grading.confine import Allowance
from mooncake_lab.course.grading.grade import ASSIGNMENTS, grade

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "book" / "teach.md"
MARKED = re.compile(r"(?<=<!-- samples: begin -->\n).*?(?=<!-- samples: end -->)", re.DOTALL)
PATIENT, IMPATIENT = Allowance(reply_s=60.0, wall_s=1800.0), Allowance(reply_s=3.0)
"""A busy machine does not cost a submission its points, and the one that never answers costs little time."""
SEED = 4711
LONGEST_REMARK = 160
"""Letters of a remark that the guide shows; students get all of it."""

NEVER = "never answers"
RIGHT = ("right", "the teacher's solution", {})
SAMPLES = {
    "keys": [
        RIGHT,
        (
            "partly right",
            "a key hashes only its own block",
            {"key + repr(tokens[start": "repr(tokens[start"},
        ),
        (
            "wrong",
            "the cell raises an error",
            {"def chain_keys": 'raise RuntimeError("half done")\ndef chain_keys'},
        ),
        (
            "malicious",
            "replaces the grader's `require` and returns nothing",
            {
                "def chain_keys": "import mooncake_lab.course.grading.cache_assignments as grader\n"
                "grader.require = lambda *_: None\ndef chain_keys",
                "return keys": "return []",
                "hits / accesses": "1.0",
                "return count": "return 0",
            },
        ),
    ],
    "eviction": [
        RIGHT,
        ("partly right", "plain LRU", {"self.ghosts.pop(key, False)": "True"}),
        ("wrong", "does not forget its victim", {"del queue[key]": "pass"}),
        ("malicious", NEVER, {"first_once = ": "while True: pass\n        first_once = "}),
    ],
    "chunked": [
        RIGHT,
        (
            "partly right",
            "does not cut prompts",
            {"left, places = self.chunk_tokens,": "left, places = limits.max_batch_tokens // 2,"},
        ),
        ("wrong", "plans nothing", {"tuple(segments)": "()"}),
        (
            "malicious",
            "floods the memory",
            {"self.chunk_tokens = chunk_tokens": "self.chunk_tokens = bytearray(64 * 2**30)"},
        ),
    ],
    "placement": [
        RIGHT,
        ("partly right", "never fetches", {"fetches = ratio > self.threshold": "fetches = False"}),
        ("wrong", "takes the longest queue", {"= min(answers": "= max(answers"}),
        (
            "malicious",
            "writes outside its folder",
            {"    threshold = 1.5": '    threshold = 1.5\n    open("/tmp/owned", "w").write("x")'},
        ),
    ],
    "admission": [
        RIGHT,
        (
            "partly right",
            "looks at decode only after the prefill",
            {"if estimate.decode_step_s(requests, tokens) > slo.tbt_s": "if False"},
        ),
        ("wrong", "rejects every request", {"> slo.ttft_s": "> -1.0"}),
        (
            "malicious",
            "claims ten points and ends the process",
            {"    def admit(": '    print("10 / 10")\n    import os; os._exit(0)\n\n    def admit('},
        ),
    ],
}


def graded(topic):
    """The rows of one assignment: kind, what it does, points, remark on the first lost task."""
    for kind, what, changes in SAMPLES[topic]:
        allowance = IMPATIENT if what == NEVER else PATIENT
        with tempfile.TemporaryDirectory() as folder:
            path = hand_in(Path(folder), topic, changes=changes)
            found = grade(path, SOURCES / f"{topic}.ipynb", student=kind, seed=SEED, allowance=allowance)
        lost = next((f"{mark.task}: {mark.said}" for mark in found.marks if not mark.earned), "nothing was lost")
        short = lost if len(lost) <= LONGEST_REMARK else f"{lost[:LONGEST_REMARK].rsplit(maxsplit=1)[0]} …"
        yield kind, what, f"{found.earned} / {found.points}", short.replace("|", "\\|")


def table(topic):
    """The rows of one assignment as the guide shows them."""
    return "".join(f"| `{topic}` | {' | '.join(row)} |\n" for row in graded(topic))


def rubric():
    """The sums of points that the guide promises, by topic."""
    guide = GUIDE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d +]+) \|", guide, re.MULTILINE)
    return {topic: [int(points) for points in sums.split("+")] for topic, sums in rows}


@pytest.mark.slow
@needs_confinement
@pytest.mark.parametrize("topic", sorted(ASSIGNMENTS))
def test_samples_get_what_the_guide_says(topic):
    """Every row of the guide is what grading gives today."""
    assert table(topic) in MARKED.search(GUIDE.read_text(encoding="utf-8"))[0]


def test_the_rubric_adds_up_as_the_tasks_do():
    """The guide's sums end where a task ends, and at ten."""
    assert set(rubric()) == set(ASSIGNMENTS)
    for topic, sums in rubric().items():
        ends = list(accumulate(sums))
        assert set(ends) <= set(accumulate(task.points for task in ASSIGNMENTS[topic].tasks))
        assert ends[-1] == 10


def test_the_notebooks_points_are_those_of_the_rubric():
    """What nbgrader reads in a notebook, cell by cell, ends where a sum of the guide ends, and at ten."""
    for topic, sums in rubric().items():
        cells = json.loads((SOURCES / f"{topic}.ipynb").read_text(encoding="utf-8"))["cells"]
        roles = [cell["metadata"].get("nbgrader", {}) for cell in cells]
        ends = list(accumulate(role["points"] for role in roles if role.get("grade")))
        assert set(ends) <= set(accumulate(sums)), topic
        assert ends[-1] == ASSIGNMENTS[topic].points


def test_the_plan_says_of_each_assignment_what_its_head_says():
    """Difficulty, minutes and chapters are the same in the guide and at the top of the assignment."""
    guide = GUIDE.read_text(encoding="utf-8")
    plan = re.findall(r"^\* - `(\w+)`, (\w+), (\d+) minutes, chapters? (.+)$", guide, re.MULTILINE)
    assert {topic for topic, *_ in plan} == set(ASSIGNMENTS)
    for topic, difficulty, minutes, chapters in plan:
        head = json.loads((SOURCES / f"{topic}.ipynb").read_text(encoding="utf-8"))["cells"][0]["source"]
        said = re.search(
            r"^\*(\w+), about (\d+) minutes\. Before: chapters? (\d+(?: and \d+)?)", "".join(head), re.MULTILINE
        )
        assert said.groups() == (difficulty.capitalize(), minutes, re.sub(r"\[(\d+)\]\(\S+?\)", r"\1", chapters))


@pytest.mark.parametrize("topic", SAMPLES)
def test_the_guides_points_are_in_order(topic):
    """All points for the right one, some for the partly right, fewer for the wrong, none for the malicious."""
    guide = MARKED.search(GUIDE.read_text(encoding="utf-8"))[0]
    found = dict(re.findall(rf"^\| `{topic}` \| ([\w ]+) \|.*?\| (\d+) / 10 \|", guide, re.MULTILINE))
    earned = [int(found[kind]) for kind in ("right", "partly right", "wrong", "malicious")]
    assert earned[0] == 10 > earned[1] > earned[2] >= earned[3] == 0


if __name__ == "__main__":
    head = "| assignment | submission | what it does | points | remark on the first lost task |\n"
    rows = head + "| --- | --- | --- | --- | --- |\n" + "".join(table(topic) for topic in SAMPLES)
    GUIDE.write_text(MARKED.sub(lambda _: f"\n{rows}\n", GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
