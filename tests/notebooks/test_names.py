"""The code in the prose of a chapter uses names that a reader of this chapter has."""

import ast
import builtins
import importlib
import re
import textwrap
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from types import ModuleType

import pytest

from mooncake_lab.book.rendering.notebook import Cell, Notebook, read_notebook

LISTING = re.compile(r"^(`{3,})(\w+)[ ]*\n(.*?)^\1[ ]*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<![`}\w])`([^`]+)`(?!`)")
DIRECTIVE = re.compile(r"^`{3,}(\{.*)?$", re.MULTILINE)
FILES = re.compile(r"\.(csv|json|jsonl|md|py|toml|html|svg|pdf|txt)$")


def test_code_in_prose_uses_names_of_the_chapter(chapter):
    """A name is imported or assigned in the notebook or in the listing, or is built in; inline, a package will do.

    Where the name is a module, the module has the attribute.
    """
    assert unknown_names(read_notebook(chapter)) == []


@pytest.mark.parametrize(
    ("prose", "unknown"),
    [
        ("`start.nowhere(1)`", ["start.nowhere"]),
        ("`life.steps(log)` and `start.steps`", ["life"]),
        ("```python\nlife.steps(1)\n```", ["life"]),
        ("`life().steps`", ["life"]),
        ("````{solution} x\n```python\nprint(start.nowhere)\n```\n````", ["start.nowhere"]),
        ("```python\nnumpy.ones(3)\n```", ["numpy"]),
        ("`numpy.ones(3)`, `numpy.nowhere`, {term}`no.name`, `claims.csv`", ["numpy.nowhere"]),
        ("`mooncake_lab.core.Nothing` of `mooncake_lab.core`", ["mooncake_lab.core.Nothing"]),
        ("```python\nfor row in sorted(seen): row.x\n```\n```python\nprint(row)\n```", []),
    ],
)
def test_a_name_that_is_nowhere_is_found(prose, unknown):
    """The check sees listings and inline code, listings inside directives, and attributes of modules."""
    code = "from mooncake_lab.book.chapters.start import experiment as start\nseen = []"
    assert unknown_names(Notebook([Cell("markdown", prose), Cell("code", code)])) == unknown


def unknown_names(notebook: Notebook) -> list[str]:
    """What the prose of a notebook names and its reader does not have."""
    code = "\n".join(cell.text for cell in notebook.cells if cell.cell_type == "code")
    tree = ast.parse(code)
    known, modules = bound_names(tree), imported(tree)
    missing = []
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        within, reached = set(known), dict(modules)
        for listing in listings(cell.text):
            tree = ast.parse(textwrap.dedent(listing))
            within |= bound_names(tree)
            reached |= imported(tree)
            missing += missing_in(names_read(tree), tree, within, reached, packages=False)
        for first, whole in inline_code(cell.text):
            missing += missing_in([first], whole, within, reached, packages=True)
    return missing


def listings(text: str) -> list[str]:
    """The Python listings of a cell, also those inside exercises and solutions."""
    return [found[3] for found in LISTING.finditer(text) if found[2] == "python"]


def inline_code(text: str) -> Iterator[tuple[ast.Name, ast.expr]]:
    """The first name of inline code that reads an attribute, as `name.attribute(...)` does, and the whole code."""
    for found in INLINE.finditer(DIRECTIVE.sub("", LISTING.sub("", text))):
        words = " ".join(found[1].split())
        try:
            node = whole = ast.parse(words, mode="eval").body
        except SyntaxError:
            continue  # a command, a path or a formula
        reads = False
        while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
            reads = reads or isinstance(node, ast.Attribute)
            node = node.func if isinstance(node, ast.Call) else node.value
        if reads and isinstance(node, ast.Name) and not FILES.search(words):
            yield node, whole


def missing_in(
    names: Iterable[ast.Name], tree: ast.AST, known: set[str], modules: dict[str, object], *, packages: bool
) -> Iterator[str]:
    """Names that are unknown, and attributes that their modules lack; any package is known if `packages`."""
    dotted = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in names:
        path, inside, above = node.id, modules.get(node.id), dotted.get(id(node))
        if node.id not in known and not hasattr(builtins, node.id):
            if not packages or find_spec(node.id) is None:
                yield node.id
                continue
            inside = importlib.import_module(node.id)
        while above is not None and isinstance(inside, ModuleType):
            inside, path = attribute(inside, above.attr), f"{path}.{above.attr}"
            if inside is None:
                yield path
            above = dotted.get(id(above))


def names_read(tree: ast.AST) -> list[ast.Name]:
    """The names that code reads."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]


def attribute(module: ModuleType, name: str) -> object:
    """What a module has under a name, a module of a package included."""
    if not hasattr(module, name) and hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}"):
        return importlib.import_module(f"{module.__name__}.{name}")
    return getattr(module, name, None)


def bound_names(tree: ast.AST) -> set[str]:
    """Everything that code imports, assigns, defines or takes as an argument."""
    bound = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.arg(arg=name):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.split(".")[0])
    return bound


def imported(tree: ast.AST) -> dict[str, object]:
    """The objects that code imports, by the names that it gives them."""
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                module = importlib.import_module(each.name)
                found[each.asname or each.name.split(".")[0]] = (
                    module if each.asname else importlib.import_module(each.name.split(".")[0])
                )
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            found |= {each.asname or each.name: attribute(module, each.name) for each in node.names}
    return found
