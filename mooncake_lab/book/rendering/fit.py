"""Whether numbers fit the words around them: a sentence written for one run cannot take the numbers of any other.

"35 % instead of 35 %", "-1 to 33 % lower", "In all 1 other bins" and "0 % longer" are no statements. A sentence
that would read so keeps the numbers it was written with, and is marked like one whose direction does not hold.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from mooncake_lab.book.rendering.expressions import WORDS

_CONTRAST: Final = re.compile(
    r"\b(?:instead of|rather than|compared (?:with|to)|as opposed to|against|than|whereas|but|down to|up to)\b"
)
_RANGE: Final = re.compile(r"\s*(?:%|[^\W\d]\S*)?\s*(?:to|up to|down to|[-–])\s*")
"""All that stands between the ends of a range: `2 to 4 %`, `2 s to 4 s`, `2-4`."""
_BETWEEN: Final = re.compile(r"\bbetween\s+$")
_FROM: Final = re.compile(r"\bfrom\s+(?:about |nearly |only )?$")
_TO: Final = re.compile(r"\bto\s+(?:about |nearly |only )?$")
_SENTENCE_END: Final = re.compile(r"[.!?:;]\s")
_COMPARATIVE: Final = re.compile(
    r"\s*(?:%|percentage points?|percent|times|[^\W\d]{1,4})?\s*"
    r"(?:more|less|fewer|lower|higher|longer|shorter|better|worse|faster|slower|above|below|ahead|other|further|times)\b"
)
_RESTRICTED: Final = re.compile(r"\b(?:only|just|another|even|about|nearly|all|least|the)\s+$")
_PLURAL: Final = re.compile(
    r"\s+(?:(?!(?:of|in|to|and|or|per|at|is|has|was|on|from|with|for)\b)[^\W\d_]+[- ]){0,2}"
    r"(?!less\b)[a-z]{2,}(?<!s)s\b"
)


@dataclass(frozen=True, slots=True)
class Filled:
    """A number in a text: where it stands, and what another run would print in its place."""

    start: int
    end: int
    printed: str
    signed: bool = False
    """Whether its format always prints a sign, so that the sentence allows for both."""


def misfits(text: str, filled: Sequence[Filled]) -> Iterator[str]:
    """What is wrong with a text that is filled with other numbers, which stand in it one behind the other."""
    for each in filled:
        yield from _alone(text, each)
    for one, other in pairwise(filled):
        yield from _together(text, one, other)


def _alone(text: str, each: Filled) -> Iterator[str]:
    was, now = _value(text[each.start : each.end]), _value(each.printed)
    if was is None or now is None or was == now:
        return
    before, after = text[: each.start], text[each.end :]
    if now < 0 <= was and not each.signed:
        yield f"{each.printed} is below zero"
    if now == 0 and (_COMPARATIVE.match(after) or _RESTRICTED.search(before)):
        yield f"{each.printed} is nothing"
    if each.printed in {"1", "one"} and was not in {0, 1} and _PLURAL.match(after):
        yield f"{each.printed} stands before a plural"


def _together(text: str, one: Filled, other: Filled) -> Iterator[str]:
    between = text[one.end : other.start]
    if _SENTENCE_END.search(between):
        return
    first, second = _value(one.printed), _value(other.printed)
    first_was, second_was = _value(text[one.start : one.end]), _value(text[other.start : other.end])
    if first is None or second is None or first_was is None or second_was is None:
        return
    is_range = bool(
        _RANGE.fullmatch(between)
        or (_BETWEEN.search(text[: one.start]) and re.search(r"\band\s+$", between))
        or (_FROM.search(text[: one.start]) and _TO.search(between))
    )
    if first == second and (is_range or _CONTRAST.search(between)):
        yield f"{one.printed} is set against {other.printed}"
    elif is_range and (first < second) != (first_was < second_was):
        yield f"{one.printed} to {other.printed} runs the other way"


def _value(printed: str) -> float | None:
    """The number that a text prints; None where it is none."""
    plain = printed.strip().lower().rstrip("%").replace(",", "").replace("−", "-").strip()
    if plain in WORDS:
        return float(WORDS.index(plain))
    try:
        return float(plain)
    except ValueError:
        return None
