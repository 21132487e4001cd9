"""Prefill and decode: what the papers report, what a node's model predicts, what this machine does."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from mooncake_lab.bench.stages import ClockName, StageMeasurement, StagePlan, measure_stages, read_measurement
from mooncake_lab.core import carried_folder, check_scale
from mooncake_lab.perf import (
    Calibration,
    DecodeLatency,
    PrefillLatency,
    decode_work,
    fit_decode,
    fit_prefill,
    model_shape,
    prefill_work,
)

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
        """One row a measured point, with the machine and its peaks repeated on each.

        Raises:
            ValueError: when the device is not there.
        """
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
        shape = model_shape(self.model)
        return measured_rows(measure_stages(shape, plan, seed=self.seed, device=self.device))


def measured_stages(scale: str, *, seed: int = 0) -> MeasuredStages:
    """What is measured at a scale: seconds, half a minute, minutes on a CPU; an 8B model on a GPU.

    Raises:
        ValueError: when there is no such scale.
    """
    base = MeasuredStages(seed=seed)
    by_scale = {
        "smoke": replace(
            base, model="lab-8m", prefill_tokens=(32, 64, 128, 256), batches=(1, 2, 4), context_tokens=(32, 256),
            rounds=2, budget_s=5.0,
        ),
        "classroom": base,
        "full": replace(
            base, model="lab-100m", context_tokens=(256, 1024, 2048), rounds=9, threads=None, clock="wall",
            budget_s=240.0,
        ),
        "gpu": replace(
            base, model="llama3-8b", prefill_tokens=(1024, 4096, 8192, 16384, 32768), batches=(1, 4, 16, 32),
            context_tokens=(1024, 4096), threads=None, clock="wall", budget_s=120.0, device="cuda",
        ),
    }  # fmt: skip  # one line of numbers a scale
    return by_scale[check_scale(scale)]


def measured_rows(measured: StageMeasurement) -> list[dict[str, Any]]:
    """A measurement as rows: the times, and beside each the machine, its peaks and the share of them reached."""
    shape = replace(model_shape(measured.model), bytes_per_element=measured.bytes_per_element)
    peaks = measured.hardware
    rows: list[dict[str, Any]] = []
    for each in measured.times:
        context = each.batch * each.tokens
        work = (
            prefill_work(shape, each.tokens)
            if each.stage == "prefill"
            else decode_work(shape, each.batch, context)
        )
        rows.append(
            {
                "stage": each.stage,
                "batch": each.batch,
                "tokens": each.tokens,
                "seconds": each.seconds,
                "least_s": each.least_s,
                "most_s": each.most_s,
                "samples": each.samples,
                "intensity_flops_per_byte": work.intensity_flops_per_byte,
                "flops_per_s": work.flops / each.seconds,
                "share_of_peak_flops": work.flops / each.seconds / peaks.flops_per_s(measured.dtype),
                "share_of_peak_bandwidth": work.bytes / each.seconds / peaks.memory_bytes_per_s,
                "peak_flops_per_s": peaks.flops_per_s(measured.dtype),
                "peak_bytes_per_s": peaks.memory_bytes_per_s,
                "dtype": measured.dtype,
                "machine": f"{measured.machine}, {measured.clock} clock",
            }
        )
    return rows


def committed_measurement() -> StageMeasurement:
    """The measurement in the repository, used only for a printed comparison."""
    return read_measurement(_COMMITTED)


def beside_committed(measured: pd.DataFrame) -> pd.DataFrame:
    """This machine beside the one that came with the book, where both measured the same point of the same model.

    Returns:
        One row a shared point: stage, batch, tokens, here_ms, book_ms, here_over_book. Empty where none is shared.
    """
    committed = committed_measurement()
    book = pd.DataFrame(measured_rows(committed)).assign(model=committed.model)
    point = ["model", "stage", "batch", "tokens"]
    both = measured[[*point, "seconds"]].merge(book[[*point, "seconds"]], on=point, suffixes=("_here", "_book"))
    here_ms, book_ms = 1000 * both["seconds_here"], 1000 * both["seconds_book"]
    return both[point[1:]].assign(here_ms=here_ms, book_ms=book_ms, here_over_book=here_ms / book_ms)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MachineCalibration:
    """Latency models of the machine that measured."""

    machine: str
    prefill: Calibration[PrefillLatency]
    decode: Calibration[DecodeLatency]


def calibrate_machine(measured: pd.DataFrame) -> MachineCalibration:
    """Fit both stages to a table of `MeasuredStages`."""
    tokens, _, prefill_s = stage_columns(measured, "prefill")
    context, batch, step_s = stage_columns(measured, "decode")
    return MachineCalibration(
        machine=str(measured["machine"].iloc[0]),
        prefill=fit_prefill(tokens, np.zeros_like(tokens), prefill_s),
        decode=fit_decode(batch, batch * context, step_s),
    )


def stage_columns(measured: pd.DataFrame, stage: str, tokens: int | None = None) -> tuple[Array, Array, Array]:
    """Tokens, batch and seconds of one stage, as arrays; of one number of tokens, if given.

    Raises:
        ValueError: when nothing was measured there.
    """
    columns = {name: np.asarray(measured[name]) for name in ("stage", "tokens", "batch", "seconds")}
    chosen = columns["stage"] == stage
    if tokens is not None:
        known = sorted(set(columns["tokens"][chosen].tolist()))
        chosen &= columns["tokens"] == tokens
        if not chosen.any():
            raise ValueError(f"no {stage} was measured at {tokens} tokens; allowed are {known}")
    found = [columns[name][chosen].astype(float) for name in ("tokens", "batch", "seconds")]
    return found[0], found[1], found[2]
