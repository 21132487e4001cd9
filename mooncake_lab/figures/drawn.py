"""What a figure shows, as a table: read back from what was drawn, so that no figure is without its data.

A row is a point, a bar, a step, a segment or an edge of an area. Numbers are in the units of the axes; a bar
reaches from (`x`, `y`) to (`x_end`, `y_end`).
"""

import csv
import io
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle, StepPatch
from matplotlib.ticker import FixedLocator

DATA_TYPE: Final = "application/vnd.mooncake-lab.figure+csv"
"""The media type under which an executed notebook holds what a figure draws; viewers pass it by."""
COLUMNS: Final = (
    "panel", "title", "x_axis", "y_axis", "kind", "series", "colour", "x", "y", "x_end", "y_end", "at",
)  # fmt: skip
"""`series` is the label of a legend, `at` the word at a tick."""


def drawn(figure: Figure) -> list[dict[str, Any]]:
    """All that a figure's axes show in their own coordinates, panel by panel, but limits and annotations."""
    return [
        {"panel": number, "title": axes.get_title(loc="left") or axes.get_title(), **_axes(axes), **row}
        for number, axes in enumerate(figure.axes, 1)
        for row in _rows(axes)
    ]


def as_csv(figure: Figure) -> str:
    """The same as CSV with a header; columns that say nothing are left out."""
    rows = drawn(figure)
    said = [column for column in COLUMNS if any(row.get(column) not in {None, ""} for row in rows)]
    text = io.StringIO()
    writer = csv.DictWriter(text, said, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _axes(axes: Axes) -> dict[str, str]:
    return {"x_axis": axes.get_xlabel(), "y_axis": axes.get_ylabel()}


def _rows(axes: Axes) -> Iterator[dict[str, Any]]:
    x_words, y_words = _words(axes.xaxis), _words(axes.yaxis)
    barred: dict[Any, str] = {
        patch: _label(container)
        for container in axes.containers
        if isinstance(container, BarContainer)
        for patch in container.patches
    }
    for artist in axes.get_children():
        read = next((reader for kind, reader in _READERS if isinstance(artist, kind)), None)
        if read is None or not artist.get_visible() or not _is_data(artist, axes):
            continue
        label = barred.get(artist) or _label(artist)
        for row in read(artist):
            yield {"series": label, "at": _at(row, x_words, y_words), **row}


def _line(line: Any) -> Iterator[dict[str, Any]]:
    colour = line.get_markeredgecolor() if line.get_linestyle() == "None" else line.get_color()
    for x, y in line.get_xydata():
        yield {"kind": "point", "colour": _hex(colour), "x": x, "y": y}


def _bar(bar: Any) -> Iterator[dict[str, Any]]:
    (x, y), width, height = bar.get_xy(), bar.get_width(), bar.get_height()
    yield {"kind": "bar", "colour": _hex(bar.get_facecolor()), "x": x, "y": y, "x_end": x + width,
           "y_end": y + height}  # fmt: skip


def _steps(patch: Any) -> Iterator[dict[str, Any]]:
    values, edges, _ = patch.get_data()
    for value, begin, end in zip(values, edges[:-1], edges[1:], strict=True):
        yield {"kind": "step", "colour": _hex(patch.get_edgecolor()), "x": begin, "x_end": end, "y": value}


def _scatter(points: Any) -> Iterator[dict[str, Any]]:
    for x, y in points.get_offsets():
        yield {"kind": "point", "colour": _first(points.get_facecolor()), "x": x, "y": y}


def _segments(lines: Any) -> Iterator[dict[str, Any]]:
    for segment in lines.get_segments():
        (x, y), (x_end, y_end) = segment[0], segment[-1]
        yield {"kind": "segment", "colour": _first(lines.get_color()), "x": x, "y": y, "x_end": x_end,
               "y_end": y_end}  # fmt: skip


def _edges(areas: Any) -> Iterator[dict[str, Any]]:
    for path in areas.get_paths():
        for x, y in path.vertices:
            yield {"kind": "edge", "colour": _first(areas.get_facecolor()), "x": x, "y": y}


_READERS: Final[tuple[tuple[type[Artist], Callable[[Any], Iterator[dict[str, Any]]]], ...]] = (
    (Line2D, _line),
    (Rectangle, _bar),
    (StepPatch, _steps),
    (PathCollection, _scatter),
    (LineCollection, _segments),
    (PolyCollection, _edges),
)
"""What a figure of this book is made of, and how it is read back; text and frames are no data."""


def _is_data(artist: Artist, axes: Axes) -> bool:
    """Whether both its coordinates are those of the axes: a limit's line, a legend and the frame are not."""
    return (
        artist is not axes.patch and all(artist.get_transform().contains_branch_seperately(axes.transData))
    ) or (isinstance(artist, PathCollection) and artist.get_offset_transform().contains_branch(axes.transData))


def _words(axis: Any) -> dict[float, str]:
    """What is written at the ticks where somebody chose both, unless it is the number itself."""
    if not isinstance(axis.get_major_locator(), FixedLocator):
        return {}
    written = [" ".join(label.get_text().split()) for label in axis.get_majorticklabels()]
    ticks = zip(axis.get_majorticklocs(), written, strict=False)
    return {float(at): word for at, word in ticks if word and not _is_number(word)}


def _is_number(word: str) -> bool:
    return re.fullmatch(r"[-+−]?[\d.,]+", word) is not None


def _at(row: dict[str, Any], x_words: dict[float, str], y_words: dict[float, str]) -> str:
    """The word nearest to a row's middle, within half a step."""
    for words, begin, end in ((x_words, "x", "x_end"), (y_words, "y", "y_end")):
        if words:
            middle = (row[begin] + row.get(end, row[begin])) / 2 if row["kind"] == "bar" else row[begin]
            nearest = min(words, key=lambda at: abs(at - middle))
            if abs(nearest - middle) <= 0.5:  # such ticks stand at whole numbers
                return words[nearest]
    return ""


def _label(artist: Any) -> str:
    label = str(artist.get_label() or "")
    return "" if label.startswith("_") else " ".join(label.split())


def _hex(colour: Any) -> str:
    return "" if isinstance(colour, str) and colour == "none" else to_hex(colour)


def _first(colours: Any) -> str:
    return _hex(colours[0]) if len(colours) else ""


def _plain(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float | np.floating) else value
