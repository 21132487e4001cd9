"""vLLM behind four routers, with and without the fitted host, on three traces.

    python -m mooncake_lab.book.chapters.endtoend.bracket

replays all of them, with Mooncake beside, and writes `data/measured/vllm_bracket.csv`, in eight CPU minutes. With
the fitted host, each router is replayed with several seeds. Chapter 10 draws the record, and takes from it the
interval in which the gain of another seed lies.

    python -m mooncake_lab.book.chapters.endtoend.bracket held-back

replays the setting of the verdicts with as many other seeds, which no interval has seen, and writes
`data/measured/held_back_gains.csv`: the gain with each seed, the interval of the record, and whether they agree.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.bench.commits import commit
from mooncake_lab.book.chapters.endtoend.experiment import LIMITS_MS, EndToEnd
from mooncake_lab.book.chapters.endtoend.host import fitted_host
from mooncake_lab.book.experiments import run, tabulated, value, vary, where
from mooncake_lab.core import carried_folder

ROUTERS: Final = {
    "fewest_requests": "fewest requests",
    "least_tokens": "least tokens held",
    "round_robin": "in turns",
    "random": "at random",
}
"""Routers of the vLLM cluster, and what the book calls them; the first one was chosen before (assumption B39)."""
BASELINES: Final = {"conversation": "vllm", "toolagent": "vllm_prefix", "synthetic": "vllm"}
"""By workload: the system over which FAST'25 prints Mooncake's gain (Figs. 1, 6 and 7)."""
SEEDS: Final = tuple(range(5))
QUANTILE: Final = 4.604
"""Of Student's distribution with four degrees of freedom: 99 % lie between it and its negative."""
HELD_BACK: Final = tuple(range(5, 10))
"""Seeds with which the intervals are checked."""
ROUNDING: Final = 0.001
"""Points of a gain that the six digits of a recorded share leave open."""
_HELD_BACK_RECORD: Final = carried_folder("measured") / "held_back_gains.csv"
_RECORD: Final = carried_folder("measured") / "vllm_bracket.csv"
_KEPT: Final = ("workload", "origin", "system", "router", "host_s", "host_free", "seed")


def replays() -> tuple[EndToEnd, ...]:
    """All points of the record: every router and host with one seed, and with the fitted host with all seeds."""
    base = EndToEnd(**fitted_host())
    points = list[EndToEnd]()
    for workload, system in BASELINES.items():
        here = replace(base, workload=workload)
        for hosts, seeds in (((0.0, base.host_s), SEEDS[:1]), ((base.host_s,), SEEDS[1:])):
            axes: dict[str, Any] = {"host_s": hosts, "seed": seeds}
            points += vary(here, **axes)
            points += vary(here, system=(system,), router=tuple(ROUTERS), **axes)
    return tuple(points)


def recorded() -> pd.DataFrame:
    """One row a replay: what was served, by which system, and the share of effective requests at each limit."""
    return pd.read_csv(_RECORD)


@tabulated
def bracket(rows: pd.DataFrame) -> Iterator[Mapping[str, Any]]:
    """Shares of effective requests in percent, one row a workload, router, host and limit.

    Args:
        rows: of `recorded`.
    """
    for named, column, _, theirs in _settings(rows):
        yield named | _summary(100 * theirs[column].to_numpy())


@tabulated
def gains(rows: pd.DataFrame) -> Iterator[Mapping[str, Any]]:
    """Mooncake's gain over the baseline in percent, one row a workload, router, host and limit.

    `low` and `high` bound the gain of one further seed with 99 % confidence, where several were replayed.

    Args:
        rows: of `recorded`.
    """
    for named, column, ours, theirs in _settings(rows):
        yield named | _summary(100 * (ours[column] / theirs[column] - 1).dropna().to_numpy())


def _settings(rows: pd.DataFrame) -> Iterator[tuple[dict[str, Any], str, pd.DataFrame, pd.DataFrame]]:
    """Names of each setting, the column of its limit, and Mooncake's and vLLM's replays."""
    for workload, system in BASELINES.items():
        here = where(rows, workload=workload)
        ours = where(here, system="mooncake").set_index(["host_s", "seed"])
        for router, host_s in product(ROUTERS, hosts_s(rows)):
            theirs = where(here, system=system, router=router, host_s=host_s).set_index(["host_s", "seed"])
            for limit in LIMITS_MS:
                named = {"workload": workload, "router": router, "host_s": host_s, "limit_ms": limit}
                yield named, f"capacity_{limit}_ms", ours, theirs


def _summary(percents: Any) -> dict[str, float]:
    low, mean, high = interval(percents)
    return {"low": low, "percent": mean, "high": high}


def hosts_s(rows: pd.DataFrame) -> list[float]:
    """The hosts of the record: the engine alone, and the fitted one."""
    return sorted(set(map(float, rows["host_s"])))


def interval(values: Any) -> tuple[float, float, float]:
    """Mean of a value per seed, between the bounds within which one further seed lies with 99 % confidence.

    One value alone has no bounds: they are not a number.
    """
    if len(values) < len(SEEDS):
        return math.nan, float(np.mean(values)), math.nan
    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    reach = QUANTILE * deviation * (1 + 1 / len(values)) ** 0.5
    return mean - reach, mean, mean + reach


@tabulated
def compared(rows: pd.DataFrame, record: pd.DataFrame) -> Iterator[Mapping[str, Any]]:
    """Mooncake's gain with each held-back seed, beside the interval in which the record says it lies.

    Args:
        rows: replays of `held_back`.
        record: rows of `recorded`.
    """
    host_s = max(hosts_s(record))
    stated = where(gains(record), router=next(iter(ROUTERS)), host_s=host_s)
    for (workload, system), seed, limit in product(BASELINES.items(), HELD_BACK, LIMITS_MS):
        here = where(rows, workload=workload, seed=seed)
        ours, theirs = (value(here, f"capacity_{limit}_ms", system=name) for name in ("mooncake", system))
        percent = 100 * (float(ours) / float(theirs) - 1)
        low, high = (float(value(stated, bound, workload=workload, limit_ms=limit)) for bound in ("low", "high"))
        named = {"workload": workload, "limit_ms": limit, "seed": seed, "percent": percent}
        yield named | {"low": low, "high": high, "agrees": low - ROUNDING <= percent <= high + ROUNDING}


def held_back() -> tuple[EndToEnd, ...]:
    """The setting of the verdicts with the seeds that the record does not have."""
    base = EndToEnd(**fitted_host())
    return tuple(
        replace(base, workload=workload, system=each, seed=seed)
        for workload, system in BASELINES.items()
        for each, seed in product(("mooncake", system), HELD_BACK)
    )


def main(arguments: Sequence[str] = ()) -> None:
    """Replay everything and write the record; an interrupted run goes on where it ended."""
    if list(arguments) == ["held-back"]:
        found = compared(run(held_back()), recorded()).round(4).assign(commit=commit())
        found.to_csv(_HELD_BACK_RECORD, index=False)
        sys.stdout.write(f"{found.to_string(index=False)}\n")
        return
    if arguments:
        raise ValueError(f"the only argument is 'held-back', not {' '.join(arguments)!r}")
    found = run(replays())
    columns = [*_KEPT, *(f"capacity_{limit}_ms" for limit in LIMITS_MS)]
    found[columns].round(6).assign(commit=commit()).to_csv(_RECORD, index=False)
    sys.stdout.write(f"{gains(recorded()).round(1).to_string(index=False)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
