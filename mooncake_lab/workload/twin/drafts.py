"""How a twin draws, and its drafts: requests that know whose prefix they continue, before they have block ids."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.core import carried_folder

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The random stream of this seed and these names, independent of every other one.

    A stream belongs to one purpose ("conversation", "hour", 0), so that a new purpose changes no old draw.

    Raises:
        ValueError: when the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"a twin cannot be drawn with seed {seed}; allowed are integers from 0")
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:8], "little")])


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution as a table of its quantiles, straight lines between them.

    Raises:
        ValueError: when the two columns do not fit, or one of them falls.
    """

    percent: tuple[float, ...]
    """From 0 to 100."""
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a <= b for column in (self.percent, self.values) for a, b in pairwise(column))
        if len(self.percent) != len(self.values) or not rising or self.percent[:1] + self.percent[-1:] != (0, 100):
            raise ValueError(
                f"the quantile table {self.percent} -> {self.values} is broken;"
                " needed are two rising columns of one length, from 0 to 100 percent"
            )

    def at(self, u: Floats) -> Floats:
        """The values at the probabilities `u` (0 to 1), any shape."""
        return np.interp(100 * u, self.percent, self.values)


def _tables() -> dict[str, Quantiles]:
    """Percent, then what that share of the requests does not exceed; `about` says what was counted."""
    told = msgspec.json.decode((carried_folder("measured") / "twin_quantiles.json").read_bytes())
    return {name: Quantiles(tuple(table["percent"]), tuple(table["values"])) for name, table in told.items()}


TABLES: Final[Mapping[str, Quantiles]] = MappingProxyType(_tables())
"""The distributions behind the twins by name. Measured ones were read off the released traces, where one request
follows another if it reuses more of it than the common first block."""


def spread(rng: np.random.Generator, points: int, columns: int) -> Floats:
    """Evenly spread points in the unit cube, shape (columns, points), moved together by a random shift.

    Independent draws leave gaps and clusters: the mean prompt of 7,000 sessions would miss its value by more
    than a percent, for no reason but luck. These points are a random shift plus multiples of irrational steps,
    so every run of neighbours covers the whole range. Sort what you draw for (prompts by length, say), and
    the long ones get as fair a share of every outcome as the short ones.
    """
    root = 2.0
    for _ in range(64):  # the root of x^(columns+1) = x + 1, whose powers are hard to approximate by fractions
        root = (1 + root) ** (1 / (columns + 1))
    steps = root ** -np.arange(1.0, columns + 1)
    return (rng.random((columns, 1)) + steps[:, None] * np.arange(points)) % 1.0


BLOCK_SIZE_TOKENS = 512
"""Block size of the released files (FAST'25 Appendix A)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafts:
    """Requests as columns, in any order in which a parent comes before its children."""

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    parent: Ints
    """Row of the request whose prompt this one continues; `-1 - p` for one that begins with common prefix `p`."""
    kept_blocks: Ints
    """How many of the parent's leading blocks it shares; every block after them is new."""

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.arrival_s)


def stack(parts: Sequence[Drafts]) -> Drafts:
    """Parts of one whole under each other; their parents are rows of the whole already."""
    names = [column.name for column in fields(Drafts)]
    return Drafts(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def join(wholes: Sequence[Drafts]) -> Drafts:
    """Wholes under each other; parents are rows of their own whole, and become rows of the result."""
    offsets = np.cumsum([0, *(len(whole) for whole in wholes)])
    return stack(
        [
            replace(whole, parent=np.where(whole.parent < 0, whole.parent, whole.parent + offset))
            for whole, offset in zip(wholes, offsets, strict=False)
        ]
    )


def hours_until(requests: int, hour: Callable[[int], Drafts], hour_s: float) -> Drafts:
    """As many hours of a process as it takes until `requests` requests have arrived before the last one ends.

    `hour(i)` gives all requests of the sessions that begin in hour i, also those that arrive later.
    A shorter trace is therefore the beginning of a longer one.
    """
    parts: list[Drafts] = []
    arrived = 0
    while arrived < requests:
        parts.append(hour(len(parts)))
        arrived = sum(int((part.arrival_s < len(parts) * hour_s).sum()) for part in parts)
    return join(parts)


def earliest(drafts: Drafts, requests: int) -> Drafts:
    """The first `requests` requests to arrive, in that order; parents arrive before their children."""
    order = np.argsort(drafts.arrival_s, kind="stable")[:requests]
    row = np.full(len(drafts), -1)
    row[order] = np.arange(len(order))
    first = Drafts(**{column.name: getattr(drafts, column.name)[order] for column in fields(Drafts)})
    return replace(first, parent=np.where(first.parent < 0, first.parent, row[first.parent]))


def lay_blocks(drafts: Drafts, prefixes: Sequence[int]) -> list[Ints]:
    """The blocks of every draft, front to back: those kept from the parent, then new ones, numbered as they come.

    Common prefix `p` is `prefixes[p]` blocks long, and gets its numbers when it is first used. In order of arrival
    ids are therefore dense and assigned at first appearance, as in the released files.
    """
    laid: list[Ints] = []
    heads: dict[int, Ints] = {}
    fresh = 0
    lengths: list[int] = (-(-drafts.input_tokens // BLOCK_SIZE_TOKENS)).tolist()
    rows = zip(lengths, drafts.parent.tolist(), drafts.kept_blocks.tolist(), strict=True)
    for length, parent, kept in rows:
        if parent < 0 and parent not in heads:
            heads[parent] = np.arange(fresh, fresh + prefixes[-1 - parent])
            fresh += prefixes[-1 - parent]
        known = heads[parent] if parent < 0 else laid[parent]
        laid.append(np.concatenate([known[:kept], np.arange(fresh, fresh + length - kept)]))
        fresh += length - kept
    return laid
