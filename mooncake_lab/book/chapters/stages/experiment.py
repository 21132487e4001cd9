"""Prefill and decode: what the papers report, what a node's model predicts, what this machine does."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from mooncake_lab import perf
from mooncake_lab.bench.stages import ClockName, StageMeasurement, StagePlan, measure_stages, read_measurement
from mooncake_lab.book.experiments import at_scale, where
from mooncake_lab.core import carried_folder

Array = npt.NDArray[np.float64]

_COMMITTED: Final = carried_folder("measured") / "cpu_stages.json"

REPORTED: Final = [
    "stage", "batch", "tokens", "seconds", "least_s", "most_s", "share_of_peak_flops", "share_of_peak_bandwidth",
]  # fmt: skip
"""The columns of a measurement that a chapter shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStages:
    """A random Llama, really run on this machine: prefills over lengths, decode steps over batches.

    Run it with `cache=False`: a time measured yesterday says nothing about now.
    """

    model: str = "lab-30m"
    prefill_tokens: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Decode batches, each at every one of the contexts."""
    context_tokens: tuple[int, ...] = (256, 1024)
    rounds: int = 4
    threads: int | None = 1
    """One, because chapters are executed side by side, and threads that wait for each other spoil a clock."""
    clock: ClockName = "processor"
    """Seconds of computing, not of waiting for other programs; with more threads, or on a GPU, `wall`."""
    budget_s: float = 30.0
    seed: int = 0
    device: str = "cpu"

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row a measured point, with the machine and its peaks repeated on each."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("scale 'gpu' measures on a CUDA device and torch sees none; choose classroom or full")
        plan = StagePlan(
            prefill_tokens=self.prefill_tokens,
            decode_points=tuple((batch, context) for context in self.context_tokens for batch in self.batches),
            rounds=self.rounds,
            threads=self.threads,
            clock=self.clock,
            budget_s=self.budget_s,
        )
        shape = perf.model_shape(self.model)
        return measured_rows(measure_stages(shape, plan, seed=self.seed, device=self.device))


def measured_stages(scale: str, *, seed: int = 0) -> MeasuredStages:
    """What is measured at a scale: seconds, half a minute, minutes on a CPU; an 8B model on a GPU."""
    wall: dict[str, Any] = {"threads": None, "clock": "wall"}
    return at_scale(
        MeasuredStages(seed=seed),
        scale,
        smoke={"model": "lab-8m", "prefill_tokens": (32, 64, 128, 256), "batches": (1, 2, 4)}
        | {"context_tokens": (32, 256), "rounds": 2, "budget_s": 5.0},
        full={"model": "lab-100m", "context_tokens": (256, 1024, 2048), "rounds": 9, "budget_s": 240.0, **wall},
        gpu={"model": "llama3-8b", "prefill_tokens": (1024, 4096, 8192, 16384, 32768), "batches": (1, 4, 16, 32)}
        | {"context_tokens": (1024, 4096), "budget_s": 120.0, "device": "cuda", **wall},
    )


def measured_rows(measured: StageMeasurement) -> Iterator[dict[str, Any]]:
    """A measurement as rows: the times, and beside each the machine, its peaks and the share of them reached."""
    shape = replace(perf.model_shape(measured.model), bytes_per_element=measured.bytes_per_element)
    peak_flops_per_s = measured.hardware.flops_per_s(measured.dtype)
    peak_bytes_per_s = measured.hardware.memory_bytes_per_s
    for each in measured.times:
        prefill, context = each.stage == "prefill", each.batch * each.tokens
        work = perf.prefill_work(shape, each.tokens) if prefill else perf.decode_work(shape, each.batch, context)
        columns = ("stage", "batch", "tokens", "seconds", "least_s", "most_s", "samples")
        yield {name: getattr(each, name) for name in columns} | {
            "intensity_flops_per_byte": work.intensity_flops_per_byte,
            "flops_per_s": work.flops / each.seconds,
            "share_of_peak_flops": work.flops / each.seconds / peak_flops_per_s,
            "share_of_peak_bandwidth": work.bytes / each.seconds / peak_bytes_per_s,
            "peak_flops_per_s": peak_flops_per_s,
            "peak_bytes_per_s": peak_bytes_per_s,
            "dtype": measured.dtype,
            "machine": f"{measured.machine}, {measured.clock} clock",
        }


def beside_committed(measured: pd.DataFrame) -> pd.DataFrame:
    """This machine beside the one that came with the book, at points of a model that both measured."""
    committed = read_measurement(_COMMITTED)
    book = pd.DataFrame(measured_rows(committed)).assign(model=committed.model)
    point = ["model", "stage", "batch", "tokens"]
    both = measured[[*point, "seconds"]].merge(book[[*point, "seconds"]], on=point, suffixes=("_here", "_book"))
    here_ms, book_ms = 1000 * both["seconds_here"], 1000 * both["seconds_book"]
    return both[point[1:]].assign(here_ms=here_ms, book_ms=book_ms, here_over_book=here_ms / book_ms)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MachineCalibration:
    """Latency models of the machine that measured."""

    machine: str
    prefill: perf.Calibration[perf.PrefillLatency]
    decode: perf.Calibration[perf.DecodeLatency]


def calibrate_machine(measured: pd.DataFrame) -> MachineCalibration:
    """Fit both stages to a table of `MeasuredStages`."""
    tokens, _, prefill_s = stage_columns(measured, "prefill")
    context, batch, step_s = stage_columns(measured, "decode")
    return MachineCalibration(
        machine=str(measured["machine"].iloc[0]),
        prefill=perf.fit_prefill(tokens, np.zeros_like(tokens), prefill_s),
        decode=perf.fit_decode(batch, batch * context, step_s),
    )


def stage_columns(measured: pd.DataFrame, stage: str, tokens: int | None = None) -> tuple[Array, Array, Array]:
    """Tokens, batch and seconds of one stage, as arrays; of one number of tokens, if given."""
    chosen = where(measured, stage=stage) if tokens is None else where(measured, stage=stage, tokens=tokens)
    found, batch, seconds = chosen[["tokens", "batch", "seconds"]].to_numpy(dtype=float).T
    return found, batch, seconds
