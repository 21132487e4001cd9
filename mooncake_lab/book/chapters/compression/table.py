"""The full accuracy table, which takes too long for a chapter: `data/measured/compression_accuracy.csv`.

python -m mooncake_lab.book.chapters.compression.table --prompts 170 --seeds 3
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Final

import pandas as pd
from rich.console import Console
from rich.progress import track

from mooncake_lab.bench.machine import describe_machine
from mooncake_lab.book.chapters.compression.experiment import exams
from mooncake_lab.book.experiments import run, where
from mooncake_lab.core import carried_folder

_KEPT: Final = carried_folder("measured") / "compression_accuracy.csv"
_FIELDS: Final = ("task", "when", "prompts", "length", "model", "seed")


def measured() -> pd.DataFrame:
    """The committed rows of `Exam`, with the weights that answered, the machine and the date of each."""
    return pd.read_csv(_KEPT)


def weights_digest(model: str) -> str:
    """First characters of the SHA-256 of a model's weights: which ones answered; random ones have their name."""
    if model.startswith("random:"):
        return model
    whole = (carried_folder("models") / model / "model.safetensors").read_bytes()
    return sha256(whole).hexdigest()[:12]


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask every question and write the table; what is there already is kept, so it may be interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=500, help="of each task and seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=_KEPT)
    given = parser.parse_args(arguments)
    points = [replace(each, prompts=given.prompts) for each in exams("full") if each.seed < given.seeds]
    points.sort(key=lambda each: each.seed)  # so that an interrupted table has whole seeds
    done = pd.read_csv(given.output) if given.output.exists() else pd.DataFrame(columns=[*_FIELDS, "weights"])
    for point in track(points, "exams", console=Console(stderr=True)):
        asked = {name: getattr(point, name) for name in _FIELDS} | {"weights": weights_digest(point.model)}
        if not len(where(done, **asked)):
            rows = run(point, cache=False).drop(columns="methods")
            rows = rows.assign(weights=asked["weights"], machine=str(describe_machine()))
            done = pd.concat([done, rows]) if len(done) else rows
            done.to_csv(given.output, index=False)


if __name__ == "__main__":
    main()
