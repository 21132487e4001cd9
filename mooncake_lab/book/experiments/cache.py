"""Results kept between runs, under a digest of everything they depend on, which is found without running it.

A digest covers the experiment's class and fields, the source of its module and of all that it may import, the
papers' numbers, the versions of the libraries that compute, and which traces this machine holds. Change any of
them and the point is computed again; there is nothing to invalidate by hand. A class from elsewhere could change
without the digest noticing, so nothing is kept for those.

Of the code that may be imported, every import statement counts, wherever it stands, and so does every string that
could name a module: `importlib`, worker processes and lazy packages import by such names. Too many files cost an
execution; a missing one would show a result of old code.
"""

import ast
import dataclasses
import hashlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
import platformdirs

import mooncake_lab
from mooncake_lab.book.paper import data_dir
from mooncake_lab.core import complete_file
from mooncake_lab.workload import WORKLOADS, file_sha256, find_trace

CACHE_VARIABLE: Final = "MOONCAKE_LAB_CACHE"
"""Environment variable: the folder of kept results, or `off`."""

_PACKAGE: Final = mooncake_lab.__name__
_LONGEST_PATH: Final = 250  # in a name, not a path: what asks the system about longer ones fails
_VERDICTS: Final = {"evidence.csv", "alternatives.csv", "sensitivity.csv"}
"""Data on what verdicts rest on; no number of an experiment depends on it."""
_LIBRARIES: Final = ("numpy", "pandas", "torch", "transformers", "simpy", "xxhash")
_log = logging.getLogger(__name__)


def digest_of(experiment: Any) -> str:
    """A name for the result of `experiment` on this machine with this package."""
    kind = type(experiment)
    plain = dataclasses.asdict(experiment)
    fields = msgspec.json.encode([plain, named_files(plain.values())], order="sorted")
    parts = (
        f"{kind.__module__}.{kind.__qualname__}".encode(),
        fields,
        _code_digest(kind.__module__),
        data_digest().encode(),
        _trace_digest(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def named_files(values: Iterable[Any]) -> dict[str, str]:
    """The sha256 of each file that one of these values names: a result depends on what is in it, too."""
    return {
        value: file_sha256(Path(value))
        for value in values
        if isinstance(value, str) and 0 < len(value) < _LONGEST_PATH and Path(value).is_file()
    }


def is_of_package(experiment: Any) -> bool:
    """Whether the experiment's code is part of this package, so that `digest_of` covers it."""
    return type(experiment).__module__.partition(".")[0] == _PACKAGE


def plain_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows as plain JSON values, so that a fresh result and a kept one are the same."""
    return msgspec.json.decode(msgspec.json.encode([dict(row) for row in rows], enc_hook=_scalar))


def cached_rows(digest: str) -> list[dict[str, Any]] | None:
    """The rows kept under `digest`, or None."""
    folder = _folder()
    if folder is None or not (path := folder / f"{digest}.json").is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError:
        _log.warning("%s is damaged and will be computed again", path)
        return None


def keep_rows(digest: str, rows: list[dict[str, Any]]) -> None:
    """Keep rows under `digest`; another process never sees half of them."""
    folder = _folder()
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with complete_file(folder / f"{digest}.json") as file:
        file.write(msgspec.json.encode(rows))


def _folder() -> Path | None:
    setting = os.environ.get(CACHE_VARIABLE)
    if setting == "off":
        return None
    return Path(setting) if setting else platformdirs.user_cache_path("mooncake-lab") / "experiments"


def _scalar(value: Any) -> Any:
    if hasattr(value, "item"):  # a numpy scalar
        return value.item()
    raise TypeError(f"a row holds {value!r} of type {type(value).__name__}; allowed are plain values")


@cache
def _code_digest(module: str) -> bytes:
    digest = hashlib.sha256(code_digest(f"import {module}").encode())
    for library in _LIBRARIES:
        digest.update(f"{library}=={importlib.metadata.version(library)}".encode())
    return digest.digest()


@cache
def data_digest() -> str:
    """The papers' numbers, and what was measured and is kept beside them, as one name."""
    root = data_dir().parent
    folders = (data_dir(), root / "measured")
    files = (
        path for folder in folders for path in folder.rglob("*") if path.is_file() and path.name not in _VERDICTS
    )
    return tree_digest(root, files)


def tree_digest(root: Path, files: Iterable[Path]) -> str:
    """One name for the paths and contents of some files; a missing file counts by its absence."""
    whole = hashlib.sha256()
    for path in sorted(set(files)):
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
        whole.update(f"{name}\0{file_sha256(path) if path.is_file() else 'absent'}\n".encode())
    return whole.hexdigest()


def _trace_digest() -> bytes:
    digest = hashlib.sha256()
    for name in WORKLOADS:
        path = find_trace(name)
        if path is not None:
            status = path.stat()
            digest.update(f"{name}:{path}:{status.st_size}:{status.st_mtime_ns}".encode())
    return digest.digest()


_DOTTED: Final = re.compile(rf"{_PACKAGE}(?:\.\w+)+")
_FROM: Final = re.compile(rf"from ({_PACKAGE}[\w.]*) import ([\w, ]+)")
_WORD: Final = re.compile(r"(\w+(?:\.\w+)*?)(?:\.py)?")
_BY_NAME: Final = frozenset({"import_module", "__import__", "exec_module", "run_module"})
_FILES_KEPT: Final = 1024


def code_digest(*code: str) -> str:
    """One name for the contents of all files of the package that some code may import."""
    return tree_digest(Path(mooncake_lab.__file__).parent, reached("\n".join(code)))


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
