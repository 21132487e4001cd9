"""Capacity of Sarathi-Serve's machines under a limit on TBT: its Figs. 10, 11 and 13, searched and not swept."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import pandas as pd

from mooncake_lab.chapters.pipeline.serving import DELAY_S, Serving
from mooncake_lab.paper import fact
from mooncake_lab.testbeds.sarathi_serve import TESTBEDS, TEXT, slo_s

LOWEST, DOUBLINGS, HALVINGS = 0.05, 7, 2
"""Requests per second at which a search begins, how often it doubles, and how often it halves the last step."""
REQUESTS: Final = {"smoke": 16, "classroom": 256, "full": 2048}
"""Least number of requests per run; the paper has 2048."""
SEEDS: Final = {"smoke": 1, "classroom": 3, "full": 1}
"""Seeds over which capacities are averaged: another seed moves a capacity by a step of the search."""
SECONDS: Final = {"smoke": 20.0, "classroom": 120.0, "full": 0.0}
"""Least time over which they arrive: a run must be long compared with one request."""
WORKLOADS: Final = ("openchat_sharegpt4", "arxiv_summarization")
LIMITS: Final = ("strict", "relaxed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The highest rate that an engine serves within a limit on P99 TBT and on scheduling delay."""

    testbed: str = "Yi-34B"
    workload: str = WORKLOADS[0]
    policy: str = "vLLM"
    limit: str = "strict"
    requests: int = 48
    """Least number of requests per run."""
    seconds: float = 120.0
    """Least time over which requests arrive."""
    sum_ms: float = 0.0
    seed: int = 0

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row: the limit, the capacity (0 where the lowest rate is not served), and how many runs it took.

        The rate doubles from below until it fails. A search from both sides would be shorter and wrong: a short
        overloaded run computes all prompts first, and its few long gaps hide in the last percent.
        """
        tried: dict[float, bool] = {}
        low, high = 0.0, LOWEST
        while high < LOWEST * 2**DOUBLINGS and self._serves(high, tried):
            low, high = high, 2 * high
        for _ in range(HALVINGS if low else 0):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._serves(middle, tried) else (low, middle)
        yield {"slo_s": slo_s(self.testbed, self.limit), "requests_per_s": low, "runs": len(tried)}

    def _serves(self, rate: float, tried: dict[float, bool]) -> bool:
        serving = Serving(
            testbed=self.testbed,
            policy=self.policy,
            rate=rate,
            workload=self.workload,
            requests=max(self.requests, math.ceil(rate * self.seconds)),
            sum_ms=self.sum_ms,
            seed=self.seed,
        )
        (seen,) = serving.rows()
        within = seen["p99_tbt_s"] <= slo_s(self.testbed, self.limit) and seen["median_delay_s"] <= DELAY_S
        tried[rate] = within and not seen["refused"]
        return tried[rate]


def budget_of(testbed: str, limit: str) -> str:
    """The policy with the token budget that the paper takes for a machine and a limit."""
    own = (testbed, limit) == ("LLaMA2-70B", "relaxed")
    series = f"token budget, {testbed}" if own else "token budget"
    return f"Sarathi-Serve {fact(TEXT, series=series, x=limit).value:.0f}"


def cells(scale: str, *, seed: int = 0) -> tuple[Capacity, ...]:
    """The bars of Figs. 10, 11 and 13: every machine under vLLM and Sarathi-Serve, one workload, the strict limit.

    Both workloads, both limits, Orca, and Falcon with every layer on all GPUs are added at scale `full`.
    """
    seeds = range(seed, seed + SEEDS[scale])
    return tuple(cell for each in seeds for cell in _cells_of(scale, each))


def _cells_of(scale: str, seed: int) -> Iterable[Capacity]:
    base = Capacity(requests=REQUESTS[scale], seconds=SECONDS[scale], seed=seed)
    whole, found = scale == "full", list[Capacity]()
    for name, bed in TESTBEDS.items():
        for workload in WORKLOADS if whole else WORKLOADS[:1]:
            for limit in LIMITS if whole else LIMITS[:1]:
                policies = ("vLLM", budget_of(name, limit), *(("Orca",) if whole else ()))
                cell = replace(base, testbed=name, workload=workload, limit=limit, sum_ms=bed.sum_ms)
                found += [replace(cell, policy=policy) for policy in policies if whole or bed.split == 1]
    return found


def over_vllm(capacities: pd.DataFrame) -> pd.DataFrame:
    """Capacities, means over seeds, as multiples of vLLM's: one row per machine, workload and limit.

    Returns:
        Rows of testbed, workload, limit, vllm, orca, sarathi (requests a second), over_vllm, over_orca,
        requests (of a run at least), seeds (over which capacities are averaged).
    """
    rows: list[dict[str, Any]] = []
    for _, each in capacities.groupby(["testbed", "workload", "limit"], sort=False):
        by: dict[str, float] = each.pivot_table("requests_per_s", "policy")["requests_per_s"].to_dict()
        sarathi = next(rate for policy, rate in by.items() if policy.startswith("Sarathi"))
        orca = by.get("Orca", float("nan"))
        row: dict[str, Any] = each[["testbed", "workload", "limit"]].iloc[0].to_dict()
        row |= {"vllm": by["vLLM"], "orca": orca, "sarathi": sarathi}
        row |= {"over_vllm": _ratio(sarathi, by["vLLM"]), "over_orca": _ratio(sarathi, orca)}
        rows.append(row | {"requests": min(each["requests"].tolist()), "seeds": each["seed"].nunique()})
    return pd.DataFrame(rows)


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else float("inf")
