"""Where the data that travels with the project lies: the papers' numbers, measurements, trained models.

In a checkout it is `data/`; in an installed package, which has no checkout around it, the same folders are inside
the package. Nothing is downloaded and nothing is guessed.
"""

from pathlib import Path

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
