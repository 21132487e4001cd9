"""What a batch was made from, beside its results: the page banner and the scorecard read it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

FILE: Final = "provenance.json"

BOOK_TRACES: Final = ("conversation", "synthetic")
"""The released traces that carry the chapters; where one is missing, every page says so."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Scale, seed, and the traces found (sha256, or None where the twin stood in)."""

    scale: str
    seed: int
    traces: dict[str, str | None]

    @property
    def banner(self) -> str | None:
        """The sentence for the top of every page, or None when the released traces were there."""
        missing = [name for name in BOOK_TRACES if self.traces.get(name) is None]
        if not missing:
            return None
        which = " and ".join(missing)
        return (
            f"The released {which} trace{'s' * (len(missing) > 1)} could not be found when this book was built."
            " Figures that speak of them are drawn from generated twins with the same statistics."
            " `make traces` fetches the originals."
        )


def write_provenance(folder: Path, *, scale: str, seed: int, traces: Mapping[str, str | None]) -> Provenance:
    """Write `provenance.json`, untouched if it says the same already."""
    provenance = Provenance(scale=scale, seed=seed, traces=dict(traces))
    content = msgspec.json.format(msgspec.json.encode(provenance), indent=1) + b"\n"
    path = folder / FILE
    if not path.is_file() or path.read_bytes() != content:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return provenance


def read_provenance(folder: Path) -> Provenance | None:
    """What `write_provenance` wrote, or None where nothing has been executed yet."""
    path = folder / FILE
    return msgspec.json.decode(path.read_bytes(), type=Provenance) if path.is_file() else None
