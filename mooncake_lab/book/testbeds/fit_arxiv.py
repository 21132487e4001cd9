"""The fit of the arXiv testbed to arXiv Figs. 8 and 13, and to nothing else: `data/measured/arxiv_testbed.json`.

`python -m mooncake_lab.book.testbeds.fit_arxiv` replays 23,000 requests of two twins of the tool&agent trace at
the recorded speed, on 8 prefill and 8 decode nodes (Fig. 8, KVCache-centric) and on 10 and 10 (Fig. 13). All
requests are admitted. One TBT of Fig. 13 is the mean of the longest tenth of a request's gaps (assumption B44).

TTFT depends on the prefill factor only, so it is replayed with answers of one token. TBT hardly depends on it, and
is replayed at one prefill factor. Between the replayed settings, the logarithms of the quantiles are interpolated
by parabolas. The optimum is the setting at which the squared logarithms of simulated over printed quantiles have
the smallest sum. TBT is replayed a second time with the admission of Algorithm 1, which shows what this choice
changes. The command goes on from the replays that it finds; all take five minutes of a processor.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from mooncake_lab.bench.commits import commit
from mooncake_lab.book.paper import fact, points
from mooncake_lab.book.testbeds.arxiv import CONSTANT_S as ARXIV_CONSTANT_S
from mooncake_lab.book.testbeds.arxiv import ArxivFit, Slower, arxiv_testbed
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import AdmitAll, WithinSLO
from mooncake_lab.core import SLO, TracedRequest, carried_folder, rare_collections
from mooncake_lab.metrics import request_table
from mooncake_lab.simulation import Cluster
from mooncake_lab.workload import load

Array = npt.NDArray[np.float64]

PERCENT: Final = (10, 25, 50, 75, 90, 95, 99)
"""The quantiles of Fig. 13 that are compared."""
BOX: Final = ("mean", "q1", "median", "q3")
"""What is compared of Fig. 8."""
REQUESTS: Final = 23_000
FIG_8_NODES: Final = 8
FIG_13_NODES: Final = 10
SERIES: Final = "Mooncake-[10P+10D]"
TWINS: Final = (0, 1)
Gap = Literal["longest_tenth", "mean"]
Admission = Literal["all", "slo"]
ADMISSIONS: Final[tuple[Admission, ...]] = ("all", "slo")
"""The first is that of the fit."""
_GAP_COLUMNS: Final[Mapping[Gap, str]] = {"longest_tenth": "tbt_fast_s", "mean": "tbt_arxiv_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRun:
    """One replay of the fit: its setting, and the quantiles that were simulated (s)."""

    of: Literal["ttft", "tbt"]
    """What it is compared by."""
    at: Slower
    nodes: int
    """Of each kind: 8 for Fig. 8, 10 for Fig. 13."""
    twin: int
    admission: Admission = "all"
    box: tuple[float, ...] = ()
    """TTFT as `BOX` names it."""
    ttft: tuple[float, ...] = ()
    """TTFT at `PERCENT`."""
    tbt: Mapping[Gap, tuple[float, ...]] = field(default_factory=dict)
    """TBT at `PERCENT`, by which gaps of a request count: the mean of its longest tenth, or the mean of all."""

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from other runs."""
        return self.of, self.at, self.nodes, self.twin, self.admission


def targets() -> dict[str, tuple[float, ...]]:
    """The numbers of arXiv Figs. 8 and 13 that are fitted, in seconds; the only numbers that are read."""
    figure_8 = "arxiv_fig08_ttft_box_scheduling"
    return {
        "box": tuple(fact(figure_8, series="KVCache-centric", x=name).value for name in BOX),
        "ttft": _quantiles("arxiv_fig13_ttft_cdf"),
        "tbt": _quantiles("arxiv_fig13_tbt_cdf"),
    }


def _quantiles(figure: str) -> tuple[float, ...]:
    at_s, share = points(figure, SERIES)
    return tuple(np.interp(np.array(PERCENT) / 100, share, at_s).tolist())


def replayed(run: FitRun, requests: int = REQUESTS) -> FitRun:
    """The run with its quantiles."""
    slo = SLO(ttft_s=30.0, tbt_s=0.1)
    spec = ClusterSpec.disaggregated(
        prefill_nodes=run.nodes,
        decode_nodes=run.nodes,
        admission=WithinSLO() if run.admission == "slo" else AdmitAll(),
        slo=slo,
        block_size_tokens=512,
    )
    node = arxiv_testbed(run.at.prefill, run.at.decode, run.at.constant_s)
    arriving = _requests(run.twin, run.of == "ttft")[:requests]
    with rare_collections():
        log = Cluster(spec, node).run(arriving)
    table = request_table(log)
    ttft = table["ttft_s"].dropna().to_numpy(dtype=np.float64)
    if run.of == "ttft":
        box = _rounded((float(ttft.mean()), *np.percentile(ttft, (25, 50, 75)).tolist()))
        return replace(run, box=box, ttft=_at_percent(ttft))
    tbt = {gap: _at_percent(table[name].dropna().to_numpy(dtype=np.float64)) for gap, name in _GAP_COLUMNS.items()}
    return replace(run, tbt=tbt)


def _at_percent(values: Array) -> tuple[float, ...]:
    return _rounded(np.percentile(values, PERCENT).tolist())


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    """Six digits: the record is read by people too."""
    return tuple(float(f"{value:.6g}") for value in values)


@lru_cache(maxsize=2)
def _requests(twin: int, one_token: bool) -> tuple[TracedRequest, ...]:
    whole = load("toolagent", seed=twin).head(REQUESTS).requests()
    return tuple(replace(each, output_tokens=1) if one_token else each for each in whole)


REPLAYED_PREFILL: Final = (1.5, 1.6, 1.7, 1.8, 1.9)
REPLAYED_DECODE: Final = (5.0, 7.0, 9.0)
REPLAYED_CONSTANT_S: Final = (0.015, 0.025, 0.035)
TBT_PREFILL: Final = 1.7
"""At which prefill factor TBT is replayed."""
PREFILL: Final = tuple(round(1.5 + 0.025 * step, 3) for step in range(17))
DECODE: Final = tuple(5.0 + 0.25 * step for step in range(17))
CONSTANT_S: Final = tuple(round(0.015 + 0.001 * step, 3) for step in range(21))
"""The grid on which the error is computed."""


def planned() -> list[FitRun]:
    """All replays of the fit."""
    found: list[FitRun] = []
    for prefill, nodes, twin in product(REPLAYED_PREFILL, (FIG_8_NODES, FIG_13_NODES), TWINS):
        at = Slower(prefill, 1.0, ARXIV_CONSTANT_S)
        found.append(FitRun(of="ttft", at=at, nodes=nodes, twin=twin))
    for admission, decode, constant_s, twin in product(ADMISSIONS, REPLAYED_DECODE, REPLAYED_CONSTANT_S, TWINS):
        at = Slower(TBT_PREFILL, decode, constant_s)
        found.append(FitRun(of="tbt", at=at, nodes=FIG_13_NODES, twin=twin, admission=admission))
    return found


def fitted(runs: Sequence[FitRun], gap: Gap = "longest_tenth", admission: Admission = "all") -> ArxivFit:
    """The setting with the smallest error, and all settings whose error is at most a tenth larger."""
    total = errors(runs, gap, admission)
    optimum = min(total, key=lambda each: total[each])
    region = tuple(each for each, error in total.items() if error <= REGION * total[optimum])
    return ArxivFit(optimum=optimum, error=float(f"{total[optimum]:.6g}"), region=region)


def errors(
    runs: Sequence[FitRun], gap: Gap = "longest_tenth", admission: Admission = "all"
) -> dict[Slower, float]:
    """The error of each setting of the grid."""
    ttft, tbt = ttft_errors(runs), tbt_errors(runs, gap, admission)
    return {Slower(p, *d): ttft[p] + tbt[d] for p, d in product(ttft, tbt)}


REGION: Final = 1.1
"""How much larger than at the optimum the error may be in the region."""


def ttft_errors(runs: Sequence[FitRun]) -> dict[float, float]:
    """The error of Fig. 8 and of the TTFT of Fig. 13, by prefill factor."""
    printed = targets()
    found = dict.fromkeys(PREFILL, 0.0)
    for nodes, name in ((FIG_8_NODES, "box"), (FIG_13_NODES, "ttft")):
        logs = [
            np.mean([np.log(getattr(r, name)) for r in _those(runs, "ttft", nodes) if r.at.prefill == p], axis=0)
            for p in REPLAYED_PREFILL
        ]
        for prefill in PREFILL:
            ours = _parabola(REPLAYED_PREFILL, logs, prefill)
            found[prefill] += float(np.square(ours - np.log(printed[name])).sum())
    return found


def tbt_errors(runs: Sequence[FitRun], gap: Gap, admission: Admission = "all") -> dict[tuple[float, float], float]:
    """The error of the TBT of Fig. 13, by decode factor and constant."""
    those = _those(runs, "tbt", FIG_13_NODES, admission)
    printed = np.log(targets()["tbt"])

    def log_tbt(decode: float, constant_s: float) -> Array:
        at = [r for r in those if (r.at.decode, r.at.constant_s) == (decode, constant_s)]
        return np.mean([np.log(r.tbt[gap]) for r in at], axis=0)

    replays = {decode: [log_tbt(decode, each) for each in REPLAYED_CONSTANT_S] for decode in REPLAYED_DECODE}
    found: dict[tuple[float, float], float] = {}
    for constant_s in CONSTANT_S:
        along = [_parabola(REPLAYED_CONSTANT_S, replays[decode], constant_s) for decode in REPLAYED_DECODE]
        for decode in DECODE:
            off = _parabola(REPLAYED_DECODE, along, decode) - printed
            found[decode, constant_s] = float(np.square(off).sum())
    return found


def _those(runs: Sequence[FitRun], of: str, nodes: int, admission: Admission = "all") -> list[FitRun]:
    return [run for run in runs if run.of == of and run.nodes == nodes and run.admission == admission]


def _parabola(at: Sequence[float], values: Sequence[Array], x: float) -> Array:
    """The parabola through the three points nearest to x."""
    nearest = sorted(range(len(at)), key=lambda each: abs(at[each] - x))[:3]
    found = np.zeros_like(values[0])
    for one in nearest:
        others = [at[other] for other in nearest if other != one]
        found = found + values[one] * np.prod([(x - other) / (at[one] - other) for other in others])
    return found


class FitRecord(msgspec.Struct):
    """The file: what was found, and every run it rests on."""

    about: str
    commit: str
    date: str
    optimum: Slower
    error: float
    region: tuple[Slower, ...]
    runs: list[FitRun]


def recorded_runs() -> list[FitRun]:
    """The replays of the record."""
    path = carried_folder("measured") / "arxiv_testbed.json"
    return msgspec.json.decode(path.read_bytes(), type=FitRecord).runs


def main(arguments: list[str] | None = None) -> int:
    """Replay what is missing; runs are kept beside the file until all are there."""
    default = carried_folder("measured") / "arxiv_testbed.json"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=default, help="the JSON file, %(default)s by default")
    out: Path = parser.parse_args(arguments).out
    part = out.with_suffix(".part")
    runs = msgspec.json.decode(part.read_bytes(), type=list[FitRun]) if part.exists() else list[FitRun]()
    there = {run.key for run in runs}
    missing = [each for each in planned() if each.key not in there]
    for run in track(missing, "replays", console=Console(stderr=True)):
        runs.append(replayed(run))
        part.write_bytes(msgspec.json.encode(runs))
    fit = fitted(runs)
    record = FitRecord(
        about=" ".join((__doc__ or "").split()),
        commit=commit() or "unknown",
        date=datetime.now(UTC).date().isoformat(),
        optimum=fit.optimum,
        error=fit.error,
        region=fit.region,
        runs=runs,
    )
    out.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    part.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
