"""The API reference: one page a package, from signatures and docstrings.

Read from the source, not from imported modules: a build needs no torch, and the page shows signatures as they were
written. Only public names count, those that a package's `__init__` lists in `__all__`. A class shows its fields as
they were declared; below follow the fields that have a docstring, then its own public methods and properties.
Private and inherited members and members without a docstring stay out.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import mooncake_lab

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
"""What a method is in the source."""
Definition: TypeAlias = ast.ClassDef | Function | ast.AnnAssign | ast.Assign
"""Whatever a package can export."""

_SECTIONS: Final = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example|Examples):\s*$")
_ENTRY: Final = re.compile(r"^ {4}(?P<name>[\w*, .]+): (?P<text>.*)$")
_MARKS: Final = {"property", "cached_property", "classmethod", "staticmethod", "contextmanager"}
"""Decorators that change how a method is called."""
_LONG: Final = 96


def markdown(node: Definition, said: str = "") -> str:
    """A definition's signature, its docstring or the string said below it, and what a class has."""
    fields, methods = "", ""
    if isinstance(node, ast.ClassDef):
        fields = "".join(_field(name, text) for name, text in _documented_fields(node))
        methods = "".join(_method(member) for member in _documented_methods(node))
    listed = f"\n**Fields**\n\n{fields}" if fields else ""
    return f"{_signature(node)}\n{prose(said or _doc(node))}{listed}{methods}"


def prose(docstring: str) -> str:
    """A docstring as Markdown: its sections in bold, their entries as lists."""
    lines: list[str] = []
    in_section = False
    for line in docstring.splitlines():
        if match := _SECTIONS.match(line):
            lines += ["", f"**{match[1]}**", ""]
            in_section = True
        elif in_section and (entry := _ENTRY.match(line)):
            lines.append(f"- `{entry['name']}`: {escaped(entry['text'])}")
        else:
            lines.append(escaped(line.strip() if in_section else line))
    return "\n".join(lines) + "\n"


def escaped(text: str, *, in_table: bool = False) -> str:
    """A line without what Markdown would take for formulas, tables, or headings.

    Code is left alone, but for what would end a cell of a table.
    """
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([$|<]|^#|^\+)", r"\\\1", part) for part in parts[::2]]
    if in_table:
        parts[1::2] = [part.replace("|", r"\|") for part in parts[1::2]]
    return "".join(parts)


def string_after(body: list[ast.stmt], index: int) -> str:
    """The string below a statement, which documents what the statement defines; empty without such a string."""
    match body[index + 1 : index + 2]:
        case [ast.Expr(value=ast.Constant(value=str(said)))]:
            return inspect.cleandoc(said)
        case _:
            return ""


def _field_name(member: ast.stmt) -> str:
    """The name of a public field, or nothing."""
    match member:
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]) if name[0] != "_":
            return name
        case _:
            return ""


def _documented_fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for index, member in enumerate(node.body):
        name, said = _field_name(member), string_after(node.body, index)
        if name and said:
            yield name, said


def _documented_methods(node: ast.ClassDef) -> Iterator[Function]:
    for member in node.body:
        if isinstance(member, Function) and member.name[0] != "_" and ast.get_docstring(member):
            yield member


def _field(name: str, said: str) -> str:
    """An item of a list, with as many paragraphs as the string has."""
    return textwrap.indent(f"`{name}`: {prose(said)}", "  ").replace("  ", "- ", 1)


def _method(node: Function) -> str:
    """A method in a division of its own, so that it is no heading and the style sheet can indent it."""
    return f"\n:::{{div}} member\n{_signature(node)}\n{prose(_doc(node))}:::\n"


def _doc(node: Definition) -> str:
    return "" if isinstance(node, ast.AnnAssign | ast.Assign) else ast.get_docstring(node) or ""


def _signature(node: Definition) -> str:
    return "```python\n" + "\n".join(_declared(node)) + "\n```\n"


def _declared(node: Definition) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name, bases=bases, body=body):
            fields = [f"    {ast.unparse(member)}" for member in body if _field_name(member)]
            head = f"class {name}({', '.join(map(ast.unparse, bases))})" if bases else f"class {name}"
            yield from [f"{head}:", *fields] if fields else [head]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from _head(node)
        case _:
            yield ast.unparse(node).partition("\n")[0]


def _head(node: Function) -> Iterator[str]:
    """A function's first line, with a line for each parameter where it is long."""
    yield from (f"@{each}" for each in map(ast.unparse, node.decorator_list) if each.split(".")[-1] in _MARKS)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    line = f"{word} {node.name}({ast.unparse(node.args)}){returns}"
    if len(line) <= _LONG:
        yield line
    else:
        yield f"{word} {node.name}("
        yield from (f"    {each}," for each in _parameters(ast.unparse(node.args)))
        yield f"){returns}"


def _parameters(text: str) -> Iterator[str]:
    """The parameters one by one: split at the commas that no bracket holds."""
    depth = start = 0
    for index, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[start:index].strip()
            start = index + 1
    yield text[start:].strip()


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
