"""Which files a result depends on."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mooncake_lab
from mooncake_lab.book.experiments.cache import code_digest, reached
from mooncake_lab.book.rendering.notebook import read_notebook

ROOT = Path(__file__).parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BY_COMPUTED_NAME = {
    "core/process.py",
    "cli/__init__.py",
    "book/rendering/expressions.py",
    "course/grading/given.py",
    "workload/formats/files.py",
}
"""Modules that import by a name which is no constant. Lazy packages and commands name modules beside them by
strings; expressions are computed after all executions, and not kept; a submission runs in a process of its own;
a compressed trace is read by the module that this Python has for it."""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that writes a package of some modules in place of this one."""

    def write(**modules):
        for name, code in modules.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
            (path.parent / "__init__.py").touch()
        monkeypatch.setattr(mooncake_lab, "__file__", str(tmp_path / "__init__.py"))
        return tmp_path

    return write


WAYS = {
    "at the top": "from mooncake_lab.in_it.deep import far",
    "inside a function": "def late():\n    from mooncake_lab.in_it.deep.far import x",
    "as a whole": "import mooncake_lab.in_it.deep.far as there",
    "from beside it": "from .deep import far",
    "by its name": 'run("python", "-m", "mooncake_lab.in_it.deep.far")',
    "by its name for a worker": 'POLICIES = {"one": "mooncake_lab.in_it.deep.far:Policy"}',
    "in code for another process": 'run("python", "-c", "from mooncake_lab.in_it.deep import near, far")',
    "by another module": "from mooncake_lab.in_it.deep import lazy",
    "by a computed name": 'import_module(f"{__name__}.{word}")',
}


class TestReached:
    """The files that some code may import."""

    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
    def test_an_edit_of_what_is_imported_counts(self, package, way):
        """However a module is imported, an edit of it gives another digest; one of a stranger does not."""
        lazy = 'names = {"far": ["x"]}'
        root = package(in_it__start=way, in_it__deep__far="x = 1", in_it__deep__lazy=lazy, stranger="x = 1")
        before = code_digest("import mooncake_lab.in_it.start")
        (root / "stranger.py").write_text("x = 2")
        assert code_digest("import mooncake_lab.in_it.start") == before
        (root / "in_it" / "deep" / "far.py").write_text("x = 2")
        assert code_digest("import mooncake_lab.in_it.start") != before

    def test_a_module_that_appears_counts(self, package):
        """An import that failed may find something now."""
        root = package(start="try:\n    import mooncake_lab.later\nexcept ImportError: pass")
        before = code_digest("import mooncake_lab.start")
        (root / "later.py").touch()
        assert code_digest("import mooncake_lab.start") != before

    def test_code_that_does_not_parse_may_import_anything(self, package):
        """The magic of a notebook counts for everything."""
        root = package(start="", other="")
        assert reached("%run mooncake_lab/other.py") == frozenset(root.rglob("*.py"))

    def test_a_program_beside_it_is_reached_by_the_name_of_its_file(self, package):
        """Worker processes start from a path."""
        root = package(pool__start='PROGRAM = Path(__file__).with_name("program.py")', pool__program="")
        assert root / "pool" / "program.py" in reached("import mooncake_lab.pool.start")


def test_no_module_imports_by_a_name_that_cannot_be_seen():
    """`import_module` gets a constant, but where lazy packages and commands are named by strings beside it."""
    package = ROOT / "mooncake_lab"
    computed = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        if getattr(node.func, "attr", getattr(node.func, "id", ""))
        in {"import_module", "__import__", "run_module"}
        if not isinstance(node.args[0], ast.Constant)
    }
    assert computed == BY_COMPUTED_NAME


def test_what_a_chapter_imports_was_foreseen():
    """Every module of the package that is there after a chapter's imports, names of lazy packages included."""
    code = read_notebook(ROOT / "notebooks" / "09_placement.ipynb").code()
    imports = "\n".join(
        ast.unparse(node) for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)
    )
    told = "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('mooncake_lab')))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{imports}\n{told}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    there = {Path(each) for each in done.stdout.split()}
    assert len(there) > 50
    assert there <= reached(code)


def test_a_chapter_does_not_depend_on_the_whole_package():
    """The traces depend on no engine, and no chapter on another one's figures."""
    traces = {
        path.relative_to(ROOT / "mooncake_lab").as_posix() for path in reached(read_notebook(NOTEBOOKS[1]).code())
    }
    assert "book/chapters/traces/figures.py" in traces
    assert not {path for path in traces if path.startswith(("engine/", "serving/", "book/chapters/store/"))}
