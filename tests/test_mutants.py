"""The faults that `make mutants` plants."""

import ast

from mutants import faults, planted

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
