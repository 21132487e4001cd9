"""What students write beside the solution works if the solution needs it, and whatever is left out is named."""

import ast
import json

import pytest
from submissions import SOURCES, needs_confinement

from mooncake_lab.course.grading.cells import prepare
from mooncake_lab.course.grading.confine import Allowance
from mooncake_lab.course.grading.grade import grade

TEACHER = SOURCES / "keys.ipynb"
USES = "def chain_keys(t, n):\n    return helper(t, n)"


def notebook_with(folder, *added, solution=USES, before=True, cell=""):
    """A submission to `keys` with added cells; or with more text in a cell of the assignment."""
    notebook = json.loads(TEACHER.read_text(encoding="utf-8"))
    cells = notebook["cells"]
    names = [each["metadata"].get("nbgrader", {}).get("grade_id") for each in cells]
    if solution:
        cells[names.index("chain-keys")]["source"] = solution
    if cell:
        place = cells[names.index(cell)]
        place["source"] = "".join(place["source"]) + "\n" + "\n".join(added)
    else:
        place = 0 if before else len(cells)
        cells[place:place] = [
            {"cell_type": "code", "metadata": {}, "source": text, "outputs": [], "execution_count": None}
            for text in added
        ]
    path = folder / "keys.ipynb"
    path.write_text(json.dumps(notebook), encoding="utf-8")
    return path


def executed(handed):
    """The names that the cells leave, executed one after the other."""
    names = {}
    for each in handed.code:
        exec(compile(each.text, each.name, "exec"), names)  # noqa: S102  # cells of this test
    return names


HELPERS = [
    "from functools import partial\nhelper = partial(max, 1)",
    (
        "try:\n    import no_such_module as fast\nexcept ImportError:\n    fast = None\n"
        "helper = lambda t, n: 2 if fast is None else 1"
    ),
    "import numpy as np\nTABLE = np.arange(9)\ndef helper(t, n): return int(TABLE[2])",
    (
        "import logging\nlog = logging.getLogger('mine')\nlog.setLevel(logging.ERROR)\n"
        "def helper(t, n):\n    log.info(t)\n    return 2"
    ),
    "count = 0\ncount += 1\ncount += 1\ndef helper(t, n): return count",
    "import io\nwith io.StringIO('2') as file:\n    two = int(file.read())\ndef helper(t, n): return two",
    "table = {}\nfor i in range(3):\n    table[i] = i\ndef helper(t, n): return table[2]",
    (
        "makers = []\nfor i in range(3):\n    def make(i=i): return i\n    makers.append(make)\n"
        "def helper(t, n): return makers[2]()"
    ),
    "def twice(f): return lambda *a: 2 * f(*a)\n@twice\ndef helper(t, n): return 1",
    "def make():\n    return lambda t, n: 2\nhelper = make()",
    (
        "class Hash:\n    size = len('ab')\n    @classmethod\n    def of(cls, t, n): return cls.size\n"
        "helper = Hash.of"
    ),
    "from math import *\ndef helper(t, n): return int(sqrt(4))",
    "if 3 > 2:\n    def helper(t, n): return 2\nelse:\n    helper = None",
    "a, (b, *c) = [int('1'), (int('2'), 3)]\ndef helper(t, n): return b",
    "while (two := 2) < 2: pass\nhelper = lambda t, n: two",
    "match 2:\n    case two: pass\nhelper = lambda t, n: two",
    "def setup():\n    global two\n    two = sum([1, 1])\nsetup()\ndef helper(t, n): return two",
    (
        "class Box: pass\nBox.two = sum([2])\nbox = Box()\nbox.value = Box.two\ndel Box.two\n"
        "def helper(t, n): return box.value"
    ),
    "from functools import cached_property as c\nclass C: two = c(lambda c: 2)\nhelper = lambda t, n: C().two",
    "import random\nrandom.seed(1)\nhelper = lambda t, n: 2 + random.randrange(1)",
    (
        "from dataclasses import dataclass, field\n@dataclass\nclass D:\n    two: int = field(default=2)\n"
        "def helper(t, n): return D().two"
    ),
    "type_of = type(3)\nassert_it = 2\ndef helper(t: type_of, n): return assert_it",
    "x = y = z = int('2')\nhelper = lambda t, n: (x + y + z) // 3",
    "globals()['two'] = 2\nhelper = lambda t, n: two",
    "async def two(): return 2\nhelper = lambda t, n: 2",
    "import heapq\nheap = [3, 2]\nheapq.heapify(heap)\ndef helper(t, n): return heap[0]",
    "table = {}\ndef fill(t, n):\n    t[n] = 2\nfill(table, 5)\ndef helper(t, n): return table[5]",
    "class Settings: pass\nmine = Settings()\nsetattr(mine, 'two', 2)\ndef helper(t, n): return mine.two",
    "class Settings: pass\nmine = Settings()\nvars(mine).update(two=2)\ndef helper(t, n): return mine.two",
    "def rows(t): return [t]\nmine = [1]\nrows(mine)[0].append(2)\ndef helper(t, n): return mine[1]",
    "mine = [1]\nalias = mine\nalias.append(2)\ndef helper(t, n): return mine[1]",
    "mine = [1]\nalias = mine\nalias += [2]\ndef helper(t, n): return mine[1]",
    "import bisect\nrow = [1, 3]\nfor n in (2,):\n    bisect.insort(row, n)\ndef helper(t, n): return row[1]",
]


@pytest.mark.parametrize("added", HELPERS)
def test_helpers_of_all_kinds_work(tmp_path, added):
    """Whatever gives a value to a name that the solution uses is executed, however it is written."""
    handed = prepare(notebook_with(tmp_path, added), TEACHER)
    arguments = (1, 2) if "partial" in added else ([], 1)
    assert executed(handed)["chain_keys"](*arguments) == 2
    assert handed.remarks == ()
    in_pieces = prepare(notebook_with(tmp_path, *map(ast.unparse, ast.parse(added).body)), TEACHER)
    assert executed(in_pieces)["chain_keys"](*arguments) == 2
    assert in_pieces.remarks == ()


@pytest.mark.parametrize("cell", ["setup", "test-chain-keys", "test-lru-hit-rate"])
@pytest.mark.parametrize("added", HELPERS)
def test_helpers_written_into_a_given_cell_work(tmp_path, added, cell):
    """What a student adds to a cell of the assignment is treated like a cell of its own; the cell is put back."""
    handed = prepare(notebook_with(tmp_path, added, cell=cell), TEACHER)
    arguments = (1, 2) if "partial" in added else ([], 1)
    assert executed(handed)["chain_keys"](*arguments) == 2
    assert handed.remarks == ()


EXPERIMENTS = [
    "for _ in iter(int, 1): pass",
    "x = sum(iter(int, 1))",
    "print(sum(iter(int, 1)))",
    "report = [chain_keys(list(range(10**9)), 4)]",
    "assert matched_blocks([1], sum(iter(int, 1)))",
    "while True:\n    chain_keys([1], 1)",
    "hashlib.sha256(bytes(sum(iter(int, 1))))",
    "1 + 1",
    "with open('results.txt', 'w') as file:\n    file.write(str(sum(iter(int, 1))))",
    "results = [lru_hit_rate([[1]], c) for c in range(10**9)]\nplot(results)",
    "best = max(iter(int, 1))\nbest_two = best",
    "for capacity in (1, 2):\n    rate = lru_hit_rate([[1]] * 10**9, capacity)\n    print(rate)",
]


@pytest.mark.parametrize("added", EXPERIMENTS)
def test_experiments_are_left_out_and_each_is_named(tmp_path, added):
    """What no solution uses is not executed, wherever it stands, and a remark shows it and says why."""
    for where in ({"before": True}, {"before": False}, {"cell": "setup"}, {"cell": "test-matched-blocks"}):
        handed = prepare(notebook_with(tmp_path, added, solution="", **where), TEACHER)
        assert "chain_keys" in executed(handed)
        for statement in ast.parse(added).body:
            (line, *_) = ast.unparse(statement).splitlines()
            assert any(f"`{line[:50]}" in remark for remark in handed.remarks)
        assert all("no solution cell uses it" in each or "was left out" in each for each in handed.remarks)


@pytest.mark.parametrize(
    "added",
    ["exec('two = 2')", "globals().update(two=2)", "for n in (2,): vars()['two'] = n"],
)
def test_a_statement_that_hides_the_names_it_sets_is_named_as_that(tmp_path, added):
    """It is not executed, and the remark does not claim that no solution uses what it sets."""
    solution = "def chain_keys(t, n):\n    return two"
    handed = prepare(notebook_with(tmp_path, added, solution=solution), TEACHER)
    assert "two" not in executed(handed)
    (remark,) = handed.remarks
    assert "because the grader does not see which names it sets; write `name = value`: `" in remark


def test_a_value_of_the_solution_may_be_experimented_with(tmp_path):
    """A call that gets such a value together with what the solution makes is an experiment, and is left out."""
    experiment = "for capacity in range(10**9):\n    lru_hit_rate(TRACE, capacity)"
    solution = "def chain_keys(t, n):\n    return TRACE"
    handed = prepare(notebook_with(tmp_path, "TRACE = [[1]]", experiment, solution=solution), TEACHER)
    assert executed(handed)["chain_keys"]([], 1) == [[1]]
    assert any("`for capacity in range(10" in each for each in handed.remarks)


@pytest.mark.parametrize("text", ["import " + "a." * 40_000 + "b", "from " + "a . \\\n" * 9_000 + "b import c"])
def test_a_name_of_very_many_parts_is_refused_before_it_is_parsed(tmp_path, text):
    """Python's parser would take memory that grows with the square of their number: gigabytes for 95 kB."""
    with pytest.raises(ValueError, match="a name of more than 500 parts"):
        prepare(notebook_with(tmp_path, text), TEACHER)


def test_every_left_out_statement_is_named(tmp_path):
    """Three hundred of them, in one cell or in many, are all in the remarks of the page."""
    lines = [f"helper_{n} = print({n})" for n in range(300)]
    in_one = prepare(notebook_with(tmp_path, "\n".join(lines)), TEACHER).remarks
    assert all(f"`{line}`" in " ".join(in_one) for line in lines)
    assert max(map(len, in_one)) < 500
    assert len(in_one) < 50
    in_many = prepare(notebook_with(tmp_path, *lines), TEACHER).remarks
    assert all(f"`{line}`" in " ".join(in_many) for line in lines)


def test_a_definition_that_needs_what_was_left_out_is_left_out(tmp_path):
    """It would only raise; the remark names what it lacks, and plain definitions stay."""
    added = "data = open('huge.csv')\ndef show(rows=data): pass\nSIZE = 4\ndef used(): return SIZE"
    handed = prepare(notebook_with(tmp_path, added, solution=""), TEACHER)
    names = executed(handed)
    assert names["used"]() == 4
    assert "show" not in names
    assert any("it needs 'data', which was left out: `def show(rows=data):`" in each for each in handed.remarks)


def test_what_replaces_a_given_name_is_left_out(tmp_path):
    """A given cell is put back: the student's version of what it defines is named and not executed."""
    path = tmp_path / "placement.ipynb"
    teacher = SOURCES / "placement.ipynb"
    text = teacher.read_text(encoding="utf-8")
    path.write_text(text.replace('reason=\\"mine\\"', 'reason=\\"other\\"'), encoding="utf-8")
    handed = prepare(path, teacher)
    assert not any('"other"' in each.text or "'other'" in each.text for each in handed.code)
    (remark,) = handed.remarks
    assert remark.startswith(
        "left out of cell 'finish', because it replaces what the assignment gives: `def finish("
    )


def test_a_later_definition_replaces_a_solution(tmp_path):
    """As in the notebook, the last one counts: a wrapper around it, or a patch of it."""
    handed = prepare(
        notebook_with(
            tmp_path,
            "import functools\nchain_keys = functools.lru_cache(chain_keys)\nchain_keys.limit = max(1, 2)",
            solution="def chain_keys(t, n):\n    return 1",
            before=False,
        ),
        TEACHER,
    )
    names = executed(handed)
    assert (names["chain_keys"](0, 0), names["chain_keys"].limit) == (1, 2)
    assert names["chain_keys"].cache_info().misses == 1


@needs_confinement
def test_a_slow_experiment_costs_nothing(tmp_path):
    """A right notebook with endless experiments between its cells earns all points, with helpers in use."""
    path = notebook_with(
        tmp_path,
        *EXPERIMENTS,
        "from functools import partial\nkeyed = partial(hashlib.sha256)",
        solution="def chain_keys(tokens, size):\n"
        "    starts = range(0, len(tokens), size)\n"
        "    return [keyed(repr((tokens[: s + size], s)).encode()).hexdigest() for s in starts]",
    )
    found = grade(path, TEACHER, student="ada", seed=1, allowance=Allowance(reply_s=60, wall_s=600))
    assert found.earned == 10, found
