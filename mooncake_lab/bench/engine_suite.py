"""The whole comparison on a CPU, within a few minutes: what `data/measured/cpu_engine.json` holds.

`python -m mooncake_lab.bench.engine_suite OUT` measures and writes; `mooncake_lab.bench.speed_table` shows it.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from mooncake_lab.bench.engine import Bench, Case, decode_case, mixed_case, prefill_case
from mooncake_lab.bench.floors import rates_of, with_floors
from mooncake_lab.bench.machine import provenance
from mooncake_lab.bench.stages import ClockName, computing_threads
from mooncake_lab.engine.loading import DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on a number of threads, and what is timed: cases, each with a peer and a number of rounds."""

    model: str
    dtype: str
    threads: int
    cases: tuple[tuple[Case, str, int], ...]


def settings(threads: int) -> tuple[Setting, ...]:
    """What is measured, the most telling first: a budget cuts the list at its end."""

    def decodes(*batches: int) -> tuple[tuple[Case, str, int], ...]:
        return tuple((decode_case(batch, 256, 12), "hf", 7) for batch in batches)

    prompts = tuple((prefill_case(tokens), "hf", 3) for tokens in (512, 2048))
    pieces = ((prefill_case(2048), "whole", 3),)
    bursts = tuple((mixed_case(64), peer, 1) for peer in ("hf", "hf-continuous"))
    short = (*decodes(1, 2, 4, 8, 32), (decode_case(8, 1024, 8), "hf", 5), *prompts, *pieces)
    alone = (Setting(model="lab-30m", dtype="float32", threads=1, cases=decodes(1, 8)),) if threads > 1 else ()
    return (
        Setting(model="lab-30m", dtype="float32", threads=threads, cases=short),
        Setting(model="lab-100m", dtype="float32", threads=threads, cases=decodes(1, 4, 8, 32)),
        Setting(model="lab-30m", dtype="bfloat16", threads=threads, cases=decodes(1, 4, 8, 32)),
        *alone,
        Setting(model="lab-100m", dtype="bfloat16", threads=threads, cases=decodes(1, 4, 8)),
        Setting(model="lab-100m", dtype="float32", threads=threads, cases=prompts),
        Setting(model="lab-30m", dtype="bfloat16", threads=threads, cases=prompts[:1]),
        Setting(model="lab-30m", dtype="float32", threads=threads, cases=bursts),
    )


SMOKE: Final = (
    Setting(
        model="lab-tiny",
        dtype="float32",
        threads=1,
        cases=((decode_case(2, 8, 2), "hf", 1), (prefill_case(8), "hf", 1), (mixed_case(2, scale=0.05), "hf", 1)),
    ),
)
"""To see that everything runs; its numbers mean nothing."""


def measure(wanted: tuple[Setting, ...], budget_s: float, clock: ClockName = "wall") -> dict[str, Any]:
    """Time all settings, as plain values; what comes after the budget is named as skipped.

    On a busy machine the processor's clock says more: what one thread computed, not what it waited.
    """
    if clock == "processor" and any(setting.threads > 1 for setting in wanted):
        raise ValueError("the processor's clock adds up the seconds of all threads; allowed is 1 thread")
    end_s = time.monotonic() + budget_s
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for setting in wanted:
        if time.monotonic() > end_s:
            skipped += [f"{setting.model} {setting.dtype}: {case.name}" for case, _, _ in setting.cases]
            continue
        with computing_threads(setting.threads):
            for row in _rows(setting, end_s, skipped, clock):
                rows.append(row)
                sys.stderr.write(
                    f"{row['model']} {row['dtype']} {row['case']}: {row['ratio']:.2f} x {row['peer']}\n"
                )
    about = {**provenance(), "clock": clock, "transformers": version("transformers")}
    return {**about, "rows": with_floors(rows), "skipped": skipped}


def _rows(setting: Setting, end_s: float, skipped: list[str], clock: ClockName) -> Iterator[dict[str, Any]]:
    seconds = time.process_time if clock == "processor" else time.perf_counter
    bench = Bench(setting.model, setting.dtype, cache_tokens=49_152, clock=seconds)
    about = {"model": setting.model, "dtype": setting.dtype, "threads": torch.get_num_threads()}
    peaks = {
        "bytes_per_s": bench.peaks.device_memory_bytes_per_s,
        "flops_per_s": rates_of(bench.peaks, DTYPES[setting.dtype].itemsize).flops_per_s,
    }
    for case, peer, rounds in setting.cases:
        if time.monotonic() > end_s:
            skipped.append(f"{setting.model} {setting.dtype}: {case.name}")
            continue
        if (
            case.kind == "mixed"
        ):  # a small burst warms both up; the large one has no time for a round that does not count
            bench.compare(mixed_case(4, scale=0.1), peer, 1)
        found = bench.compare(case, peer, rounds, warm_up=case.kind != "mixed")
        yield {**about, "peer": peer, **asdict(found), "peaks": peaks}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m mooncake_lab.bench.engine_suite", description=__doc__)
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--minutes", type=float, default=15.0, help="after so many, what is left is skipped")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--clock", choices=("wall", "processor"), default="wall", help="processor needs --threads 1"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    chosen = parser.parse_args(arguments)
    found = measure(SMOKE if chosen.smoke else settings(chosen.threads), 60 * chosen.minutes, chosen.clock)
    chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
