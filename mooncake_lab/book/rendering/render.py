"""The book as HTML: Jupyter Book over the executed chapters, warnings as errors, skipped when nothing changed.

    python -m mooncake_lab.book.rendering.render book [--without-solutions] [--epub]

All pages or none: Sphinx can render only the pages that changed, but then links between pages go stale
(the numbers of citations), and pages that were deleted stay. So the digest of everything it reads is kept
beside the result; when it is the same, nothing is done, and else the book is rendered whole.

The API reference has one page per package, with the public names as stubs of Python. It is read from the source,
not from imported modules: a build needs no torch, and the pages show signatures as they were written. Only names
that a package's `__init__` lists in `__all__` count. A stub has the docstrings; private members, and methods
without a docstring, stay out.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

import mooncake_lab
from mooncake_lab.book.experiments.cache import reached, tree_digest
from mooncake_lab.book.figures.embed import STATIC
from mooncake_lab.book.paper import data_dir
from mooncake_lab.book.rendering.provenance import read_provenance

WITHOUT_SOLUTIONS: Final = "MOONCAKE_BOOK_WITHOUT_SOLUTIONS"
"""The variable that tells the extensions of the book to leave the solutions of exercises out."""
_STAMP: Final = "inputs.sha256"
_BESIDE: Final = ("requirements.lock", "CITATION.cff")
_GENERATED: Final = ("_build", "__pycache__")
_FLAGS: Final = ("-W", "-n", "--keep-going", "-q")


def render(book: Path, *, solutions: bool = True) -> int:
    """Render a Jupyter Book folder into `book/_build/html`; the exit status of the renderer.

    Args:
        book: the folder.
        solutions: whether the pages contain the solutions of their exercises.
    """
    build = book / "_build"
    index, stamp = build / "html" / "index.html", build / _STAMP
    digest = inputs_digest(book) + ("" if solutions else " without solutions")
    if not index.is_file() or not stamp.is_file() or stamp.read_text() != digest:
        shutil.rmtree(build, ignore_errors=True)
        status = _jupyter_book(book, {} if solutions else {WITHOUT_SOLUTIONS: "1"})
        if status != 0:
            sys.stderr.write(
                f"The book was not rendered; jupyter-book ended with {status}, its warnings are above.\n"
            )
            return status
        stamp.write_text(digest)
    else:
        sys.stderr.write("HTML             up to date\n")
    _say_where(index, book)
    return 0


def render_epub(book: Path) -> int:
    """Render a Jupyter Book folder into `book/_build/epub/mooncake-run.epub`; the exit status of the renderer."""
    shutil.rmtree(book / "_build" / "epub", ignore_errors=True)  # else only pages that changed are written
    status = _jupyter_book(book, {}, "--builder", "custom", "--custom-builder", "epub")
    if status == 0:
        sys.stdout.write(f"{(book / '_build' / 'epub' / 'mooncake-run.epub').resolve()}\n")
    return status


def inputs_digest(book: Path) -> str:
    """One name for all that the renderer reads.

    Pages, executed chapters, widgets, configuration, version pins, the papers' numbers, and the code of this
    package that the extensions of the book may import: it writes the marks, tables and verdicts of the pages.
    """
    inputs = [
        path
        for path in book.rglob("*")
        if path.is_file() and not any(part in _GENERATED for part in path.relative_to(book).parts)
    ]
    code = reached("\n".join(path.read_text(encoding="utf-8") for path in sorted(book.glob("_ext/*.py"))))
    return tree_digest(
        book.parent,
        [*inputs, *(book.parent / name for name in _BESIDE), *STATIC.iterdir(), *data_dir().rglob("*.csv"), *code],
    )


def _jupyter_book(book: Path, told: Mapping[str, str], *options: str) -> int:
    command = [Path(sys.executable).with_name("jupyter-book"), "build", *_FLAGS, *options, str(book)]
    # no warnings: deprecations inside the renderer's own libraries
    environment = {**os.environ, **told, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own interpreter and folder
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
    return done.returncode


def _say_where(index: Path, book: Path) -> None:
    provenance = read_provenance(book / "_generated")
    if provenance and provenance.banner:
        sys.stderr.write(f"\nNOTE: {provenance.banner}\n")
    sys.stdout.write(f"\nThe book is ready: open {index.resolve()}, or run `make serve-book` for search.\n")


Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

PACKAGE: Final = Path(mooncake_lab.__file__).parent

FLOORS: Final = (
    "core", "perf", "net", "workload", "store", "batching", "conductor", "engine", "compression", "cluster",
    "simulation", "serving", "metrics", "book.paper", "book.testbeds", "book.experiments", "book.figures",
    "calibrate", "book.playground", "book.rendering", "course",
)  # fmt: skip
"""The packages from the ground up, as the design lists them, but for those without public names."""


def write_reference(folder: Path) -> None:
    """Write `index.md` and a page for each package into a folder; pages that say the same already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {f"{page_of(name)}.md": package_page(name) for name in FLOORS} | {"index.md": _index()}
    for name, text in pages.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def page_of(package: str) -> str:
    """The name of a package's page."""
    return package.rpartition(".")[2]


def package_page(name: str) -> str:
    """The Markdown of a package's page: what the package is, then every public name.

    A package that exports nothing shows the public functions and classes of its modules.
    """
    source = PACKAGE.joinpath(*name.split("."), "__init__.py")
    _, tree = _parsed(source)
    parts = [f"# `{name}`", ast.get_docstring(tree) or ""]
    public = _public(tree)
    for each in public:
        parts += [f"## `{each}`", _defined(each, source)]
    for path in [] if public else sorted(source.parent.glob("[!_]*.py")):
        text, tree = _parsed(path)
        own = [node for node in tree.body if isinstance(node, ast.ClassDef | Function) and node.name[0] != "_"]
        parts += [f"## `{path.stem}`", ast.get_docstring(tree) or ""]
        parts += [stub(text, node) for node in own]
    return "\n\n".join(filter(None, parts)) + "\n"


@cache
def _parsed(path: Path) -> tuple[str, ast.Module]:
    """A source file and its syntax tree, read once: a package's page asks for it once for each name."""
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


def stub(source: str, *nodes: ast.stmt) -> str:
    """Statements of a source as a block of Python: of classes and functions, what a caller has to know."""
    lines = source.splitlines()
    shown = [line for node in nodes for start, end in _spans(node) for line in lines[start - 1 : end]]
    return "```python\n" + textwrap.dedent("\n".join(shown)) + "\n```"


def _spans(node: ast.stmt) -> Iterator[tuple[int, int]]:
    """The first and last lines of what is shown: a function without its code, a class with its public members."""
    match node:
        case ast.ClassDef(body=body):
            yield _start(node), max(body[0].lineno - 1, node.lineno)
            for member in _public_members(body):
                yield from _spans(member)
        case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
            documented = ast.get_docstring(node) is not None
            yield _start(node), (body[0].end_lineno or 0) if documented else max(body[0].lineno - 1, node.lineno)
        case _:
            yield node.lineno, node.end_lineno or node.lineno


def _start(node: ast.ClassDef | Function) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _public_members(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The docstring of a class, its public fields with the strings below them, and its documented methods."""
    public = True
    for member in body:
        match member:
            case ast.Expr(value=ast.Constant(value=str())):  # of the class, or of the field before it
                pass
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                public = name[0] != "_"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                public = name[0] != "_" and ast.get_docstring(member) is not None
            case _:
                public = False
        if public:
            yield member


def _index() -> str:
    lines = [
        "# API reference\n",
        "What the packages offer to each other and to you, made from the source of this build. A package imports",
        "only from packages above it in this list; `mooncake_lab.core` imports none.\n",
        "| package | contents |\n| --- | --- |",
    ]
    for name in FLOORS:
        _, tree = _parsed(PACKAGE.joinpath(*name.split("."), "__init__.py"))
        first, _, _ = (ast.get_docstring(tree) or "").partition("\n\n")
        lines.append(f"| [`{name}`]({page_of(name)}.md) | {' '.join(first.split())} |")
    return "\n".join(lines) + "\n"


def _public(tree: ast.Module) -> list[str]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return sorted(ast.literal_eval(value), key=str.casefold)
            case _:
                continue
    return []


def _defined(name: str, source: Path) -> str:
    """The stub of a name, wherever it is defined; empty for a module."""
    text, tree = _parsed(source)
    body = list(_statements(tree))
    for node, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found):
                if found == name:
                    return stub(text, node)
            case ast.AnnAssign(target=ast.Name(id=found)) | ast.Assign(targets=[ast.Name(id=found)]):
                if found == name:
                    said = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                    return stub(text, node, below) if said else stub(text, node)
            case ast.ImportFrom(module=str(module), names=names):
                original = next((each.name for each in names if (each.asname or each.name) == name), None)
                target = _source_of(module)
                if original and target and target != source:
                    return _defined(original, target)
            case _:
                continue
    return ""


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """What a module states, with the imports that only a type checker sees, or that name the extra they need."""
    for node in tree.body:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body) | ast.With(body=body):
                yield from body
            case _:
                yield node


def _source_of(module: str) -> Path | None:
    own, _, rest = module.partition(".")
    path = PACKAGE.joinpath(*rest.split("."))
    candidates = (path.with_suffix(".py"), path / "__init__.py") if own == PACKAGE.name else ()
    return next((each for each in candidates if each.is_file()), None)


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mooncake_lab.book.rendering.render")
    parser.add_argument("book", type=Path, help="the book's folder")
    parser.add_argument("--without-solutions", action="store_true", help="leave out the solutions of exercises")
    parser.add_argument("--epub", action="store_true", help="render an e-book instead of pages")
    told = parser.parse_args(arguments)
    write_reference(told.book / "reference")
    if told.epub:
        return render_epub(told.book)
    return render(told.book, solutions=not told.without_solutions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
