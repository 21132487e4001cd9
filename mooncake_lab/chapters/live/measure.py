"""The whole study in one measurement: what chapter 12 shows, and what `data/measured/cpu_live.json` holds.

`python -m mooncake_lab.chapters.live.measure` measures on this machine and writes that file; best when nothing
else runs.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pandas as pd

from mooncake_lab.bench.machine import commit, describe_machine
from mooncake_lab.chapters.live.experiment import Held, hold_against
from mooncake_lab.chapters.live.requests import causes, errors, slowed
from mooncake_lab.chapters.live.study import CLUSTERS, Study, study
from mooncake_lab.chapters.live.switches import kill_one, switches
from mooncake_lab.core import SCALES, carried_folder
from mooncake_lab.experiments.cache import plain_rows
from mooncake_lab.serving import Metronome, WorkerPool

_KEPT: Final = "cpu_live.json"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """Everything a study measured."""

    plan: Study
    held: Held
    """At the machine's own pace."""
    errors: pd.DataFrame
    causes: pd.DataFrame
    paced: Held
    """The same study to the beat of a metronome."""
    paced_errors: pd.DataFrame
    switches: pd.DataFrame
    fault: pd.DataFrame
    machine: str


def measure(plan: Study) -> Measured:
    """Every run of a study, live and simulated, the switches, and a kill; no process is left afterwards."""
    workers = max(sum(CLUSTERS[cluster]) for cluster, _, _ in plan.runs())
    with WorkerPool(plan.spec()).start(1 + workers) as pool:  # one more, to replace the killed one
        held = hold_against(plan, pool)
        model, rates = held.calibration.model, dict(held.rates_per_s)
        paced = hold_against(plan, pool, Metronome.of(slowed(model, plan.beat, decode=True)))
        switched = switches(plan, pool, model, rates)
        fault = kill_one(plan, pool, model, rates["overloaded"])
    return Measured(
        plan=plan,
        held=held,
        errors=errors(pd.concat([held.requests, held.again]), seed=plan.seed),
        paced=paced,
        paced_errors=errors(pd.concat([paced.requests, paced.again]), seed=plan.seed),
        causes=causes(held.requests),
        switches=switched,
        fault=fault,
        machine=str(describe_machine()),
    )


def kept() -> dict[str, Any]:
    """The measurement that is kept in the repository: machine, date, commit, load_average, plan, and tables.

    Raises:
        FileNotFoundError: when the repository has no measurement.
    """
    return msgspec.json.decode((carried_folder("measured") / _KEPT).read_bytes())


def as_plain(found: Measured, load_average: Sequence[float]) -> dict[str, Any]:
    """A measurement as plain values, with who made it when, and how busy the machine was before."""
    machine = describe_machine()
    calibration = found.held.calibration
    kept_tables = ("errors", "paced_errors", "causes", "switches", "fault")
    tables = {name: getattr(found, name) for name in kept_tables}
    tables["decisions"] = found.held.decisions.reset_index()
    return {
        "machine": asdict(machine),
        "date": machine.date,
        "commit": commit(),
        "load_average": [round(load, 2) for load in load_average],
        "plan": asdict(found.plan),
        "rates_per_s": dict(found.held.rates_per_s),
        "prefill_error": calibration.prefill.mean_relative_error,
        "decode_error": calibration.decode.mean_relative_error,
        **{name: plain_rows(table.to_dict(orient="records")) for name, table in tables.items()},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m mooncake_lab.chapters.live.measure", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", help="JSON file to write; the kept one when left out")
    parser.add_argument("--scale", choices=SCALES, default="full")
    chosen = parser.parse_args(arguments)
    out = chosen.out or carried_folder("measured") / _KEPT
    load_average = os.getloadavg()
    found = as_plain(measure(study(chosen.scale)), load_average)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    sys.stdout.write(f"{out}: {len(found['errors'])} errors, load average before {load_average[0]:.1f}\n")


if __name__ == "__main__":
    main()
