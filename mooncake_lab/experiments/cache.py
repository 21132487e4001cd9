"""Results kept between runs, under a digest of everything they depend on.

A digest covers the experiment's class and fields, the source of its module and of all that it may import, the
papers' numbers, the versions of the libraries that compute, and which traces this machine holds. Change any of
them and the point is computed again; there is nothing to invalidate by hand. A class from elsewhere could change
without the digest noticing, so nothing is kept for those.
"""

import dataclasses
import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import platformdirs

import mooncake_lab
from mooncake_lab.experiments.sources import code_digest
from mooncake_lab.paper import data_dir
from mooncake_lab.workload import WORKLOADS, file_sha256, find_trace

CACHE_VARIABLE: Final = "MOONCAKE_LAB_CACHE"
"""Environment variable: the folder of kept results, or `off`."""

_LONGEST_PATH: Final = 250  # in a name, not a path: what asks the system about longer ones fails
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
        data_digest(),
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
    return type(experiment).__module__.partition(".")[0] == mooncake_lab.__name__


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
    partial = folder / f"{digest}.{os.getpid()}.partial"
    partial.write_bytes(msgspec.json.encode(rows))
    partial.replace(folder / f"{digest}.json")


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
def data_digest() -> bytes:
    """The papers' numbers, and what was measured and is kept beside them, as one name."""
    measured = data_dir().parent / "measured"
    return _contents(data_dir(), "*") + (_contents(measured, "*") if measured.is_dir() else b"")


def _contents(folder: Path, pattern: str) -> bytes:
    """A digest of the names and contents of the files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob(pattern) if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.digest()


def _trace_digest() -> bytes:
    digest = hashlib.sha256()
    for name in WORKLOADS:
        path = find_trace(name)
        if path is not None:
            status = path.stat()
            digest.update(f"{name}:{path}:{status.st_size}:{status.st_mtime_ns}".encode())
    return digest.digest()
