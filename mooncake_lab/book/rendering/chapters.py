"""What a page says about chapters without executing them: how long to read, how long to run, what was recorded.

Reading time is counted from prose, visible code and figures, run time is what papermill measured when the copy was
executed, and tables are the numbers that the chapter put on record.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import pandas as pd

from mooncake_lab.book.figures.drawn import DATA_TYPE
from mooncake_lab.book.paper.scorecard import TABLE
from mooncake_lab.book.rendering.notebook import Cell, joined, read_notebook

WORDS_PER_MINUTE: Final = 220
"""An adult's silent reading of English non-fiction: 238 a minute (Brysbaert 2019), less for formulas."""
LINES_PER_MINUTE: Final = 25
"""Reading speed for code that the page shows: a rough guess, slower than prose."""
MINUTES_PER_FIGURE: Final = 0.75
"""To look at a figure and its caption: a rough guess, too."""
FOLDED: Final = frozenset({"hide-cell", "hide-input", "remove-cell", "remove-input"})
"""Tags of cells whose code a page does not show at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """One executed chapter, as a table of contents shows it."""

    stem: str
    title: str
    words: int
    """Words of prose."""
    lines: int
    """Lines of code that the page shows, and of code that a cell prints; blank lines are not counted."""
    figures: int
    run_s: float | None
    """Seconds of its execution; None where the copy was not executed."""

    @property
    def reading_min(self) -> int:
        """Minutes to read prose and code and to look at the figures, at least one."""
        prose, code = self.words / WORDS_PER_MINUTE, self.lines / LINES_PER_MINUTE
        return max(1, round(prose + code + self.figures * MINUTES_PER_FIGURE))


def chapter(path: Path) -> Chapter:
    """Look at a chapter's notebook.

    Raises:
        ValueError: when it has no heading.
    """
    notebook = read_notebook(path)
    prose = [cell.text for cell in notebook.cells if cell.cell_type == "markdown"]
    title = next((match[1] for text in prose if (match := re.search(r"^# (.+)$", text, re.MULTILINE))), None)
    if title is None:
        raise ValueError(f"{path} has no heading; its first line should be '# Title'")
    words = sum(len(re.findall(r"[^\W_][\w'’-]*", text)) for text in prose)
    return Chapter(
        stem=path.stem,
        title=title,
        words=words,
        lines=sum(_lines(cell) for cell in notebook.cells if cell.cell_type == "code"),
        figures=sum("name" in _described(cell) for cell in notebook.cells),
        run_s=notebook.metadata.get("papermill", {}).get("duration"),
    )


def figure_data(path: Path) -> dict[str, str]:
    """What each figure of an executed chapter draws, as CSV by the figure's name."""
    found: dict[str, str] = {}
    for cell in read_notebook(path).cells:
        name = _described(cell).get("name")
        for output in cell.outputs:
            drawn = output.get("data", {}).get(DATA_TYPE)
            if name and drawn:
                found[name] = joined(drawn)
    return found


def tables(record: Path) -> dict[str, pd.DataFrame]:
    """What a chapter put on record as tables by name; plain values together are the table `values`."""
    numbers: Mapping[str, Any] = msgspec.json.decode(record.read_bytes()).get("numbers", {})
    found: dict[str, pd.DataFrame] = {}
    single: dict[str, Any] = {}
    for name, value in numbers.items():
        match value:
            case [dict(), *_]:
                found[name] = pd.DataFrame(value)
            case dict() if value and all(isinstance(row, dict) for row in value.values()):
                found[name] = pd.DataFrame.from_dict(value, orient="index").rename_axis("name").reset_index()
            case dict():
                found[name] = pd.DataFrame(value.items(), columns=["name", "value"])
            case list():
                found[name] = pd.DataFrame({name: value})
            case _:
                single[name] = value
    return found | ({"values": pd.DataFrame(single.items(), columns=["name", "value"])} if single else {})


def verdict_counts(record: Path) -> Counter[str]:
    """How many claims got which verdict in a chapter; empty where it judges none."""
    rows: list[dict[str, Any]] = msgspec.json.decode(record.read_bytes())["numbers"].get(TABLE, [])
    return Counter(row["verdict"] for row in rows if row.get("decides"))


def _lines(cell: Cell) -> int:
    shown = "" if FOLDED.intersection(cell.tags) else cell.text
    if "getsource(" in cell.text and "hide-output" not in cell.tags:
        shown += "\n" + "".join(joined(output.get("text", "")) for output in cell.outputs)
    return sum(bool(line.strip()) for line in shown.splitlines())


def _described(cell: Cell) -> Mapping[str, str]:
    mystnb = cell.metadata.get("mystnb", {})
    described: Mapping[str, str] = {**mystnb.get("figure", {}), "alt": mystnb.get("image", {}).get("alt", "")}
    return described


STEPS: Final = ("arrive", "decide", "fetch prefix", "prefill", "transfer", "decode", "finish")
"""What happens to a request, in order."""

PARTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "start": STEPS,
        "traces": ("arrive",),
        "stages": ("prefill", "decode"),
        "engine": ("prefill", "decode"),
        "chunked": ("prefill",),
        "piggyback": ("prefill", "decode"),
        "pipeline": ("prefill", "decode"),
        "store": ("fetch prefix",),
        "transfer": ("fetch prefix", "transfer"),
        "placement": ("decide", "fetch prefix"),
        "endtoend": STEPS,
        "overload": ("decide", "decode"),
        "live": STEPS,
        "scorecard": (),
        "compression": ("transfer", "decode"),
    }
)
"""The steps that a chapter is about, by its topic; none for a chapter that only sums up."""


def life_strip(topic: str) -> str:
    """The steps as an HTML list in which those of the chapter stand out; empty for a chapter about none.

    Raises:
        ValueError: when there is no such topic.
    """
    if topic not in PARTS:
        raise ValueError(f"no chapter has the topic {topic!r}; there are {', '.join(PARTS)}")
    here = PARTS[topic]
    if not here:
        return ""
    steps = "".join(
        f'<li class="here"><strong>{escape(step)}</strong></li>' if step in here else f"<li>{escape(step)}</li>"
        for step in STEPS
    )
    said = " every step" if here == STEPS else f": {', '.join(here)}"
    label = escape(f"In the life of a request, this chapter is about{said}.")
    return f'<div class="life" role="group" aria-label="{label}"><ol>{steps}</ol></div>'
