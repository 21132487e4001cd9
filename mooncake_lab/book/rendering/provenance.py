"""What results are made from: one name for everything an execution depends on, and the file that says it.

A code change recomputes the chapters that may import the changed file (`experiments/cache.py`). The digest
covers the notebook, its parameters, those files, everything under `data/`, the pinned requirements, and which
traces this machine holds. The page banner and the scorecard read `provenance.json`, which lies beside the results.
"""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from mooncake_lab.book.experiments.cache import tree_digest
from mooncake_lab.workload import WORKLOADS, file_sha256, find_trace


def found_traces() -> dict[str, str | None]:
    """The sha256 of each released trace on this machine by workload; None where the twin is used."""
    paths = {name: find_trace(name) for name in WORKLOADS}
    return {name: file_sha256(path) if path else None for name, path in paths.items()}


def surroundings_digest(root: Path, traces: Mapping[str, str | None]) -> str:
    """One name for what all notebooks depend on: data, pins, interpreter, traces found."""
    data = (path for path in (root / "data").rglob("*") if path.is_file())
    # fetched traces are named by their own sha256 instead
    facts = (path for path in data if path.relative_to(root).parts[1] != "traces")
    whole = hashlib.sha256(tree_digest(root, [*facts, root / "requirements.lock"]).encode())
    whole.update(f"python {sys.version_info[:2]}".encode())
    whole.update(msgspec.json.encode(traces, order="sorted"))
    return whole.hexdigest()


FILE: Final = "provenance.json"

BOOK_TRACES: Final = ("conversation", "synthetic")
"""The released traces that carry the chapters; where one is missing, every page says so."""

BOOK_SCALE: Final = "classroom"
BOOK_SEED: Final = 0


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Scale, seed, and the traces found (sha256, or None where the twin stood in)."""

    scale: str
    seed: int
    traces: dict[str, str | None]

    @property
    def banner(self) -> str | None:
        """The sentence for the top of every page, or None when the released traces were there."""
        missing = [name for name in BOOK_TRACES if self.traces.get(name) is None]
        if not missing:
            return None
        which, ones = (
            ("generated traces", "ones") if len(missing) > 1 else (f"a generated {missing[0]} trace", "one")
        )
        return f"Built with {which}; `make traces` fetches the released {ones}."

    @property
    def special(self) -> str:
        """What sets this run apart from the one that the book is written for: `which uses seed 1`; else empty."""
        missing = [name for name in BOOK_TRACES if self.traces.get(name) is None]
        more = [name for name, sha in self.traces.items() if sha is not None and name not in BOOK_TRACES]
        parts = [f"scale {self.scale}"] if self.scale != BOOK_SCALE else []
        parts += [f"seed {self.seed}"] if self.seed != BOOK_SEED else []
        if missing:
            parts.append("generated traces" if len(missing) > 1 else f"a generated {missing[0]} trace")
        if more:
            parts.append(f"the released {' and '.join(more)} trace{'s' * (len(more) > 1)}")
        *first, last = parts or [""]
        return f"which uses {', '.join(first)}{' and ' * bool(first)}{last}" if parts else ""


def write_provenance(folder: Path, *, scale: str, seed: int, traces: Mapping[str, str | None]) -> Provenance:
    """Write `provenance.json`, untouched if it says the same already."""
    provenance = Provenance(scale=scale, seed=seed, traces=dict(traces))
    content = msgspec.json.format(msgspec.json.encode(provenance), indent=1) + b"\n"
    path = folder / FILE
    if not path.is_file() or path.read_bytes() != content:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return provenance


def read_provenance(folder: Path) -> Provenance | None:
    """What `write_provenance` wrote, or None where nothing has been executed yet."""
    path = folder / FILE
    return msgspec.json.decode(path.read_bytes(), type=Provenance) if path.is_file() else None
