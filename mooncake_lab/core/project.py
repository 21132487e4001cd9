"""What belongs to the whole project: the scales at which everything runs, and the data that travels with it.

In a checkout the data is `data/`; in an installed package, which has no checkout around it, the same folders are
inside the package. Nothing is downloaded and nothing is guessed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeVar

Entry = TypeVar("Entry")
SCALES: Final = ("smoke", "classroom", "full", "gpu")
"""Seconds, for CI; what the book shows; the paper's setting; needs a device."""


def check_scale(scale: str) -> str:
    """The scale itself.

    Raises:
        ValueError: when it is not one of `SCALES`.
    """
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}; allowed are {', '.join(SCALES)}")
    return scale


def entry(table: Mapping[str, Entry], name: str, refusal: str) -> Entry:
    """What a table has under a name that a reader or a user chose.

    Raises:
        ValueError: when it has no such name; the message begins with `refusal`, such as "no testbed", and says
            which names there are.
    """
    if name not in table:
        raise ValueError(f"{refusal} {name!r}; allowed are {', '.join(table)}")
    return table[name]


_PACKAGE = Path(__file__).resolve().parents[1]


def carried_folder(name: str, package: Path = _PACKAGE) -> Path:
    """The folder `data/name` that belongs to this package: `paper`, `measured` or `models`.

    Raises:
        FileNotFoundError: naming the places searched, when none of them is there.
    """
    places = (package / "data" / name, package.parent / "data" / name)
    for place in places:
        if place.is_dir():
            return place
    searched = " nor in ".join(str(place) for place in places)
    raise FileNotFoundError(f"the project's {name!r} data is neither in {searched}; install the package again")
