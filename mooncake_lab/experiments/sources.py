"""Which files of the package a piece of code may import, found without running it.

A result may be kept until one of these files changes. Every import statement counts, wherever it stands, and so
does every string that could name a module: `importlib`, worker processes and lazy packages import by such names.
Too many files cost an execution; a missing one would show a result of old code.
"""

import ast
import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

import mooncake_lab

_PACKAGE: Final = mooncake_lab.__name__
_DOTTED: Final = re.compile(rf"{_PACKAGE}(?:\.\w+)+")
_FROM: Final = re.compile(rf"from ({_PACKAGE}[\w.]*) import ([\w, ]+)")
_WORD: Final = re.compile(r"(\w+(?:\.\w+)*?)(?:\.py)?")
_BY_NAME: Final = frozenset({"import_module", "__import__", "exec_module", "run_module"})
_FILES_KEPT: Final = 1024


def code_digest(*code: str) -> str:
    """One name for the contents of all files of the package that some code may import.

    Args:
        code: Python source, such as the cells of a notebook.
    """
    root = Path(mooncake_lab.__file__).parent
    whole = hashlib.sha256()
    for path in sorted(reached("\n".join(code))):
        whole.update(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return whole.hexdigest()


def reached(code: str) -> frozenset[Path]:
    """The files of the package that some code may import, and those that they may; all where it does not parse."""
    root = Path(mooncake_lab.__file__).parent
    modules = {".".join((_PACKAGE, *_dotted(path.relative_to(root)))): path for path in root.rglob("*.py")}
    try:
        names = _names(code, "")
    except SyntaxError:  # such as the magic of a notebook, which may import anything
        return frozenset(modules.values())
    seen: set[str] = set()
    found: set[str] = set()
    while new := names - seen:
        seen |= new
        added = {module for name in new for module in _matching(name, modules)} - found
        found |= added
        names = {
            name
            for path in map(modules.__getitem__, added)
            for name in _names_of_file(root, path, path.stat().st_mtime_ns)
        }
    return frozenset(modules[module] for module in found)


def _dotted(path: Path) -> tuple[str, ...]:
    *folders, name = path.with_suffix("").parts
    return (*folders,) if name == "__init__" else (*folders, name)


def _matching(name: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """The module of a dotted name and the packages around it; `package.*` is all that is in it."""
    if name.endswith(".*"):
        yield from (module for module in modules if module.startswith(name[:-1]))
    while name:
        if name in modules:
            yield name
        name = name.rpartition(".")[0]


@lru_cache(maxsize=_FILES_KEPT)
def _names_of_file(root: Path, path: Path, _changed: int) -> frozenset[str]:
    package = ".".join((_PACKAGE, *path.parent.relative_to(root).parts))
    names = _names(path.read_text(encoding="utf-8"), package)
    return frozenset(name for name in names if name.startswith(_PACKAGE))


def _names(code: str, package: str) -> set[str]:
    """Dotted names that code may import. In a package, a string may also be the name of a module beside it."""
    tree = ast.parse(code)
    documentation = {id(text) for node in ast.walk(tree) if (text := _docstring(node)) is not None}
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names.update(alias.name for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                around = package.split(".")[: 1 - level or None] if level else []
                base = ".".join((*around, *([module] if module else [])))
                names.update((base, *(f"{base}.{alias.name}" for alias in aliases if alias.name != "*")))
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                names.update(_DOTTED.findall(text))
                names.update(
                    f"{one}.{each.strip()}" for one, more in _FROM.findall(text) for each in more.split(",")
                )
                if package and (word := _WORD.fullmatch(text)):
                    names.add(f"{package}.{word[1]}")
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[what, *_]) if (
                called in _BY_NAME and not isinstance(what, ast.Constant)
            ):
                names.add(f"{package or _PACKAGE}.*")
            case _:
                continue
    return names


def _docstring(node: ast.AST) -> ast.Constant | None:
    match node:
        case ast.Expr(value=ast.Constant(value=str()) as text):
            return text
        case _:
            return None
