"""The full accuracy table, which takes too long for a chapter: `data/measured/compression_accuracy.csv`.

python -m mooncake_lab.chapters.compression.table --prompts 170 --seeds 3 --jobs 2
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from tqdm import tqdm

from mooncake_lab.bench.machine import describe_machine
from mooncake_lab.chapters.compression.experiment import Exam, exams
from mooncake_lab.core import carried_folder
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
    parser.add_argument("--jobs", type=int, default=1, help="exams at once, each in a process of its own")
    parser.add_argument("--output", type=Path, default=None, help=f"default: data/measured/{NAME}")
    given = parser.parse_args(arguments)
    output: Path = given.output or carried_folder("measured") / NAME
    points = [replace(each, prompts=given.prompts) for each in exams("full") if each.seed < given.seeds]
    points.sort(key=lambda each: each.seed)  # so that an interrupted table has whole seeds
    done = pd.read_csv(output) if output.exists() else pd.DataFrame()
    missing = [point for point in points if not (len(done) and len(done[_same(done, point)]))]
    for rows in tqdm(_all_examined(missing, given.jobs), total=len(missing), unit="exam"):
        done = pd.concat([done, rows])
        done.to_csv(output, index=False)


def _all_examined(points: Sequence[Exam], jobs: int) -> Iterator[pd.DataFrame]:
    if jobs == 1:
        yield from map(_examined, points)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for one in as_completed([pool.submit(_examined, point) for point in points]):
            yield one.result()


def _examined(point: Exam) -> pd.DataFrame:
    rows = run(point, cache=False).drop(columns="methods")
    return rows.assign(weights=weights_digest(point.model), machine=str(describe_machine()))


def _same(done: pd.DataFrame, point: Exam) -> npt.NDArray[np.bool_]:
    fields = ("task", "when", "prompts", "length", "model", "seed")
    same = np.ones(len(done), dtype=bool)
    for field in fields:
        same &= done[field].to_numpy() == getattr(point, field)
    return same & (done["weights"].to_numpy() == weights_digest(point.model))


if __name__ == "__main__":
    main()
