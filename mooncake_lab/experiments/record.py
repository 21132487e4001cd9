"""Numbers a chapter puts on record, for the scorecard, for tests, and for readers who want the data."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_lab.experiments.cache import plain_rows

if TYPE_CHECKING:
    import pandas as pd


def record(out_dir: str | Path, topic: str, numbers: Mapping[str, Any], *, sources: Iterable[str] = ()) -> Path:
    """Write a chapter's numbers to `out_dir/topic.json` and return its path.

    Args:
        out_dir: made if needed.
        topic: the chapter's stem.
        numbers: plain values, or tables (pandas), by name. A table's index, where it has a name, is a column.
        sources: where the data came from, e.g. `trace.source`; a source that begins with "twin" marks the
            whole record as computed on generated data.
    """
    import pandas as pd  # not above: it takes a second, and `mooncake-lab simulate` does without

    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    origins = sorted(set(sources))
    plain = {name: _rows(value) if isinstance(value, pd.DataFrame) else value for name, value in numbers.items()}
    content = {
        "topic": topic,
        "twin": any(origin.startswith("twin") for origin in origins),
        "sources": origins,
        "numbers": plain_rows([plain])[0],
    }
    path = folder / f"{topic}.json"
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    partial.replace(path)
    return path


def _rows(table: "pd.DataFrame") -> list[dict[Any, Any]]:
    named = any(name is not None for name in table.index.names)
    return (table.reset_index() if named else table).to_dict(orient="records")
