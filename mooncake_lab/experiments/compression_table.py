"""The full accuracy table, which takes too long for a chapter: `data/measured/compression_accuracy.csv`.

python -m mooncake_lab.experiments.compression_table --prompts 500 --seeds 3
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from tqdm import tqdm

from mooncake_lab.core import carried_folder
from mooncake_lab.engine.machine import describe_machine
from mooncake_lab.experiments.compression import Exam, exams
from mooncake_lab.experiments.experiment import run

NAME = "compression_accuracy.csv"


def measured() -> pd.DataFrame:
    """The committed rows of `Exam`, with the weights that answered, the machine and the date of each."""
    return pd.read_csv(carried_folder("measured") / NAME)


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
    parser.add_argument("--output", type=Path, default=None, help=f"default: data/measured/{NAME}")
    given = parser.parse_args(arguments)
    output: Path = given.output or carried_folder("measured") / NAME
    points = [replace(each, prompts=given.prompts) for each in exams("full") if each.seed < given.seeds]
    points.sort(key=lambda each: each.seed)  # so that an interrupted table has whole seeds
    done = pd.read_csv(output) if output.exists() else pd.DataFrame()
    for point in tqdm(points, unit="exam"):
        if len(done) and len(done[_same(done, point)]):
            continue
        rows = run(point, cache=False).drop(columns="methods")
        rows = rows.assign(weights=weights_digest(point.model), machine=str(describe_machine()))
        done = pd.concat([done, rows])
        done.to_csv(output, index=False)


def _same(done: pd.DataFrame, point: Exam) -> npt.NDArray[np.bool_]:
    fields = ("task", "when", "prompts", "length", "model", "seed")
    same = np.ones(len(done), dtype=bool)
    for field in fields:
        same &= done[field].to_numpy() == getattr(point, field)
    return same & (done["weights"].to_numpy() == weights_digest(point.model))


if __name__ == "__main__":
    main()
