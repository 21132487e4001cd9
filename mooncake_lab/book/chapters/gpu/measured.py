"""Results of `benchmarks/gpu.py` for the chapters: tables if it was run on a GPU, otherwise the reason why not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pandas as pd

from mooncake_lab.core import carried_folder

_PATTERN: Final = "engine_h*.json"
_COMMAND: Final = "python benchmarks/gpu.py --out data/measured/engine_h200.json"
_NOT_MEASURED: Final = (
    f"**Not measured.** This book came without a report of a GPU. On a machine with one, `{_COMMAND}` writes it in"
    " eight minutes; the next build then draws a figure here."
)
Drawn = TypeVar("Drawn")


@dataclass(frozen=True, slots=True)
class Missing:
    """Why there is nothing to draw; a notebook shows it as a sentence."""

    why: str

    def _repr_markdown_(self) -> str:
        return self.why


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GpuReport:
    """One run of `benchmarks/gpu.py`."""

    device: str
    """`cuda`, or `cpu` for a dry run."""
    date: str
    source: str
    """The device, its driver, what was run, when, and at which commit: for footers."""
    tables: Mapping[str, pd.DataFrame]
    """By section; points that the device had no room for are left out."""
    gaps: Mapping[str, str]
    """By section: why it has no table."""

    def show(self, draw: Callable[..., Drawn], *sections: str) -> Drawn | Missing:
        """Draw sections with `draw(*tables, source)`; where one of them was not measured, say why."""
        for section in sections:
            if section not in self.tables:
                return Missing(self.gaps.get(section, _NOT_MEASURED))
        return draw(*(self.tables[section] for section in sections), self.source)


def read_gpu_report(path: Path) -> GpuReport:
    """Read a file of `benchmarks/gpu.py`.

    Raises:
        OSError: when it cannot be read.
        ValueError: when it is no such file.
    """
    try:
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        machine, sections = found["machine"], found["sections"]
        device, date = machine["device"], machine["date"]
        said = (
            f"measured: {machine['processor']}, driver {found['driver'] or 'none'}",
            f"torch {machine['torch_version']}, {date}, commit {found['commit'] or 'unknown'}",
            f"{found['shape']}, random weights, {found['dtype']}",
        )
        tables = {name: _table(section["rows"]) for name, section in sections.items() if section.get("rows")}
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} was not written by benchmarks/gpu.py: {error!r}") from error
    gaps = {
        name: f"The section *{name}* was not measured: {section.get('failed') or section.get('skipped')}."
        for name, section in sections.items()
        if name not in tables
    }
    return GpuReport(device=device, date=date, source="; ".join(said), tables=tables, gaps=gaps)


def committed(folder: Path | None = None) -> GpuReport:
    """The newest report in the repository; a report without tables if the repository has none yet.

    Raises:
        ValueError: when a file there is not a report of a GPU.
    """
    newest = GpuReport(device="cuda", date="", source="", tables={}, gaps={})
    for path in sorted((folder or carried_folder("measured")).glob(_PATTERN)):
        report = read_gpu_report(path)
        if report.device != "cuda":
            raise ValueError(f"{path} was measured on a {report.device}; the figures are of a GPU")
        newest = max(newest, report, key=lambda each: each.date)
    return newest


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame([row for row in rows if "skipped" not in row])
