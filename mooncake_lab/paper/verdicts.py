"""How a number of ours is held against a number of a paper."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

Grade: TypeAlias = Literal["order", "factor", "value"]
"""What has to agree: which side of a threshold, the size up to a factor, or the value up to a share."""

Reach: TypeAlias = Literal["here", "hardware", "scope"]
"""Whether this book can measure it: anywhere, only on the right hardware, or not at all (production)."""


class Verdict(StrEnum):
    """What became of a claim; the text is what the book prints."""

    REPRODUCED = "reproduced"
    DIRECTION_ONLY = "direction only"
    NOT_REPRODUCED = "not reproduced"
    OUT_OF_SCOPE = "out of scope"
    NEEDS_HARDWARE = "needs hardware"
    TRACE_NOT_HERE = "trace not here"
    TOO_SHORT = "too short to judge"


SENSES: Final[Mapping[str, Callable[[float, float], bool]]] = MappingProxyType(
    {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}
)
"""On which side of a threshold a number must lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """How closely our number must match the paper's, fixed before we measure.

    Raises:
        ValueError: when the band does not fit the grade, or sense and threshold do not come together.
    """

    grade: Grade
    band: float | None = None
    """Grade value: largest |ours/paper - 1|. Grade factor: largest ratio between ours and the paper's, from 1."""
    sense: str | None = None
    """A name in `SENSES`: the direction of the claim. None where the claim has none."""
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.grade not in {"order", "factor", "value"}:
            raise ValueError(f"unknown grade {self.grade!r}; allowed are order, factor and value")
        least = {"order": None, "factor": 1.0, "value": 0.0}[self.grade]
        if (least is None) != (self.band is None) or (self.band is not None and not self.band >= (least or 0.0)):
            raise ValueError(
                f"grade {self.grade} has band {self.band!r}; order has none, factor from 1, value from 0"
            )
        if (self.sense is None) != (self.threshold is None) or (self.grade == "order" and self.sense is None):
            raise ValueError(
                f"grade {self.grade} has sense {self.sense!r} and threshold {self.threshold!r};"
                " they come together, and order needs them"
            )
        if self.sense is not None and self.sense not in SENSES:
            raise ValueError(f"unknown sense {self.sense!r}; allowed are {', '.join(SENSES)}")


def within(share: float, *, sense: str | None = None, threshold: float | None = None) -> Yardstick:
    """Equal up to a share of the paper's value, e.g. `within(0.05)`."""
    return Yardstick(grade="value", band=share, sense=sense, threshold=threshold)


def factor(band: float, *, sense: str | None = None, threshold: float | None = None) -> Yardstick:
    """Equal up to a factor, e.g. `factor(1.5)`."""
    return Yardstick(grade="factor", band=band, sense=sense, threshold=threshold)


def order(sense: str, threshold: float) -> Yardstick:
    """On the stated side of a threshold, e.g. `order("above", 1.0)`."""
    return Yardstick(grade="order", sense=sense, threshold=threshold)


def judge(paper: float, ours: float | None, yardstick: Yardstick, *, reach: Reach = "here") -> Verdict:
    """The verdict on our number.

    Args:
        paper: the paper's number.
        ours: our number in the same unit; None where it was not measured.
        yardstick: how closely they must match.
        reach: whether it can be measured here. Where it needs hardware, a number from that hardware is judged.

    Raises:
        ValueError: when our number is missing although it can be measured here, or is not finite.
    """
    if reach == "scope":
        return Verdict.OUT_OF_SCOPE
    if ours is None:
        if reach == "hardware":
            return Verdict.NEEDS_HARDWARE
        raise ValueError(f"no number of ours is given beside the paper's {paper!r}; it can be measured here")
    if not math.isfinite(ours):
        raise ValueError(f"our number beside the paper's {paper!r} is {ours!r}; a finite number is needed")
    if yardstick.grade != "order" and _agrees(paper, ours, yardstick):
        return Verdict.REPRODUCED
    if yardstick.sense is None or yardstick.threshold is None:
        return Verdict.NOT_REPRODUCED
    if not SENSES[yardstick.sense](ours, yardstick.threshold):
        return Verdict.NOT_REPRODUCED
    return Verdict.REPRODUCED if yardstick.grade == "order" else Verdict.DIRECTION_ONLY


def _agrees(paper: float, ours: float, yardstick: Yardstick) -> bool:
    band = yardstick.band or 0.0
    if yardstick.grade == "value":
        return abs(ours - paper) <= band * abs(paper)
    if paper == 0 or ours / paper <= 0:
        return paper == ours
    return 1 / band <= ours / paper <= band
