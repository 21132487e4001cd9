"""The API reference: one page a package, from signatures and docstrings.

Read from the source, not from imported modules: a build needs no torch, and the page shows signatures as they were
written. Only public names count, those that a package's `__init__` lists in `__all__`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import mooncake_lab
from mooncake_lab.batch.definition import Definition, escaped, markdown, prose, string_after

PACKAGE: Final = Path(mooncake_lab.__file__).parent

FLOORS: Final = (
    "core", "perf", "workload", "store", "batching", "conductor", "engine", "compression", "cluster", "simulation",
    "serving", "metrics", "paper", "testbeds", "experiments", "figures", "batch", "course",
)  # fmt: skip
"""The packages from the ground up, as the design lists them, but for those without public names."""


def write_reference(folder: Path) -> None:
    """Write `index.md` and a page for each package into a folder; pages that say the same already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {f"{name}.md": package_page(name) for name in FLOORS} | {"index.md": _index()}
    for name, text in pages.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def package_page(name: str) -> str:
    """The Markdown of a package's page: what the package is, then every public name."""
    source = PACKAGE / name / "__init__.py"
    tree = _parsed(source)
    parts = [f"# `{name}`\n", prose(ast.get_docstring(tree) or "")]
    public = _public(tree)
    if public:
        parts.extend(_entry(each, _defined(each, tree, source)) for each in public)
    else:
        parts.extend(_module(path) for path in sorted(source.parent.glob("*.py")) if not path.stem.startswith("_"))
    return "\n".join(parts)


def _index() -> str:
    lines = [
        "# API reference\n",
        "What the packages offer to each other and to you, made from the source of this build. A package imports",
        "only from packages above it in this list; `mooncake_lab.core` knows nobody.\n",
        "| package | charge |\n| --- | --- |",
    ]
    for name in FLOORS:
        said = ast.get_docstring(_parsed(PACKAGE / name / "__init__.py")) or ""
        first = " ".join(said.split("\n\n")[0].split())
        lines.append(f"| [`{name}`]({name}.md) | {escaped(first, in_table=True)} |")
    return "\n".join(lines) + "\n"


def _module(path: Path) -> str:
    """A module of a package that exports nothing itself: its sentence, and its public functions and classes."""
    tree = _parsed(path)
    own = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    listed = "".join(f"\n{markdown(node)}" for node in own if node.name[0] != "_")
    return f"## `{path.stem}`\n\n{prose(ast.get_docstring(tree) or '')}{listed}"


def _entry(name: str, found: tuple[Definition, str] | None) -> str:
    if found is None:
        return f"## `{name}`\n"
    node, said = found
    return f"## `{name}`\n\n{markdown(node, said)}"


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _public(tree: ast.Module) -> list[str]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return sorted(ast.literal_eval(value), key=str.casefold)
            case _:
                continue
    return []


def _defined(name: str, tree: ast.Module, source: Path) -> tuple[Definition, str] | None:
    """Where a name is defined, and the string below it if it is a value; None for a module."""
    body = list(_statements(tree))
    for index, node in enumerate(body):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found):
                if found == name:
                    return node, ""
            case ast.AnnAssign(target=ast.Name(id=found)) | ast.Assign(targets=[ast.Name(id=found)]):
                if found == name:
                    return node, string_after(body, index)
            case ast.ImportFrom(module=str(module), names=names):
                original = next((each.name for each in names if (each.asname or each.name) == name), None)
                target = _source_of(module)
                if original and target and target != source:
                    return _defined(original, _parsed(target), target)
            case _:
                continue
    return None


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """What a module states, with the imports that only a type checker sees: those of names that load when used."""
    for node in tree.body:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body):
                yield from body
            case _:
                yield node


def _source_of(module: str) -> Path | None:
    own, _, rest = module.partition(".")
    if own != PACKAGE.name:
        return None
    path = PACKAGE.joinpath(*rest.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
