"""Chapter 06: Sarathi-Serve's machines under Poisson traffic, and the capacity of each, searched (OSDI'24 §5)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.batching import VLLM, Orca, SarathiServe
from mooncake_lab.book.chapters.pipeline.experiment import limits_of, traced
from mooncake_lab.book.experiments import tabulated
from mooncake_lab.book.paper import fact
from mooncake_lab.book.testbeds.sarathi_serve import (
    BLOCK_TOKENS,
    CONTEXT_TOKENS,
    TESTBEDS,
    TEXT,
    DecodeRows,
    slo_s,
    testbed,
    yi_34b_on_two_a100s,
)
from mooncake_lab.core import TracedRequest, entry
from mooncake_lab.perf import IterationCost
from mooncake_lab.simulation import PipelineSpec, run_pipeline
from mooncake_lab.workload.transforms import poisson_arrivals_s

TABLE_2: Final = "sarathi_serve_table2_workloads"
MOST_REQUESTS, MOST_OF_ORCA, DELAY_S = 128, 16, 2.0
"""Batches of vLLM and Orca in the paper's runs; the median scheduling delay above which a rate is too high."""
POLICIES: Final = {
    "vLLM": VLLM(),
    "Orca": Orca(),
    "whole prompts beside decodes": SarathiServe(),
    "Sarathi-Serve 512": SarathiServe(chunk_tokens=512),
    "Sarathi-Serve 1024": SarathiServe(chunk_tokens=1024),
    "Sarathi-Serve 1536": SarathiServe(chunk_tokens=1536),
    "Sarathi-Serve 2048": SarathiServe(chunk_tokens=2048),
}
"""The policies of the figures; a number is a token budget."""
_MANY_RATES: Final = tuple(round(0.1 * 1.1**step, 3) for step in range(30))
RATES: Final = {
    "smoke": (0.2, 0.6, 1.2),
    "classroom": tuple(round(0.16 * 1.25**step, 3) for step in range(11)),
    "full": _MANY_RATES,
    "gpu": _MANY_RATES,
}
REQUESTS: Final = {"smoke": 60, "classroom": 120, "full": 2048, "gpu": 2048}
"""Requests per run; the paper has 2048."""


@tabulated
def budgets(slos_s: Sequence[float]) -> Iterator[dict[str, Any]]:
    """The largest token budget, in tiles of 128, whose iteration beside 32 decodes of 4K meets each TBT SLO."""
    cost = yi_34b_on_two_a100s()
    for limit_s in slos_s:
        fits = [n for n in range(128, 8193, 128) if _fused_s(cost, n) <= limit_s]
        budget = max(fits, default=0)
        yield {
            "slo_s": limit_s,
            "budget_tokens": budget,
            "iteration_s": _fused_s(cost, budget) if budget else np.nan,
        }


def _fused_s(cost: IterationCost, tokens: int) -> float:
    """An iteration of the budget in the middle of a prompt of 4K, beside the decodes."""
    return cost.step_s(tokens - 32, 2048, 32, 32 * 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One engine under one policy and one rate of arrivals."""

    testbed: str = "Yi-34B"
    policy: str = "vLLM"
    rate: float = 0.5
    """Requests a second."""
    workload: str = "openchat_sharegpt4"
    requests: int = 200
    sum_ms: float = 0.0
    """Latency of an all-reduce between nodes, where the testbed needs one."""
    context_tokens: int = CONTEXT_TOKENS
    """Context at which the artifact's decodes were timed (assumption B41)."""
    decode_rows: DecodeRows = "first and last"
    """Which decode times of the artifact the model goes through (assumption B59)."""
    printed_decodes: bool = False
    """Whether decodes take a fifth of the printed strict limit, not what Yi-34B's times give (assumption B48)."""
    apart: bool = False
    """Whether chunks and decodes of a plan take turns in place of sharing an iteration."""
    seed: int = 0

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row: what users saw."""
        run = run_pipeline(self.spec(), self.work())
        gaps = [b - a for request in run.requests for a, b in pairwise(request.token_s)]
        ttft = [request.token_s[0] - request.arrival_s for request in run.requests]
        delays = [r.scheduled_s - r.arrival_s for r in run.requests if r.scheduled_s is not None]
        yield {
            "p50_ttft_s": float(np.median(ttft)),
            "p99_tbt_s": float(np.percentile(gaps, 99)),
            "largest_tbt_s": max(gaps),
            "median_delay_s": float(np.median(delays)),
            "refused": len(run.rejected),
        }

    def spec(self) -> PipelineSpec:
        """As many micro-batches as stages, each with its share of places and of the KVCache."""
        bed = testbed(self.testbed)
        most = (MOST_OF_ORCA if self.policy == "Orca" else MOST_REQUESTS) // bed.stages
        window = int(fact(TABLE_2, series=self.workload, x="total_at_most").value)
        decode_s = slo_s(self.testbed, "strict") / 5 if self.printed_decodes else None
        rows, context = self.decode_rows, self.context_tokens
        clock = bed.clock(self.sum_ms / 1000, context_tokens=context, decode_rows=rows, decode_s=decode_s)
        held = bed.capacity_tokens() // BLOCK_TOKENS // bed.stages * BLOCK_TOKENS
        return PipelineSpec(
            clock=replace(clock, apart=self.apart),
            policy=entry(POLICIES, self.policy, "no policy"),
            limits=limits_of(most, request_tokens=window, batch_tokens=window + most, capacity_tokens=held),
            micro_batches=bed.stages,
        )

    def work(self) -> list[TracedRequest]:
        """Requests with the workload's median and 90th percentile of lengths, arriving as a Poisson process."""
        lengths = draw_lengths(self.workload, self.requests, seed=self.seed)
        arrivals = poisson_arrivals_s(self.requests, self.rate, seed=self.seed)
        return [
            traced(index, at_s, prompt, output)
            for index, (at_s, (prompt, output)) in enumerate(zip(arrivals.tolist(), lengths, strict=True))
        ]


def draw_lengths(workload: str, count: int, *, seed: int = 0) -> list[tuple[int, int]]:
    """Prompt and output lengths: log-normal through the published medians and 90th percentiles.

    Those with more tokens in all than the paper keeps are drawn again.
    """
    rng, most = np.random.default_rng(seed), fact(TABLE_2, series=workload, x="total_at_most").value
    shapes = [_lognormal(workload, part) for part in ("prompt", "output")]
    found: list[tuple[int, int]] = []
    while len(found) < count:
        prompt, output = (max(1, round(rng.lognormal(*shape))) for shape in shapes)
        if prompt + output <= most:
            found.append((prompt, output))
    return found


@tabulated
def capacity(served: pd.DataFrame, slos_s: Sequence[float]) -> Iterator[dict[str, Any]]:
    """The highest rate up to which every rate meets the SLO on P99 TBT and the limit on scheduling delay."""
    for policy, each in served.groupby("policy", sort=False):
        ordered = each.sort_values("rate")
        for limit_s in slos_s:
            meets = (ordered["p99_tbt_s"] <= limit_s) & (ordered["median_delay_s"] <= DELAY_S)
            passed = ordered["rate"][meets.cumprod().astype(bool)]
            best, requests = max(passed.tolist(), default=0.0), min(ordered["requests"].tolist())
            row = {"policy": policy, "slo_s": limit_s, "requests_per_s": best, "requests": requests}
            yield (row | {"highest_tested": max(ordered["rate"].tolist())})


def _lognormal(workload: str, part: str) -> tuple[float, float]:
    median, high = (fact(TABLE_2, series=workload, x=f"{part}_{which}").value for which in ("median", "p90"))
    return float(np.log(median)), float(np.log(high / median) / 1.2815515655446004)


LOWEST, DOUBLINGS, HALVINGS = 0.05, 7, 2
"""Requests per second at which a search begins, how often it doubles, and how often it halves the last step."""
SEARCH_REQUESTS: Final = {"smoke": 16, "classroom": 256, "full": 2048, "gpu": 2048}
"""Least number of requests per run; the paper has 2048."""
SEARCH_SEEDS: Final = {"smoke": 1, "classroom": 3, "full": 1, "gpu": 1}
"""Seeds over which capacities are averaged: another seed moves a capacity by a step of the search."""
NEAR_THE_BAND, THOSE_SEEDS = "LLaMA2-70B", {"smoke": 1, "classroom": 9, "full": 1, "gpu": 1}
"""A machine whose ratio is near the end of its band, and its seeds: 3 others may give another verdict."""
SEARCH_SECONDS: Final = {"smoke": 20.0, "classroom": 120.0, "full": 0.0, "gpu": 0.0}
"""Least time over which they arrive: a run must be long compared with one request."""
SEARCH_WORKLOADS: Final = ("openchat_sharegpt4", "arxiv_summarization")
SEARCH_LIMITS: Final = ("strict", "relaxed")
_OURS: Final = "Sarathi-Serve"
"""With the token budget of the machine and the limit."""
_PRINTED_BARS: Final = (
    *product([name for name, bed in TESTBEDS.items() if bed.split == 1], ("strict",), ("vLLM", _OURS)),
    ("Yi-34B", "strict", "Orca"),
    ("LLaMA2-70B", "strict", "Orca"),
    ("Falcon-180B", "relaxed", "vLLM"),
    ("Falcon-180B", "relaxed", _OURS),
    ("Falcon-180B, TP8", "strict", "vLLM"),
)
"""Machine, limit and policy of the capacities whose ratios Sarathi-Serve §5 prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySearch:
    """The highest rate that an engine serves within a limit on P99 TBT and on scheduling delay."""

    testbed: str = "Yi-34B"
    workload: str = SEARCH_WORKLOADS[0]
    policy: str = "vLLM"
    limit: str = "strict"
    requests: int = 48
    """Least number of requests per run."""
    seconds: float = 120.0
    """Least time over which requests arrive."""
    sum_ms: float = 0.0
    context_tokens: int = CONTEXT_TOKENS
    """As of `Serving`, and so are the next two."""
    decode_rows: DecodeRows = "first and last"
    printed_decodes: bool = False
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
        shared = ("testbed", "policy", "workload", "sum_ms", "context_tokens", "decode_rows", "printed_decodes")
        requests = max(self.requests, math.ceil(rate * self.seconds))
        serving = Serving(
            rate=rate, requests=requests, seed=self.seed, **{name: getattr(self, name) for name in shared}
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


def cells(scale: str, *, seed: int = 0) -> tuple[CapacitySearch, ...]:
    """The bars of Figs. 10, 11 and 13.

    At scale `full` or `gpu` there is every machine, workload, limit and policy; otherwise one workload, and the
    bars whose ratios the paper prints.
    """
    bars = product(TESTBEDS, SEARCH_WORKLOADS, SEARCH_LIMITS, ("vLLM", _OURS, "Orca"))
    base = CapacitySearch(requests=SEARCH_REQUESTS[scale], seconds=SEARCH_SECONDS[scale])
    chosen = (
        tuple(bars)
        if scale in {"full", "gpu"}
        else tuple((name, SEARCH_WORKLOADS[0], *which) for name, *which in _PRINTED_BARS)
    )
    return tuple(
        replace(
            base,
            testbed=name,
            workload=workload,
            limit=limit,
            policy=budget_of(name, limit) if policy == _OURS else policy,
            sum_ms=TESTBEDS[name].sum_ms,
            seed=each,
        )
        for name, workload, limit, policy in chosen
        for each in range(seed, seed + (THOSE_SEEDS if name == NEAR_THE_BAND else SEARCH_SEEDS)[scale])
    )


@tabulated
def over_vllm(capacities: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Capacities, means over seeds, as multiples of vLLM's: one row per machine, workload and limit.

    A policy that was not searched is NaN.
    """
    for _, each in capacities.groupby(["testbed", "workload", "limit"], sort=False):
        by: dict[str, float] = each.pivot_table("requests_per_s", "policy")["requests_per_s"].to_dict()
        sarathi = next((rate for policy, rate in by.items() if policy.startswith(_OURS)), float("nan"))
        orca = by.get("Orca", float("nan"))
        row: dict[str, Any] = each[["testbed", "workload", "limit"]].iloc[0].to_dict()
        row |= {"vllm": by["vLLM"], "orca": orca, "sarathi": sarathi}
        over_vllm = sarathi / by["vLLM"] if by["vLLM"] else np.inf
        row |= {"over_vllm": over_vllm, "over_orca": sarathi / orca if orca else np.inf}
        yield row | {"requests": min(each["requests"].tolist()), "seeds": each["seed"].nunique()}
