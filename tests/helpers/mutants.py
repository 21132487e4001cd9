"""What the tests notice: plant one small fault at a time in a package, run the package's tests, print the scores.

    python tests/helpers/mutants.py [PACKAGE ...] [--count 10] [--seed 0]        (make mutants)

A fault changes one expression: a comparison, an operator, a number, a condition. A package's score is the share of
its faults with which at least one of its tests fails. A survivor is printed with its line; either a test lacks, or
the line has no consequence and can go. When tests are merged or deleted, the score should not fall.
"""

import argparse
import ast
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    "batching": ["tests/contract/test_batching_policies.py"],
    "conductor": ["tests/contract/test_placement_policies.py"],
    "store": ["tests/contract/test_storage_backends.py", "tests/contract/test_eviction_policies.py"],
}
PACKAGES = ("paper", "perf", "metrics", "store", "batching", "conductor", "cluster")
OPERATORS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
PRELOADED = ["pytest", "numpy", "pandas", "msgspec"]
"""Imported once; every run of the tests is forked from there. No plugins: pytest has to import these itself."""


def changed(node):
    """The node with its fault, or None where no fault is known."""
    other = deepcopy(node)
    match other:
        case ast.Compare(ops=[first, *rest]) if type(first) in OPERATORS:
            other.ops = [OPERATORS[type(first)](), *rest]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            other.op = OPERATORS[type(op)]()
        case ast.Constant(value=bool(value)):
            other.value = not value
        case ast.Constant(value=int(value) | float(value)):
            other.value = value + 1
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            other = operand
        case ast.IfExp(test=test):
            other.test = ast.UnaryOp(ast.Not(), test)
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            other.func = ast.Name("max" if name == "min" else "min")
        case _:
            return None
    return other


def faults(path):
    """Each fault of a file: its line, the expression before and after, and the whole text with it."""
    text = path.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(text)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    settings = [part for node in classes for part in (*node.decorator_list, *node.keywords)]
    inert = {part for setting in settings for part in ast.walk(setting)}  # frozen=True: without consequence
    for node in ast.walk(tree):
        if node not in inert and (other := changed(node)) is not None:
            begin, end = (
                starts[node.lineno - 1] + node.col_offset,
                starts[node.end_lineno - 1] + node.end_col_offset,
            )
            after = ast.unparse(other)
            # parentheses keep the meaning of what stands around the expression
            yield node.lineno, ast.unparse(node), after, text[:begin] + f"({after})".encode() + text[end:]


def tests_pass(copy, tests):
    """Run tests in the copy of a checkout, in a process of its own; its exit code is pytest's."""
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True  # two faults of one file may have the same size and time
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
    quick = "not slow and not gpu and not site"
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", quick, *tests]))


def noticed(context, copy, tests, limit_s):
    """Whether the tests fail, or take longer than the limit."""
    process = context.Process(target=tests_pass, args=(copy, tests))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.terminate()
        process.join()
    return process.exitcode != 0


def score(context, copy, package, *, count, seed, limit_s):
    """Plant faults in a package of the copy; how many there were, and how many the tests noticed."""
    tests = [f"tests/{package}", *CONTRACTS.get(package, [])]
    if noticed(context, copy, tests, limit_s):
        sys.exit(f"{' '.join(tests)} fail without a fault, or take longer than {limit_s} s")
    files = sorted((copy / "mooncake_lab" / package).rglob("*.py"))
    planted = [(path, fault) for path in files for fault in faults(path)]
    planted = random.Random(seed).sample(planted, min(count, len(planted)))
    found = 0
    for path, (line, before, after, text) in planted:
        original = path.read_bytes()
        path.write_bytes(text)
        seen = noticed(context, copy, tests, limit_s)
        path.write_bytes(original)
        found += seen
        if not seen:
            sys.stdout.write(f"survived: {path.relative_to(copy)}:{line}: {before}  ->  {after}\n")
    return len(planted), found


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="by default paper to cluster")
    parser.add_argument("--count", type=int, default=10, help="faults per package")
    parser.add_argument("--seed", type=int, default=0, help="which faults")
    parser.add_argument("--limit-s", type=float, default=300, help="longest run of a package's tests")
    given = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in listed.splitlines():
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder) / name)
        for package in given.packages:
            planted, found = score(
                context, Path(folder), package, count=given.count, seed=given.seed, limit_s=given.limit_s
            )
            rows.append(f"{package:12} {planted:7} {found:7} {found / planted:6.0%}")
    head = f"\n{'package':12} {'planted':>7} {'noticed':>7} {'score':>6}"
    sys.stdout.write("\n".join([head, *rows]) + "\n")


if __name__ == "__main__":
    main()
