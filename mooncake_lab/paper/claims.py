"""The papers' claims as data, and their grading."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from mooncake_lab.paper.facts import Fact, Source
from mooncake_lab.paper.tables import read_rows
from mooncake_lab.paper.verdicts import Bound, Evidence, Grade, Reach, Verdict, Yardstick, judge

Stated: TypeAlias = Literal["before", "with", "after"]
"""When claim and band entered the repository: before any result of ours, together with its model or with a first
result, or after the result was known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence of a paper that has a number, and how ours is held against it.

    Raises:
        ValueError: when the band reaches to where there is no effect.
    """

    id: str
    """F for FAST'25, A for arXiv v3, S for SARATHI and Sarathi-Serve."""
    sentence: str
    fact: Fact
    conditions: str
    yardstick: Yardstick
    reach: Reach
    evidence: Evidence
    """What our number is; only what is measured or simulated can be reproduced."""
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
            `stated`, or a band that reaches to where there is no effect.
    """
    return tuple(_claim(row) for row in read_rows("claims.csv"))


def claim(identifier: str) -> Claim:
    """The claim of that id.

    Raises:
        ValueError: when no claim has that id; the message lists the ids.
    """
    found = {each.id: each for each in claims()}
    if identifier not in found:
        raise ValueError(f"no claim {identifier!r}; there are {', '.join(found)}")
    return found[identifier]


def grade(claim: Claim, ours: float | None, *, requests: int | None = None, bound: Bound = "exact") -> Verdict:
    """The verdict on a claim, given our number in the claim's unit (None where it was not measured).

    Args:
        claim: the claim.
        ours: our number.
        requests: of the run that our number comes from, where the claim depends on their count.
        bound: whether our number is only a lower bound.

    Raises:
        ValueError: when a number that can be measured here is missing, or is not finite, or the length of the run
            is missing.
    """
    if claim.is_too_short(requests):
        return Verdict.TOO_SHORT
    return judge(
        claim.fact.value,
        ours,
        claim.yardstick,
        evidence=claim.evidence,
        reach=claim.reach,
        elsewhere=claim.elsewhere,
        bound=bound,
    )


def _claim(row: dict[str, str]) -> Claim:
    try:
        return Claim(
            id=row["id"],
            sentence=row["claim"],
            fact=Fact(
                value=float(row["value"]),
                unit=row["unit"],
                edition=row["edition"],
                place=row["place"],
                source=cast("Source", _one_of(row["source"], get_args(Source))),
                note=row["note"],
            ),
            conditions=row["conditions"],
            yardstick=Yardstick(
                grade=cast("Grade", row["grade"]),
                band=float(row["band"]) if row["band"] else None,
                sense=row["sense"] or None,
                threshold=float(row["threshold"]) if row["threshold"] else None,
            ),
            reach=cast("Reach", _one_of(row["reach"], get_args(Reach))),
            evidence=cast("Evidence", _one_of(row["evidence"], get_args(Evidence))),
            stated=cast("Stated", _one_of(row["stated"], get_args(Stated))),
            elsewhere=float(row["elsewhere"]) if row["elsewhere"] else None,
            chapter=row["chapter"],
            note=row["note"],
            least_requests=int(row["least_requests"]) if row["least_requests"] else None,
        )
    except ValueError as error:
        raise ValueError(f"claim {row['id']!r} of claims.csv: {error}") from error


def _one_of(text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise ValueError(f"{text!r} is not one of {', '.join(allowed)}")
    return text
