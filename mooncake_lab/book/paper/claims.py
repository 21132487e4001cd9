"""The papers' claims as data, and how a number of ours is held against one of theirs."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from mooncake_lab.book.paper.evidence import Basis, Grounds, grounds
from mooncake_lab.book.paper.facts import Fact, read_rows, told

Grade: TypeAlias = Literal["order", "factor", "value"]
"""What has to agree: which side of a threshold, the size up to a factor, or the value up to a share."""

Reach: TypeAlias = Literal["here", "hardware", "model", "scope"]
"""Where it can be measured: anywhere, only on the named hardware, only with the named model, or nowhere outside
the production that the paper reports."""

Evidence: TypeAlias = Literal["measured", "simulated", "calibrated", "arithmetic"]
"""What our number is: measured (real code on real hardware, or counted in a released trace), simulated (a model
predicts it), calibrated (the model was fitted to it), or arithmetic (it follows from printed numbers)."""

Bound: TypeAlias = Literal["exact", "at least"]
"""Whether our number is the quantity itself, or a lower bound because the grid of the experiment ended there."""


class Verdict(StrEnum):
    """What became of a claim; the text is what the book prints."""

    REPRODUCED = "reproduced"
    CONDITIONAL = "conditional"
    DIRECTION_ONLY = "direction only"
    NOT_REPRODUCED = "not reproduced"
    CONTRADICTS = "the paper contradicts itself"
    AT_LEAST = "at least"
    AT_LEAST_IF = "conditionally at least"
    BY_CONSTRUCTION = "by construction"
    CALIBRATED = "calibrated"
    ARITHMETIC = "arithmetic"
    TOO_SHORT = "too short to judge"
    NEEDS_HARDWARE = "needs hardware"
    NEEDS_MODEL = "needs the model"
    TRACE_NOT_HERE = "trace not here"
    OUT_OF_SCOPE = "out of scope"


AGREEMENT: Final[Mapping[Basis, Verdict]] = MappingProxyType(
    {
        Basis.PREDICTED: Verdict.REPRODUCED,
        Basis.BY_CONSTRUCTION: Verdict.BY_CONSTRUCTION,
        Basis.CALIBRATED: Verdict.CALIBRATED,
        Basis.ARITHMETIC: Verdict.ARITHMETIC,
    }
)
"""What agreement is called where no condition decides it. Only a prediction counts as reproduced."""

BASIS: Final[Mapping[Evidence, Basis]] = MappingProxyType(
    {
        "measured": Basis.PREDICTED,
        "simulated": Basis.PREDICTED,
        "calibrated": Basis.CALIBRATED,
        "arithmetic": Basis.ARITHMETIC,
    }
)
"""What a number is worth that belongs to no claim, by the way it was made."""


def agreement(on: Grounds) -> Verdict:
    """What agreement is called: `conditional` where a named condition decides a prediction."""
    return Verdict.CONDITIONAL if on.condition else AGREEMENT[on.basis]


CONDITIONED: Final = frozenset({Verdict.CONDITIONAL, Verdict.AT_LEAST_IF, Verdict.CONTRADICTS})
"""Verdicts that are shown with their condition, where they have one."""

NOT_JUDGED: Final[Mapping[str, Verdict]] = MappingProxyType(
    {"scope": Verdict.OUT_OF_SCOPE, "model": Verdict.NEEDS_MODEL}
)
"""Reaches whose claims no number of ours can judge; one of a small model in place of the named one is shown."""

SENSES: Final[Mapping[str, Callable[[float, float], bool]]] = MappingProxyType(
    {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}
)
"""On which side of a threshold a number must lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """How closely our number must match the paper's.

    Raises:
        ValueError: when the band does not fit the grade, or sense and threshold do not come together.
    """

    grade: Grade
    band: float | None = None
    """Grade value: largest |ours/paper - 1|. Grade factor: largest ratio between ours and the paper's, from 1."""
    sense: str | None = None
    """A name in `SENSES`: the direction of the claim. None where the claim has none."""
    threshold: float | None = None
    """Where there is no effect (grades factor and value), or what the paper bounds the number by (grade order)."""

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

    def limits(self, paper: float) -> tuple[float, float]:
        """The least and the largest number that agrees with the paper's; infinite where nothing bounds it."""
        band = self.band or 0.0
        if self.grade == "value":
            return paper - band * abs(paper), paper + band * abs(paper)
        if self.grade == "factor":
            low, high = sorted((paper / band, paper * band))
            return low, high
        threshold = math.nan if self.threshold is None else self.threshold  # grade order has one, see above
        return (threshold, math.inf) if self.sense in {"above", "at_least"} else (-math.inf, threshold)

    def has_direction(self, ours: float) -> bool:
        """Whether a number lies on the claim's side; true of every number where the claim has no direction."""
        if self.sense is None or self.threshold is None:
            return True
        return SENSES[self.sense](ours, self.threshold)

    def check_band(self, paper: float) -> None:
        """Refuse a band that reaches to where there is no effect.

        Raises:
            ValueError: when a number without the claim's direction would lie within the band.
        """
        if self.grade == "order" or self.threshold is None:
            return
        low, high = self.limits(paper)
        if low <= self.threshold <= high:
            raise ValueError(
                f"the band {low:g} to {high:g} around {paper:g} contains {self.threshold:g}, where there is no"
                " effect; it must end before that"
            )


def within(share: float, *, sense: str | None = None, threshold: float | None = None) -> Yardstick:
    """Equal up to a share of the paper's value, e.g. `within(0.05)`."""
    return Yardstick(grade="value", band=share, sense=sense, threshold=threshold)


def factor(band: float, *, sense: str | None = None, threshold: float | None = None) -> Yardstick:
    """Equal up to a factor, e.g. `factor(1.5)`."""
    return Yardstick(grade="factor", band=band, sense=sense, threshold=threshold)


def order(sense: str, threshold: float) -> Yardstick:
    """On the stated side of a threshold, e.g. `order("above", 1.0)`."""
    return Yardstick(grade="order", sense=sense, threshold=threshold)


def judge(
    paper: float,
    ours: float | None,
    yardstick: Yardstick,
    *,
    agrees: Verdict = Verdict.REPRODUCED,
    reach: Reach = "here",
    elsewhere: float | None = None,
    bound: Bound = "exact",
) -> Verdict:
    """The verdict on our number. The direction is tested first, then the band.

    A lower bound under a condition is called so, as agreement under a condition is.

    Args:
        paper: the paper's number.
        ours: our number in the same unit; None where it was not measured.
        yardstick: how closely they must match.
        agrees: what agreement is called.
        reach: where it can be measured. Where it needs hardware, a number from that hardware is judged; where it
            needs a model, a number of another one is shown and not judged.
        elsewhere: what the paper's other numbers give for the same quantity, where they disagree with this one.
        bound: whether our number is only a lower bound.

    Raises:
        ValueError: when our number is missing although it can be measured here, or is not finite.
    """
    if reach in NOT_JUDGED:
        return NOT_JUDGED[reach]
    if ours is None:
        if reach == "hardware":
            return Verdict.NEEDS_HARDWARE
        raise ValueError(f"no number of ours is given beside the paper's {paper!r}; it can be measured here")
    if not math.isfinite(ours):
        raise ValueError(f"our number beside the paper's {paper!r} is {ours!r}; a finite number is needed")
    if not yardstick.has_direction(ours):
        return Verdict.NOT_REPRODUCED
    size = _size(paper, ours, yardstick, elsewhere=elsewhere, bound=bound)
    if size is Verdict.AT_LEAST and agrees is Verdict.CONDITIONAL:
        return Verdict.AT_LEAST_IF
    if size is not None:
        return agrees if size is Verdict.REPRODUCED else size
    return Verdict.NOT_REPRODUCED if yardstick.sense is None else Verdict.DIRECTION_ONLY


def _size(
    paper: float, ours: float, yardstick: Yardstick, *, elsewhere: float | None, bound: Bound
) -> Verdict | None:
    """What the size of a number says that has the claim's direction; None where it differs."""
    if bound == "at least":  # a lower bound shows neither that the number is below something, nor within a band
        is_downward = yardstick.sense in {"below", "at_most"}
        if is_downward or ours <= yardstick.limits(paper)[1] < math.inf:
            return Verdict.AT_LEAST
    if _agrees(paper, ours, yardstick):
        return Verdict.REPRODUCED
    if elsewhere is not None and _agrees(elsewhere, ours, yardstick):
        return Verdict.CONTRADICTS
    return None


def _agrees(paper: float, ours: float, yardstick: Yardstick) -> bool:
    """Whether a number that has the claim's direction agrees in size as well."""
    if yardstick.grade == "order":
        return True
    low, high = yardstick.limits(paper)
    return low <= ours <= high


MOONCAKE: Final = frozenset({"FAST'25", "arXiv v3"})
"""The editions of Mooncake's paper."""

Stated: TypeAlias = Literal["before", "with", "after"]
"""When claim and band entered the repository: before any result of ours, together with its model or with a first
result, or after the result was known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence of a paper that has a number, and how ours is held against it.

    Raises:
        ValueError: when the band reaches to where there is no effect, or evidence and grounds disagree.
    """

    id: str
    """F for FAST'25, A for arXiv v3, S for SARATHI and Sarathi-Serve."""
    sentence: str
    fact: Fact
    conditions: str
    yardstick: Yardstick
    reach: Reach
    evidence: Evidence
    """How our number is made."""
    grounds: Grounds
    """What its agreement is worth, and under which assumptions; only what is predicted can be reproduced."""
    stated: Stated
    chapter: str
    """Stem of the chapter that measures it, e.g. `07_store`."""
    elsewhere: float | None = None
    """What the paper's other numbers give for the same quantity, where they disagree with the fact."""
    note: str = ""
    """What to bear in mind, such as how the number was read and which row decides."""
    least_requests: int | None = None
    """Requests that a run needs before its number may be judged: caches warm, queues grow, pipelines fill. None
    where the number does not hang on the length of a run."""

    def __post_init__(self) -> None:
        self.yardstick.check_band(self.fact.value)
        if BASIS[self.evidence] not in {Basis.PREDICTED, self.grounds.basis}:
            raise ValueError(
                f"the evidence is {self.evidence!r} and the basis {self.grounds.basis.value!r};"
                " what is fitted or computed from printed numbers predicts nothing"
            )

    @property
    def is_of_mooncake(self) -> bool:
        """Whether it is from a paper on Mooncake, and not on one of the systems that it is compared with."""
        return self.fact.edition in MOONCAKE

    @property
    def is_judged(self) -> bool:
        """Whether a number of ours decides it that other assumptions could change."""
        return self.reach == "here" and self.grounds.basis in {Basis.PREDICTED, Basis.CALIBRATED}

    def is_too_short(self, requests: int | None) -> bool:
        """Whether a run of that number of requests is too short to decide this claim.

        Raises:
            ValueError: when the claim depends on the length of the run, which is not given.
        """
        if self.least_requests is None:
            return False
        if requests is None:
            raise ValueError(
                f"claim {self.id!r} is judged on runs of at least {self.least_requests} requests;"
                " say how many yours has"
            )
        return requests < self.least_requests


def claims() -> tuple[Claim, ...]:
    """Every claim, in the order of `data/paper/claims.csv`.

    Raises:
        ValueError: naming the claim whose row has a bad grade, band, sense, source, reach, evidence or
            `stated`, or a band that reaches to where there is no effect; or what `evidence.csv` lacks or has
            too much.
    """
    rests = grounds()
    return tuple(
        told(
            {**row, "sentence": row["claim"], "fact": _filled(row), "yardstick": _filled(row)}
            | {"grounds": rests[row["id"]]},
            Claim,
            f"claim {row['id']!r} of claims.csv",
        )
        for row in read_rows("claims.csv")
    )


def _filled(row: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in row.items() if text}


def claim(identifier: str) -> Claim:
    """The claim of that id.

    Raises:
        ValueError: when no claim has that id; the message lists the ids.
    """
    found = {each.id: each for each in claims()}
    if identifier not in found:
        raise ValueError(f"no claim {identifier!r}; there are {', '.join(found)}")
    return found[identifier]
