"""The faults that `make mutants` plants."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mutants
from mutants import faults, package_of, planted

CODE = '''
"""Text."""
@dataclass(frozen=True)
class C(B, gc=False): ...
def f(a: int, b=1.5) -> int:
    if not a < b or a == 2 and f(min(a, b)) // 3 - 1:
        return [a][0] if a else -a
'''


def test_a_fault_changes_the_meaning_of_one_line_and_keeps_the_syntax(tmp_path):
    """Each text parses, differs from the original in one line, and no two faults are the same program."""
    path = tmp_path / "module.py"
    path.write_text(CODE)
    found = list(faults(path))
    programs = {ast.dump(ast.parse(text)) for *_, text in found}
    assert len(programs | {ast.dump(ast.parse(CODE))}) == len(found) + 1
    for _, line, *_, text in found:
        pairs = zip(CODE.splitlines(), text.decode().splitlines(), strict=True)
        assert [i for i, (before, after) in enumerate(pairs, 1) if before != after] == [line]
    assert [fault.before for fault in found if fault.line == 7] == ["[a][0] if a else -a", "0"]


def test_only_a_fault_in_a_function_is_put_into_a_running_program(tmp_path):
    """The code of the function differs then, and that of no other; defaults and classes need an import."""
    path = tmp_path / "module.py"
    path.write_text(CODE + "def g():\n    return [lambda: 7]\n")
    for fault in faults(path):
        change = planted(fault)
        if fault.line < 6 or fault.before == "1.5":
            assert change is None
        else:
            assert {code.co_name for code in change} == {"g" if fault.line == 8 + 1 else "f"}
            assert change[0] != change[1]


MODULE = """LIMIT = 3

def used(a):
    return a + LIMIT if a < 10 else 0

def unused():
    return 1 + 1
"""
TESTS = """from mooncake_lab.small.module import used

def test_used():
    assert [used(1), used(9), used(10)] == [4, 12, 0]
"""


def test_survivors_are_the_faults_that_no_test_meets(tmp_path):
    """In functions and outside of them: of a package of two functions, those of the one that is not called."""
    texts = {
        "mooncake_lab/__init__.py": "", "mooncake_lab/small/__init__.py": "",
        "mooncake_lab/small/module.py": MODULE, "tests/small/test_module.py": TESTS,
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    tool = tmp_path / "tests/helpers/mutants.py"
    tool.parent.mkdir()
    shutil.copy(Path(mutants.__file__), tool)
    for command in (["git", "init", "-q"], ["git", "add", "."]):
        subprocess.run(command, cwd=tmp_path, check=True)
    command = [sys.executable, str(tool), "small/module", "--count", "99", "--seed", "0", "1"]
    said = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    survived = re.findall(r"^survived: mooncake_lab/small/module.py:(\d+): ", said, re.MULTILINE)
    assert survived == ["7"] * 6
    planted_at = len(list(faults(tmp_path / "mooncake_lab/small/module.py")))
    rows = re.findall(r"^small/module +(\d) +(\d+) +(\d+) ", said, re.MULTILINE)
    assert [tuple(map(int, row)) for row in rows] == [(seed, planted_at, planted_at - 3) for seed in (0, 1)]


def test_a_part_of_the_book_is_a_package():
    """Its faults are held against its own tests, not against those of the whole book."""
    targets = ["book/paper", "book/paper/claims", "cluster/workers", "store/backends/ssd", "store"]
    assert [package_of(each) for each in targets] == ["book/paper", "book/paper", "cluster", "store", "store"]
