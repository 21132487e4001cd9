"""What a figure shows, as a table: read back from what was drawn, so that no figure is without its data.

A row is a point, a bar, a step, a segment or an edge of an area. Numbers are in the units of the axes; a bar
reaches from (`x`, `y`) to (`x_end`, `y_end`).
"""

import csv
import io
import math
import re
from collections.abc import Callable, Iterator
from itertools import cycle, groupby, pairwise
from typing import Any, Final

from mooncake_lab.core.extras import naming_extra

with naming_extra("figures"):
    import numpy as np
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection, PathCollection, PolyCollection
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import PathPatch, Rectangle, StepPatch
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
        {
            "panel": number,
            "title": axes.get_title(loc="left") or axes.get_title(),
            "x_axis": axes.get_xlabel(),
            "y_axis": axes.get_ylabel(),
            **row,
        }
        for number, axes in enumerate(figure.axes, 1)
        for row in _rows(axes)
    ]


def as_csv(figure: Figure) -> str:
    """The same as CSV with a header; columns that say nothing are left out. Empty where a figure draws no data."""
    rows = drawn(figure)
    if not rows:
        return ""
    said = [column for column in COLUMNS if any(row.get(column, "") != "" for row in rows)]
    text = io.StringIO()
    writer = csv.DictWriter(text, said, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _plain(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def in_words(figure: Figure) -> str:
    """A figure described for readers who cannot see it: axes of each panel, and how far each series reaches."""
    said: list[str] = []
    for number, rows in groupby(drawn(figure), key=lambda row: row["panel"]):
        panel = list(rows)
        name = " ".join(panel[0]["title"].split())
        axes = " over ".join(filter(None, (panel[0]["y_axis"], panel[0]["x_axis"])))
        said.append(f"Panel {number}{f', {name}' if name else ''}: {' '.join(axes.split())}.")
        for series in dict.fromkeys(row["series"] for row in panel):
            mine = [row for row in panel if row["series"] == series]
            spans = (f"{axis} from {_reach(mine, axis, min)} to {_reach(mine, axis, max)}" for axis in "xy")
            said.append(f"{series or 'Not named'}: {', '.join(spans)}.")
    return " ".join(said)


def _reach(rows: list[dict[str, Any]], axis: str, end: Callable[[list[float]], float]) -> str:
    return f"{end([row[key] for row in rows for key in (axis, f'{axis}_end') if key in row]):.3g}"


def has_filled_circles(figure: Figure) -> bool:
    """Whether a figure shows a filled circle, the book's sign for a measurement."""
    return any(
        line.get_marker() in {"o", "."}
        and line.get_visible()
        and np.asarray(line.get_xydata()).size > 0
        and _hex(line.get_markerfacecolor()) not in {"", "#ffffff"}
        for axes in figure.axes
        for line in axes.get_lines()
    )


def _rows(axes: Axes) -> Iterator[dict[str, Any]]:
    x_words, y_words = _words(axes.xaxis), _words(axes.yaxis)
    labels = {part: _label(container) for container in axes.containers for part in _parts(container)}
    for artist in axes.get_children():
        read = next((reader for kind, reader in _READERS if isinstance(artist, kind)), None)
        if read is None or not artist.get_visible() or not _is_data(artist, axes):
            continue
        label = labels.get(artist) or _label(artist)
        for row in read(artist):
            yield {"series": label, "at": _at(row, x_words, y_words), **row}


def _parts(container: Any) -> Iterator[Artist]:
    """The artists of a container, which have its label between them."""
    for part in container:
        if isinstance(part, Artist):
            yield part
        elif part is not None:
            yield from part


def _line(line: Any) -> Iterator[dict[str, Any]]:
    colour = line.get_markeredgecolor() if line.get_linestyle() == "None" else line.get_color()
    yield from ({"kind": "point", "colour": _hex(colour), "x": x, "y": y} for x, y in _numbers(line.get_xydata()))


def _bar(bar: Any) -> Iterator[dict[str, Any]]:
    (x, y), width, height = bar.get_xy(), bar.get_width(), bar.get_height()
    yield {"kind": "bar", "colour": _hex(bar.get_facecolor()), "x": x, "y": y, "x_end": x + width,
           "y_end": y + height}  # fmt: skip


def _box(patch: Any) -> Iterator[dict[str, Any]]:
    """What a patch of any form spans, such as the box of a box plot."""
    corners = patch.get_path().vertices
    (x, y), (x_end, y_end) = corners.min(axis=0), corners.max(axis=0)
    yield {"kind": "box", "colour": _hex(patch.get_facecolor()), "x": x, "y": y, "x_end": x_end, "y_end": y_end}


def _steps(patch: Any) -> Iterator[dict[str, Any]]:
    values, edges, _ = patch.get_data()
    for value, begin, end in zip(values, edges[:-1], edges[1:], strict=True):
        yield {"kind": "step", "colour": _hex(patch.get_edgecolor()), "x": begin, "x_end": end, "y": value}


def _scatter(points: Any) -> Iterator[dict[str, Any]]:
    colours = _colours(points.get_facecolor())
    for x, y in _numbers(points.get_offsets()):
        yield {"kind": "point", "colour": next(colours), "x": x, "y": y}


def _segments(lines: Any) -> Iterator[dict[str, Any]]:
    colours = _colours(lines.get_color())
    for segment in lines.get_segments():
        (x, y), (x_end, y_end) = segment[0], segment[-1]
        yield {"kind": "segment", "colour": next(colours), "x": x, "y": y, "x_end": x_end, "y_end": y_end}


def _edges(areas: Any) -> Iterator[dict[str, Any]]:
    colours = _colours(areas.get_facecolor())
    for path in areas.get_paths():
        colour = next(colours)
        yield from ({"kind": "edge", "colour": colour, "x": x, "y": y} for x, y in _numbers(path.vertices))


_READERS: Final[tuple[tuple[type[Artist], Callable[[Any], Iterator[dict[str, Any]]]], ...]] = (
    (Line2D, _line),
    (Rectangle, _bar),
    (StepPatch, _steps),
    (PathPatch, _box),
    (PathCollection, _scatter),
    (LineCollection, _segments),
    (PolyCollection, _edges),
)
"""What a figure of this book is made of, and how it is read back; text and frames are no data."""


def _is_data(artist: Artist, axes: Axes) -> bool:
    """Whether both its coordinates are those of the axes: a limit's line, a legend and the frame are not."""
    if isinstance(artist, PathCollection):  # markers: drawn at a size of their own, put where the data is
        return artist.get_offset_transform().contains_branch(axes.transData)
    return artist is not axes.patch and all(artist.get_transform().contains_branch_seperately(axes.transData))


def _words(axis: Any) -> dict[float, str]:
    """Tick labels by position, where both were set explicitly; labels that are numbers are left out."""
    if not isinstance(axis.get_major_locator(), FixedLocator):
        return {}
    written = [" ".join(label.get_text().split()) for label in axis.get_majorticklabels()]
    ticks = zip(axis.get_majorticklocs(), written, strict=False)
    return {float(at): word for at, word in ticks if word and not _is_number(word)}


def _is_number(word: str) -> bool:
    return re.fullmatch(r"[-+−]?[\d.,]+", word) is not None


def _at(row: dict[str, Any], x_words: dict[float, str], y_words: dict[float, str]) -> str:
    """The word at whose tick a row stands: the nearest, within half of the least distance between ticks."""
    for words, begin, end in ((x_words, "x", "x_end"), (y_words, "y", "y_end")):
        if words:
            spans = row["kind"] in {"bar", "box"}
            middle = (row[begin] + row[end]) / 2 if spans else row[begin]
            ticks = sorted(words)
            reach = min((after - before for before, after in pairwise(ticks)), default=1.0) / 2
            nearest = min(ticks, key=lambda at: abs(at - middle))
            if abs(nearest - middle) <= reach:
                return words[nearest]
    return ""


def _label(artist: Any) -> str:
    label = str(artist.get_label() or "")
    return "" if label.startswith("_") else " ".join(label.split())


def _hex(colour: Any) -> str:
    return "" if isinstance(colour, str) and colour == "none" else to_hex(colour)


def _colours(colours: Any) -> Iterator[str]:
    """The colour of each element, over and over as matplotlib does it."""
    return cycle([_hex(colour) for colour in colours] or [""])


def _numbers(points: Any) -> Iterator[tuple[float, float]]:
    """The points that are drawn: those that are numbers."""
    for x, y in np.ma.filled(np.ma.asarray(points, dtype=float), np.nan):
        if math.isfinite(x) and math.isfinite(y):
            yield float(x), float(y)


def _plain(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float | np.floating) else value
