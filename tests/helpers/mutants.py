"""What the tests notice: plant one small fault at a time in a package, run the package's tests, print the scores.

    python tests/helpers/mutants.py [TARGET ...] [--count 10] [--seed 0 ...] [--tests FILE ...]    (make mutants)

A target is a package, or one of its modules (`cluster/instances`). A fault changes one expression: a comparison,
an operator, a number, a condition. A target's score is the share of its faults with which at least one of its
package's tests fails. A survivor is printed with its line; either a test lacks, or the line has no consequence and
can go. When tests are merged or deleted, the score should not fall.

The tests are imported once. A first run without a fault tells which tests call which functions. For each fault a
process is forked, which replaces the code of the function and runs those tests until one fails: first those that
noticed other faults, then those of the quickest files. A fault outside of functions, or in one that an
import calls, needs the imports again: its process starts without them, and runs all tests of the package. A run
that computes several times as long as without the fault has noticed it; one that a busy machine delays has not.
"""

import argparse
import ast
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from copy import deepcopy
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    "batching": ["tests/contract/test_batching_policies.py"],
    "conductor": ["tests/contract/test_placement_policies.py"],
    "store": ["tests/contract/test_storage_backends.py", "tests/contract/test_eviction_policies.py"],
}
PACKAGES = ("book/paper", "perf", "metrics", "store", "batching", "conductor", "cluster")
OPERATORS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
PRELOADED = ["pytest", "numpy", "pandas", "msgspec"]
"""Imported once, before the package and its tests. No plugins: pytest has to import these itself."""


MOST_BYTES = 6 << 30
"""Memory of one run: a loop without an end may fill it before its time is over."""


class Fault(NamedTuple):
    """One changed expression of a file, and the whole text with it."""

    path: Path
    line: int
    before: str
    after: str
    text: bytes


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
    """Each fault of a file."""
    text = path.read_bytes()
    tree = ast.parse(text)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    settings = [part for node in classes for part in (*node.decorator_list, *node.keywords)]
    inert = {part for setting in settings for part in ast.walk(setting)}  # frozen=True: without consequence
    for node in ast.walk(tree):
        if node not in inert and (other := changed(node)) is not None:
            yield fault(path, text, node, other)


def fault(path, text, node, other):
    """The fault that puts another expression in the place of a node; parentheses keep what stands around it."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    after = ast.unparse(other)
    return Fault(path, node.lineno, ast.unparse(node), after, text[:begin] + f"({after})".encode() + text[end:])


def codes(code, outer=None):
    """Each code object in a module, with the outermost function that it is in."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            function = part.co_flags & 2  # CO_NEWLOCALS: a function or lambda, not the body of a class
            inside = outer or (part if function else None)
            yield part, inside
            yield from codes(part, inside)


def planted(fault):
    """The outermost function of which a fault changes the code: with it and without; None where there is none."""
    before, after = (
        list(codes(compile(text, str(fault.path), "exec"))) for text in (fault.path.read_bytes(), fault.text)
    )
    if len(before) != len(after):
        return None
    different = {
        id(old): (old, new)
        for (part, old), (other, new) in zip(before, after, strict=True)
        if old and new and own(part) != own(other)
    }
    return next(iter(different.values())) if len(different) == 1 else None


def own(code):
    """What a code object does itself, without the code objects in it and without line numbers."""
    constants = [
        (type(one).__name__, repr(one)) for one in code.co_consts if not isinstance(one, CodeType)
    ]  # 1 == True
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars


def place(code):
    """What identifies a function of the package."""
    return code.co_filename, code.co_firstlineno, code.co_qualname


class Planter:
    """Plugin of pytest: instead of the tests, runs them once without a fault and then with each of some faults."""

    def __init__(self, folder, faults, limit_s, answer):
        self.folder, self.faults, self.limit_s, self.answer = str(folder), faults, limit_s, answer
        self.calls = self.on_import = set()  # the functions that are called now
        self.by_fixture = defaultdict(set)
        self.failed = Counter()  # by test: faults that it noticed

    def trace(self, frame, _event, _argument):
        if frame.f_code.co_filename.startswith(self.folder):
            self.calls.add(place(frame.f_code))

    def pytest_collection(self):
        sys.settrace(self.trace)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before, self.calls = self.calls, self.by_fixture[fixturedef.argname]
        yield
        self.calls = before

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        sys.settrace(None)
        threading.settrace(None)
        known = in_process(lambda: self.survey(session), None)
        if known is None or known[1] is None:
            return True  # and no answer
        functions = defaultdict(list)
        for each in gc.get_objects():
            if isinstance(each, FunctionType):
                functions[place(each.__code__)].append(each)
        gc.freeze()  # or each process copies the memory of all objects
        seconds = self.seconds(session, known[1][1])
        self.answer.send(sorted(map(str, seconds), key=lambda path: seconds[Path(path)]))
        for fault in self.faults:
            self.answer.send(self.meets(session, functions, fault, *known[1]))
        return True

    def survey(self, session):
        """By test: the functions that it calls, and the seconds that it computes."""
        called, spent_s = [], []
        caches = [each for each in gc.get_objects() if isinstance(each, functools._lru_cache_wrapper)]
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            for each in caches:  # filled by another test
                each.cache_clear()
            self.calls, begun_s = set(), time.process_time()
            called.append(self.calls)
            threading.settrace(self.trace)
            sys.settrace(self.trace)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            sys.settrace(None)
            if session.testsfailed:
                return None
            for name in item.fixturenames:
                called[-1] |= self.by_fixture[name]
            spent_s.append(time.process_time() - begun_s)
        return called, spent_s

    @staticmethod
    def seconds(session, spent_s):
        """By test file: the seconds that its tests compute."""
        files = Counter()
        for item, seconds in zip(session.items, spent_s, strict=True):
            files[item.path] += seconds
        return files

    def meets(self, session, functions, fault, called, spent_s):
        """Whether a fault is noticed; None where the imports have to be done again."""
        change = planted(fault)
        if change is None or place(change[0]) in self.on_import:
            return None
        old, new = change
        files = self.seconds(session, spent_s)
        items = [i for i in range(len(session.items)) if place(old) in called[i]]
        items.sort(key=lambda i: (-self.failed[i], files[session.items[i].path], i))

        def run():
            for function in functions[place(old)]:
                function.__code__ = new
            for i, following in itertools.zip_longest(items, items[1:]):
                item, after = session.items[i], None if following is None else session.items[following]
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if session.testsfailed:
                    return i
            return None

        outcome = in_process(run, self.limit_s, 5 + 4 * sum(spent_s[i] for i in items))
        if outcome is None:
            return False
        crashed, failed = outcome
        if failed is not None:
            self.failed[failed] += 1
        return crashed or failed is not None


def in_process(run, limit_s, cpu_s=None):
    """What a function returns in a forked process, after whether that crashed or computed longer than `cpu_s`.

    None where it did not end within the limit.
    """
    receive, send = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        code = 1
        try:
            if cpu_s is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 1))
                resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
            send.send((False, run()))
            code = 0
        finally:
            os._exit(code)
    send.close()
    try:
        answer = receive.recv() if receive.poll(limit_s) else None
    except EOFError:
        answer = (True, None)
    if answer is None:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    receive.close()
    if os.waitstatus_to_exitcode(status) == 1:
        raise RuntimeError("a process of this tool failed by itself")
    return answer


def pytest_run(copy, tests, *plugins):
    """Run tests in the copy of a checkout; pytest's exit code."""
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
    quick = "not slow and not gpu and not site"
    return int(pytest.main(["-x", "-q", "-s", "-p", "no:cacheprovider", "-m", quick, *tests], plugins=plugins))


def noticed(copy, tests, package, planted, limit_s):
    """For each fault of a package in the copy, whether the tests notice it."""
    receive, send = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        pytest_run(copy, tests, Planter(copy / "mooncake_lab" / package, planted, limit_s, send))
        os._exit(0)
    send.close()
    usual_s = None
    try:
        quickest_first = receive.recv()
    except EOFError:
        sys.exit(f"{' '.join(tests)} fail without a fault")
    for fault in planted:
        seen = receive.recv()
        if seen is None:
            if usual_s is None:
                _, usual_s = in_process(lambda: (pytest_run(copy, tests), time.process_time())[1], None)
            seen = meets_imports(copy, quickest_first, fault, limit_s, 5 + 4 * usual_s)
        if not seen:
            where = f"{fault.path.relative_to(copy)}:{fault.line}"
            sys.stdout.write(f"survived: {where}: {fault.before}  ->  {fault.after}\n")
            sys.stdout.flush()
        yield seen
    os.waitpid(child, 0)


def meets_imports(copy, tests, fault, limit_s, cpu_s):
    """Whether all tests of a package, with the fault in its file, notice it."""

    def run():
        sys.dont_write_bytecode = True
        return pytest_run(copy, tests)

    original, stat = fault.path.read_bytes(), fault.path.stat()
    fault.path.write_bytes(fault.text)
    os.utime(fault.path, (0, 0))  # or Python would take the bytecode of a text of the same size and time
    outcome = in_process(run, limit_s, cpu_s)
    fault.path.write_bytes(original)
    os.utime(fault.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return outcome is not None and outcome != (False, 0)


def copied(folder):
    """A copy of the checkout, as it is now."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def drawn(copy, target, count, seed):
    """Some faults of a package or module in the copy."""
    path = copy / "mooncake_lab" / target
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    every = [fault for file in files for fault in faults(file)]
    return random.Random(seed).sample(every, min(count, len(every)))


def package_of(target):
    """The package of a target; the parts of the book are packages of their own."""
    return "/".join(target.split("/")[: 2 if target.startswith("book/") else 1])


def main(draw=drawn):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=PACKAGES, help="by default paper to cluster")
    parser.add_argument("--count", type=int, default=10, help="faults of a target")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="which faults")
    parser.add_argument(
        "--limit-s", type=float, default=600, help="longest run; one that is longer noticed nothing"
    )
    parser.add_argument("--tests", nargs="+", help="these files, and not all tests of the package")
    given = parser.parse_args()
    for name in PRELOADED:
        importlib.import_module(name)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for package, targets in itertools.groupby(given.targets, package_of):
            cases = [
                (target, seed, draw(copy, target, given.count, seed)) for target in targets for seed in given.seed
            ]
            every = [fault for *_, some in cases for fault in some]
            tests = given.tests or [f"tests/{package}", *CONTRACTS.get(package, [])]
            found = iter(list(noticed(copy, tests, package, every, given.limit_s)))
            rows += [
                (target, seed, len(some), sum(itertools.islice(found, len(some)))) for target, seed, some in cases
            ]
    sys.stdout.write(f"\n{'target':28} {'seed':>4} {'planted':>7} {'noticed':>7} {'score':>6}\n")
    for target, seed, count, seen in rows:
        sys.stdout.write(f"{target:28} {seed:4} {count:7} {seen:7} {seen / count:6.0%}\n")


if __name__ == "__main__":
    main()
