"""The fit of the arXiv testbed to arXiv Figs. 8 and 13, and to nothing else: `data/measured/arxiv_testbed.json`.

`python -m mooncake_lab.testbeds.arxiv_fit` replays 23,000 requests of twins of the tool&agent trace at the
recorded speed, on 8 prefill and 8 decode nodes (Fig. 8, KVCache-centric) and on 10 and 10 (Fig. 13). All requests
are admitted. One TBT of Fig. 13 is the mean of the longest tenth of a request's gaps (assumption B44).

The optimum is the point of a grid at which the squared logarithms of simulated over printed quantiles have the
smallest sum. The grid is coarse on one twin, and finer around the best point on two. All runs take five minutes of
one processor; the command goes on from those that it finds.
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
from tqdm import tqdm

from mooncake_lab.bench.machine import commit
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import AdmitAll, WithinSLO
from mooncake_lab.core import SLO, TracedRequest, carried_folder, rare_collections
from mooncake_lab.metrics import request_table
from mooncake_lab.paper import fact, points
from mooncake_lab.simulation import Cluster
from mooncake_lab.testbeds.arxiv import ArxivFit, Slower, arxiv_testbed
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
"""Twins of the fine grid; the coarse one has the first."""
Gap = Literal["longest_tenth", "mean"]
Admission = Literal["all", "slo"]
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
    with rare_collections():
        log = Cluster(spec, arxiv_testbed(run.at.prefill, run.at.decode, run.at.constant_s)).run(
            _requests(run.twin)[:requests]
        )
    table = request_table(log)
    ttft = table["ttft_s"].dropna().to_numpy(dtype=np.float64)
    box = (float(ttft.mean()), *np.percentile(ttft, (25, 50, 75)).tolist())
    tbt = {gap: _at_percent(table[name].dropna().to_numpy(dtype=np.float64)) for gap, name in _GAP_COLUMNS.items()}
    return replace(run, box=_rounded(box), ttft=_at_percent(ttft), tbt=tbt)


def _at_percent(values: Array) -> tuple[float, ...]:
    return _rounded(np.percentile(values, PERCENT).tolist())


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    """Six digits: the record is read by people too."""
    return tuple(float(f"{value:.6g}") for value in values)


@lru_cache(maxsize=3)
def _requests(twin: int) -> tuple[TracedRequest, ...]:
    return tuple(load("toolagent", seed=twin).head(REQUESTS).requests())


START: Final = Slower(1.7, 7.0, 0.025)
"""Where the coarse grid is centred: what the quick scans of two reviews gave."""
COARSE_PREFILL: Final = (1.4, 1.6, 1.8, 2.0)
COARSE_DECODE: Final = tuple(product((5.0, 7.0, 9.0), (0.015, 0.025, 0.035)))


def errors(runs: Iterable[FitRun], gap: Gap = "longest_tenth", admission: Admission = "all") -> "Errors":
    """Sums of squared log errors of the mean logarithms over twins.

    The decode step hardly moves TTFT, and the prefill factor hardly moves TBT, so that each is fitted by itself.
    """
    printed = {name: np.log(seconds) for name, seconds in targets().items()}
    ttft, tbt = dict[float, dict[tuple[int, int], Array]](), dict[tuple[float, float], dict[int, Array]]()
    for run in runs:
        if run.admission != admission:
            continue
        if run.nodes == FIG_8_NODES:
            ttft.setdefault(run.at.prefill, {})[run.nodes, run.twin] = np.log(run.box) - printed["box"]
        elif run.of == "ttft":
            ttft.setdefault(run.at.prefill, {})[run.nodes, run.twin] = np.log(run.ttft) - printed["ttft"]
        else:
            off = np.log(run.tbt[gap]) - printed["tbt"]
            tbt.setdefault((run.at.decode, run.at.constant_s), {})[run.twin] = off
    return Errors(
        {
            prefill: sum(
                _squared([off for (nodes, _), off in found.items() if nodes == kind])
                for kind in (FIG_8_NODES, FIG_13_NODES)
            )
            for prefill, found in sorted(ttft.items())
        },
        {point: _squared(list(found.values())) for point, found in sorted(tbt.items())},
        {prefill: len(found) // 2 for prefill, found in ttft.items()},
        {point: len(found) for point, found in tbt.items()},
    )


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of a fit, and over how many twins each was taken."""

    ttft: Mapping[float, float]
    """By prefill factor."""
    tbt: Mapping[tuple[float, float], float]
    """By decode factor and constant."""
    ttft_twins: Mapping[float, int]
    tbt_twins: Mapping[tuple[float, float], int]

    def best(self, twins: int = 1) -> tuple[float, tuple[float, float]]:
        """The prefill factor, and the decode factor and constant, with the least error over so many twins."""
        ttft = {each: error for each, error in self.ttft.items() if self.ttft_twins[each] >= twins}
        tbt = {each: error for each, error in self.tbt.items() if self.tbt_twins[each] >= twins}
        return min(ttft, key=lambda each: ttft[each]), min(tbt, key=lambda each: tbt[each])

    def fit(self, twins: int) -> ArxivFit:
        """The optimum over so many twins, and all points whose error is at most a tenth larger."""
        prefill, decode = self.best(twins)
        least = self.ttft[prefill] + self.tbt[decode]
        within = [
            Slower(p, *d)
            for p, d in product(self.ttft, self.tbt)
            if min(self.ttft_twins[p], self.tbt_twins[d]) >= twins and self.ttft[p] + self.tbt[d] <= 1.1 * least
        ]
        return ArxivFit(optimum=Slower(prefill, *decode), error=float(f"{least:.6g}"), region=tuple(within))


def _squared(off: Sequence[Array]) -> float:
    return float(np.square(np.mean(off, axis=0)).sum())


def planned(held: Sequence[FitRun]) -> list[FitRun]:
    """The runs of the next stage that the file does not hold: the coarse grids, then finer ones around their best.

    Decode is replayed with the prefill factor that fits best.
    """
    coarse = [*_of_ttft(COARSE_PREFILL, TWINS[:1]), *_of_tbt(START.prefill, COARSE_DECODE, TWINS[:1])]
    missing = _without(coarse, held)
    if missing:
        return missing
    found = errors(run for run in held if run.key in {each.key for each in coarse})
    prefill, (decode, constant_s) = found.best()
    fine = tuple(round(prefill + step, 3) for step in (-0.1, -0.05, 0.0, 0.05, 0.1))
    missing = _without(_of_ttft(fine, TWINS), held)
    if missing:
        return missing
    prefill, _ = errors(held).best(len(TWINS))
    steps = product((-1.0, -0.5, 0.0, 0.5, 1.0), (-0.005, 0.0, 0.005))
    around = [(decode + each, round(constant_s + more_s, 4)) for each, more_s in steps]
    return _without(_of_tbt(prefill, around, TWINS), held)


def _of_ttft(prefill: Iterable[float], twins: Sequence[int]) -> list[FitRun]:
    each = product(prefill, (FIG_8_NODES, FIG_13_NODES), twins)
    return [FitRun(of="ttft", at=replace(START, prefill=p), nodes=nodes, twin=twin) for p, nodes, twin in each]


def _of_tbt(prefill: float, decode: Iterable[tuple[float, float]], twins: Sequence[int]) -> list[FitRun]:
    each = product(decode, twins)
    return [FitRun(of="tbt", at=Slower(prefill, *d), nodes=FIG_13_NODES, twin=twin) for d, twin in each]


def _without(runs: Iterable[FitRun], held: Iterable[FitRun]) -> list[FitRun]:
    there = {run.key for run in held}
    return [run for run in runs if run.key not in there]


class Record(msgspec.Struct):
    """The file: what was found, and every run it rests on."""

    about: str
    commit: str
    date: str
    optimum: Slower
    error: float
    region: tuple[Slower, ...]
    runs: list[FitRun]


def main(arguments: list[str] | None = None) -> int:
    """Replay what is missing, stage by stage; runs are kept beside the file until all are there."""
    default = carried_folder("measured") / "arxiv_testbed.json"
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=default, help="the JSON file, %(default)s by default")
    out: Path = parser.parse_args(arguments).out
    part = out.with_suffix(".part")
    runs = msgspec.json.decode(part.read_bytes(), type=list[FitRun]) if part.exists() else list[FitRun]()
    while missing := planned(runs):
        for run in tqdm(missing, unit="replay", mininterval=10):
            runs.append(replayed(run))
            part.write_bytes(msgspec.json.encode(runs))
    fit = errors(runs).fit(len(TWINS))
    record = Record(
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
