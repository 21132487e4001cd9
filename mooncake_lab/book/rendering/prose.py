"""What a page says in words: the prose, captions and alternative texts of notebooks and Markdown pages.

Numerals are found in prose only. Code, formulas, headings, links, labels, citations and references to figures,
sections, chapters, claims and assumptions are blanked first, and tables that a generator writes between its marks;
names such as A800 or Yi-34B hold no numeral.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from mooncake_lab.book.rendering.notebook import joined

Content: TypeAlias = dict[str, Any]
"""A notebook as JSON; a Markdown page is one cell without an id."""

NUMERAL: Final = r"(?<![\w.])(?:(?<![\w)\]%])[-+−])?\d+(?:,\d{3})*(?:\.\d+)?"
"""A number as a page prints it; a hyphen behind a number makes a range, not a sign."""

_FOUND: Final = re.compile(rf"(?<![^\W\d_][-'’]){NUMERAL}")
_SMALL: Final = "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|hundred"
_PARTS: Final = "third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|twentieth|eightieth|hundredth|thousandth"
_WORDS: Final = re.compile(
    rf"\b(?:(?:an?|another|{_SMALL})[ \n-](?:{_PARTS})s?|half|halves|halved|twice|thrice"
    r"|(?:doubl|tripl|quadrupl)(?:e|es|ed|ing)"
    rf"|(?:{_SMALL})[ \n-](?:times|percent|per cent|fold)|(?:{_SMALL})fold)\b",
    re.IGNORECASE,
)
"""Number words that state a size: fractions, multiples and percentages."""

_PASSAGES_KEPT: Final = 512
"""Each is asked for again with every statement about it."""
_BLANK: Final = "\0"
_DIRECTIVES: Final = "exercise|solution|hint|note|tip|warning|admonition|figure|dropdown|glossary|list-table"
_NAMED: Final = (
    r"(?:[Ff]ig(?:ure|\.)|[Tt]able|[Ss]ection|[Ee]quation|[Ee]q\.|[Ll]isting|[Aa]lgorithm|[Cc]hapter|[Ee]xercise)"
)
_NUMBER: Final = r"\d+[a-z]?(?:\.\d+)*\b"

_FENCE: Final = re.compile(r"[ \t]*(?P<marks>`{3,}|~{3,}|:{3,})(?P<rest>[^\n]*?)[ \t]*$")
_IS_PROSE: Final = re.compile(rf"\{{(?:{_DIRECTIVES})\}}")
_MASKED: Final = tuple(
    re.compile(pattern, re.DOTALL | re.MULTILINE)
    for pattern in (
        r"\A---\n.*?^---$",  # front matter
        r"<!-- (?P<made>[\w-]+): begin -->.*?<!-- (?P=made): end -->",  # generated
        r"^% table: (?!assumptions$).*?^% end of table$",  # generated; assumptions are read
        r"^[ \t]*:[\w-]+:[^\n]*$",  # and its options
        r"\$\$.*?\$\$(?:[ \t]*\([\w-]+\))?",
        r"<!--.*?-->|</?[A-Za-z][^<>\n]*>",  # a tag or an address; not "< 30 s and > 5"
        r"`[^`]*`",  # code, and roles: terms, citations, references
        r"\$[^$\n]+(?:\n[^$\n]+)?\$",
        r"\]\([^)]*\)|https?://\S+|^\([\w-]+\)=",
        r"^#+ [^\n]*$",
        r"^[ \t]*\d+\.(?=\s)",  # the numbers of a list
        r"arXiv[ \n](?:v\d|\d{4}\.\d+)|FAST['’]\d\d|\b(?:OSDI|SOSP|NSDI|ASPLOS|ICML|NeurIPS|ISCA)[ '’]*\d+",
        rf"\b{_NAMED}s[ \n]+{_NUMBER}(?:(?:,|,? and| to| or|[-–])\s*{_NUMBER})*",
        rf"(?:§§?|\b{_NAMED}[ \n]+){_NUMBER}(?:[-–]{_NUMBER}|(?: to| and)\s*§{_NUMBER})?",
        r"\b\d+B\b",  # the size of a model is its name
    )
)

_HEADING: Final = re.compile(r"^#{1,6} [^\n]*$", re.MULTILINE)
_FULL_STOP: Final = re.compile(
    r"[.!?][*)\]\"”’']*(?=\s|$)|(?P<end>\n\s*(?:\n|\||\0+\n|\0+$)|\n(?=[ \t]*(?:[*-]|\d+\.)[ \t]))"
)
_SENTENCE_END: Final = re.compile(r"(?<=[.!?:;])[*)]*\s+|\n\s*(?:\n|\||\0+\n)|\n(?=[*-] )")


@dataclass(frozen=True, slots=True)
class Passage:
    """A stretch of words and where it stands."""

    where: str
    """The cell's id, with `caption` or `alt`; the page's own name on a Markdown page."""
    part: str
    """`text`, `caption` or `alt`."""
    text: str

    def spot(self, at: int) -> str:
        """Where a character is, as an author finds it."""
        return f"{self.where}, line {self.text.count(chr(10), 0, at) + 1}" if self.part == "text" else self.where

    def sentence(self, at: int) -> tuple[int, int]:
        """The span of the sentence around a character."""
        blank = masked(self.text)
        ends = [
            0,
            *(m.end() for m in _SENTENCE_END.finditer(blank)),
            len(self.text),
        ]
        which = bisect_right(ends, at)
        return ends[which - 1], ends[which] if which < len(ends) else len(self.text)


def headings(text: str) -> list[int]:
    """The end of the line of each heading; lines of code that begin with a number sign are none."""
    return [found.end() for found in _HEADING.finditer(_without_fences(text))]


def end_of_sentence(text: str, at: int) -> int:
    """The end of the sentence, or of the table's cell, that ends at a character or behind it."""
    blank = masked(text)
    line = text.rfind("\n", 0, at) + 1
    if text[line:].lstrip().startswith("|"):
        bar = re.search(r"(?<!\\)\||$", text[at:], re.MULTILINE)
        stop = at + (bar.start() if bar else 0)
    else:
        found = _FULL_STOP.search(blank, max(at - 1, 0))
        stop = (found.start("end") if found["end"] is not None else found.end()) if found else len(text)
    return len(text[: max(stop, at)].rstrip())


def read_page(path: Path) -> Content:
    """A notebook, or a Markdown page in the shape of one.

    Raises:
        ValueError: when a notebook is not JSON.
    """
    if path.suffix == ".ipynb":
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is not a Jupyter notebook: {error}") from error
    return {"cells": [{"cell_type": "markdown", "id": path.name, "source": path.read_text(encoding="utf-8")}]}


def write_page(path: Path, content: Content) -> bool:
    """Write what `read_page` read, as Jupyter formats it; False where the file says so already."""
    if path.suffix == ".ipynb":
        import json  # msgspec cannot indent by one and leave empty objects on one line

        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    else:
        text = content["cells"][0]["source"]
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def passages(content: Content) -> Iterator[Passage]:
    """All that a page says in words, in order."""
    for cell in content["cells"]:
        yield from _passages(cell)


def rewrite(content: Content, say: Callable[[Passage], str]) -> None:
    """Replace each passage, in place."""
    for cell in content["cells"]:
        for passage in _passages(cell):
            _put(cell, passage.part, say(passage))


def masked(text: str) -> str:
    """The text with everything blanked that is no prose; as long as before."""
    text = _without_fences(text)
    for pattern in _MASKED:
        text = pattern.sub(lambda found: re.sub(r"[^\n]", _BLANK, found[0]), text)
    return text


def _without_fences(text: str) -> str:
    """The text with its code blocks blanked, and the first and last line of each directive; as long as before."""
    lines: list[str] = []
    ends: list[str] = []  # of the blocks that are open; within code, none opens
    in_code = False
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if fence and ends and not fence["rest"] and fence["marks"].startswith(ends[-1]):
            ends.pop()
            in_code, blank = False, True
        elif fence and not in_code and "`" not in fence["rest"]:
            ends.append(fence["marks"])
            in_code, blank = not _IS_PROSE.match(fence["rest"]), True
        else:
            blank = in_code
        lines.append(re.sub(r"[^\n]", _BLANK, line) if blank else line)
    return "".join(lines)


@lru_cache(maxsize=_PASSAGES_KEPT)
def numerals(text: str) -> tuple[tuple[int, int], ...]:
    """The spans of the numerals, and of the number words that state a size."""
    blank = masked(text)
    return tuple(sorted(found.span() for kind in (_FOUND, _WORDS) for found in kind.finditer(blank)))


def _passages(cell: Mapping[str, Any]) -> Iterator[Passage]:
    if cell["cell_type"] == "markdown":
        yield Passage(cell["id"], "text", joined(cell["source"]))
    described = cell.get("metadata", {}).get("mystnb", {})
    for part, kind, key in (("caption", "figure", "caption"), ("alt", "image", "alt")):
        if text := described.get(kind, {}).get(key):
            yield Passage(f"{cell['id']}, {part}", part, text)


def _put(cell: Content, part: str, text: str) -> None:
    if part == "text":
        cell["source"] = text if isinstance(cell["source"], str) else text.splitlines(keepends=True)
    else:
        kind = {"caption": "figure", "alt": "image"}[part]
        cell["metadata"]["mystnb"][kind][part] = text
