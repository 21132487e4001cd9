"""Sums of floats have the same bits on every Python, and no other sums of floats are in the package."""

import ast
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.core import sum_in_order

PACKAGE = Path(__file__).parents[2] / "mooncake_lab"

WHOLE_NAME = re.compile(r"(^|_)(tokens|blocks|bytes|nbytes|requests|counts?|steps|holders|points|ids|sizes?|new)$")
"""How names of whole numbers end, and names of what holds or returns them."""
WHOLE_CALLS = {"len", "int", "bool", "isinstance", "is_alive", "__contains__", "isdisjoint", "padded"}
HOLDS_THE_SAME = {"list", "tuple", "sorted", "filter", "map"}
WHOLE = {
    "serving/roles/prefill.py": {"blocks_for(one.tokens, size)"},
    "store/tiered_store.py": {"tier.counters.damaged"},
    "book/rendering/expressions.py": {"sum"},
    "book/rendering/chapters.py": {"_lines(cell)"},
    "batching/instance.py": {
        "expected.values()",
        "max(0, self._reserving.reservation(each, self.limits) - each.held_blocks)",
    },
    "batching/one_stage.py": {"batch.advance(request, request.pending_tokens)"},
    "batching/plan.py": {"_blocks_needed(segment, known[segment.request_id], limits)"},
    "batching/vllm_v1.py": {"-(-each.num_tokens // limits.block_size_tokens) - each.held_blocks"},
    "book/chapters/chunked/experiment.py": {"start", "size * start + size * (size + 1) // 2"},
    "book/chapters/compression/claims.py": {"getattr(held, f'{side}_bytes')"},
    "book/chapters/compression/experiment.py": {"mark.right", "mark[name].right"},
    "book/chapters/live/measure.py": {"CLUSTERS[cluster]"},
    "course/grading/grade.py": {"mark.earned"},
    "book/paper/pages.py": {
        "row.verdict == Verdict.REPRODUCED.value and row.claim.is_of_mooncake",
    },
    "cli/model.py": {"each.layers"},
    "perf/hf_config.py": {"by_rule"},
    "perf/kvcache.py": {"group.layers * group.token_bytes", "group.layers * group.state_bytes"},
    "perf/calibration.py": {"self.inputs[one] + self.tokens[one] - 1"},
    "perf/cpp.py": {"cut"},
    "perf/latency.py": {"new * (2 * before + new)"},
    "perf/runahead.py": {"bounds[:-1]"},
    "serving/calibration.py": {"tokens - reused", "batch * (STEPS + 2 + batch)", "row[0]"},
    "serving/clients.py": {"max(1, min(len(each.contexts), most))"},
    "serving/measuring.py": {"request.known"},
    "simulation/coupled.py": {"held - self._in_memory_blocks(request_id)"},
    "simulation/kv_transfer.py": {"min(size, most - place * size)"},
    "store/backed_tier.py": {"layers", "list(freeing.values())"},
    "workload/trace_summary.py": {"uses"},
    "store/replay.py": {
        "accesses", "self.accesses_by_request", "self.hits_by_request", "self.prefix_hits_by_request",
    },
    "store/backends/ssd.py": {"map(_footprint, self._freed)"},
}  # fmt: skip
"""Summands that are whole numbers although their names do not say it: what is summed, by file.

The `sum` of the expressions is one that statements may call, on what prose prints with few digits."""


def name_of(node: ast.expr) -> str:
    """The last name of an expression: of what it calls, reads or indexes."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.Call(func=inner):
            return name_of(inner)
    return ""


def is_whole(node: ast.expr) -> bool:
    """Whether an expression is a whole number by its form or its name."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int)
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv() | ast.Mod()):
            return is_whole(node.left) and is_whole(node.right)
        case ast.BoolOp(values=parts) | ast.Call(func=ast.Name(id="min" | "max"), args=parts):
            return all(map(is_whole, parts))
        case ast.Call(func=ast.Name(id="sum"), args=[values, *_]):
            return holds_whole(values)
    called = isinstance(node, ast.Call) and name_of(node) in WHOLE_CALLS
    return called or bool(WHOLE_NAME.search(name_of(node)))


def holds_whole(node: ast.expr) -> bool:
    """Whether an expression gives whole numbers only."""
    match node:
        case ast.GeneratorExp(elt=each) | ast.ListComp(elt=each):
            return is_whole(each)
        case ast.Call(func=ast.Name(id="map"), args=[function, *_]):
            return name_of(function) in WHOLE_CALLS or bool(WHOLE_NAME.search(name_of(function)))
        case ast.Call(func=ast.Name(id=name), args=[*_, values]) if name in HOLDS_THE_SAME:
            return holds_whole(values)
        case ast.Call(func=ast.Attribute(attr="values", value=held)):
            return bool(WHOLE_NAME.search(name_of(held)))
    return bool(WHOLE_NAME.search(name_of(node)))


def doubtful(source: str) -> list[tuple[int, str]]:
    """Line and summand of each use of the builtin `sum` that may add floats; a `sum` that is passed on is one."""
    tree = ast.parse(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "sum":
            call = calls.get(id(node))
            values = call.args[0] if call and call.args else node
            if call is None or not holds_whole(values) or not all(map(is_whole, call.args[1:])):
                inner = values.elt if isinstance(values, ast.GeneratorExp | ast.ListComp) else values
                found.append((node.lineno, ast.unparse(inner)))
    return found


@given(st.lists(st.floats(-1e9, 1e9), max_size=50))
def test_floats_are_added_one_after_the_other(values):
    """The sum is the last running total; that of nothing is 0.0."""
    assert sum_in_order(values) == [0.0, *itertools.accumulate(values)][-1]
    assert type(sum_in_order(values)) is float


def test_rounding_errors_stay():
    """Ten tenths are a little less than 1, as on Python 3.11, whose sums the golden logs hold."""
    assert sum_in_order([0.1] * 10) == 0.9999999999999999
    assert sum_in_order([1e100, 1.0, -1e100]) == 0.0


def test_no_builtin_sum_adds_floats():
    """Each builtin `sum` of the package adds whole numbers, by the unit in the name or as listed in `WHOLE`."""
    found, listed = [], {(name, text) for name, texts in WHOLE.items() for text in texts}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        for line, text in doubtful(path.read_text(encoding="utf-8")):
            if text not in WHOLE.get(name, ()):
                found.append(f"{name}:{line}: sum of {text}: use core.sum_in_order, or a name that says the unit")
            listed.discard((name, text))
    assert (found, listed) == ([], set())


@pytest.mark.parametrize(
    "source",
    [
        "sum(load_s)", "sum(x / 2 for x in sizes)", "sum([0.5])", "sum(steps, 0.0)", "sum(map(float, sizes))",
        "sum(seconds.values())", "sum(cost.step_s(n) for n in sizes)", "reduce(sum, parts)",
        "sum(2.5 * n for n in tokens)", "sum(max(0, x_s) for x_s in gaps)",
    ],
)  # fmt: skip
def test_sums_of_floats_are_found(source):
    """Each of these is refused: quotients, floats, seconds, a start that is a float, and `sum` as a value."""
    assert doubtful(source)


@pytest.mark.parametrize(
    "source",
    [
        "sum(len(x) for x in parts)", "sum(map(len, parts))", "sum(block in held for block in blocks)",
        "sum(part.nbytes for part in parts)", "sum(sizes)", "sum(1 for _ in parts)", "sum(kv_bytes.values())",
    ],
)  # fmt: skip
def test_sums_of_whole_numbers_pass(source):
    """Counts, lengths, comparisons and names with whole units are left to the builtin."""
    assert not doubtful(source)


def test_only_exact_means_and_medians_come_from_the_library():
    """The package uses `fmean`, which rounds once, and `median`: both are the same on each Python."""
    used = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id="statistics"), attr=name):
                    used.add(name)
                case ast.ImportFrom(module="statistics", names=names):
                    used |= {each.name for each in names}
    assert used <= {"fmean", "median"}
