"""The host's part of a decode step, fitted to the TBT that FAST'25 draws for Mooncake (assumption B37).

    python -m mooncake_lab.book.chapters.endtoend.host

tries all hosts of a grid on the released traces and writes `data/measured/host_fit.csv`, in about ten CPU minutes.

The fit reads three curves of Mooncake and none of vLLM: the seven mean TBT of Fig. 15b, and the deciles of TBT in
Figs. 1 and 7, whose traces are released. It minimises the squared errors of their logarithms; each figure counts
as much as another. Its settings are those of the verdicts: whole traces, and arrivals spread over their ticks.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Final, TypedDict

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab import metrics
from mooncake_lab.bench.commits import commit
from mooncake_lab.book.chapters.endtoend.experiment import EndToEnd, serve
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.paper import points
from mooncake_lab.core import carried_folder

SPLITS: Final = "FAST'25 Figure 15b"
DECILES: Final = {
    "FAST'25 Figure 1": ("conversation", "fast_fig01_tbt_cdf_conversation"),
    "FAST'25 Figure 7": ("synthetic", "fast_fig07_tbt_cdf_synthetic"),
}
"""By figure: the workload, and the curve of the distribution of TBT."""
PERCENT: Final = tuple(range(10, 100, 10))
HOSTS_S: Final = tuple(round(0.003 + 0.00025 * i, 5) for i in range(11))
"""Seconds that the host adds for each request of a step beyond the free ones: what is tried."""
HOSTS_FREE: Final = tuple(0.5 * i for i in range(7))
"""Requests of a step whose work on the host delays nothing: what is tried."""
NEARLY: Final = 1.1
"""Hosts whose error is within this factor of the least are as good as the best one."""
_RECORD: Final = carried_folder("measured") / "host_fit.csv"


class Host(TypedDict):
    """The host of a decode step, as fields of `EndToEnd`."""

    host_s: float
    host_free: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFit:
    """Mooncake's TBT with one host, beside every printed number of the fit."""

    host_s: float
    host_free: float
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a printed number, in milliseconds."""
        base = EndToEnd(host_s=self.host_s, host_free=self.host_free, seed=self.seed)
        nodes = base.prefill_nodes + base.decode_nodes
        for figure, at, printed_ms in printed():
            if figure == SPLITS:
                point = replace(base, workload="synthetic", prefill_nodes=at, decode_nodes=nodes - at)
                ours_s = float(_tbt_s(point).mean())
            else:
                ours_s = float(np.percentile(_tbt_s(replace(base, workload=DECILES[figure][0])), at))
            yield {"figure": figure, "at": at, "printed_ms": printed_ms, "ours_ms": 1e3 * ours_s}


def printed() -> Iterator[tuple[str, int, float]]:
    """Figure, number of prefill nodes or percent of the requests, and mean or quantile of Mooncake's TBT (ms)."""
    for nodes, mean_ms in zip(*points("fast_fig15b_avg_tbt", "average TBT"), strict=True):
        yield SPLITS, int(nodes), mean_ms
    for figure, (_, name) in DECILES.items():
        milliseconds, percent = points(name, "Mooncake")
        for share in PERCENT:
            yield figure, share, float(np.interp(share, percent, milliseconds))


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a host: the root mean square of the log errors, by figure and over the figures (`error`).

    Args:
        rows: rows of `HostFit`.
    """
    squares = rows.assign(square=np.log(rows["ours_ms"] / rows["printed_ms"]) ** 2)
    means = squares.pivot_table("square", ["host_s", "host_free"], "figure")
    return means.assign(error=means.mean(axis=1)).pow(0.5).reset_index()


def best(found: pd.DataFrame) -> Host:
    """The host with the least error."""
    row = found.loc[found["error"].idxmin()]
    return {"host_s": float(row["host_s"]), "host_free": float(row["host_free"])}


def nearly_best(found: pd.DataFrame) -> pd.DataFrame:
    """The hosts whose error is within a tenth of the least."""
    return found.loc[found["error"] <= NEARLY * found["error"].min()]


@cache
def recorded() -> pd.DataFrame:
    """The errors of all hosts of the grid, and the commit that computed them."""
    return pd.read_csv(_RECORD)


def fitted_host() -> Host:
    """The recorded host with the least error."""
    return best(recorded())


@lru_cache(maxsize=16)
def _tbt_s(point: EndToEnd) -> npt.NDArray[np.float64]:
    """TBT of the requests that have gaps."""
    requests = metrics.request_table(serve(point, point.trace()))
    return requests["tbt_fast_s"].dropna().to_numpy(dtype=np.float64)


def main() -> None:
    """Try every host and write the record; what was computed before is read from the cache of experiments."""
    grid = vary(HostFit(host_s=0.0, host_free=0.0), host_s=HOSTS_S, host_free=HOSTS_FREE)
    found = errors(run(grid)).round(6).assign(commit=commit())
    found.to_csv(_RECORD, index=False)
    sys.stdout.write(f"{found.nsmallest(5, 'error').to_string(index=False)}\n")


if __name__ == "__main__":
    main()
