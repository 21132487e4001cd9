"""Sarathi-Serve: Yi-34B on two A100s under Poisson traffic, stall-free against prefill-first (OSDI'24 §5)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab.batching import VLLM, BatchingPolicy, Limits, Orca, SarathiServe
from mooncake_lab.core import TracedRequest
from mooncake_lab.experiments.pipeline import traced
from mooncake_lab.paper import curve, fact
from mooncake_lab.perf import IterationCost, LinearCost, LinkLatency, hardware, model_shape
from mooncake_lab.simulation import PipelineSpec, StageClock, run_pipeline
from mooncake_lab.workload.arrivals import poisson_arrivals_s

DECODES, PREFILLS = "sarathi_serve_artifact_yi34b_decode", "sarathi_serve_artifact_yi34b_prefill"
WORKLOADS, LIMITS = "sarathi_serve_table2_workloads", "sarathi_serve_slo"
CONTEXT_TOKENS: Final = 1024
"""Of the decodes that the artifact timed, which does not say (assumption B41)."""
ATTENTION_SHARE: Final = 0.77
"""Of the memory's bandwidth that decode attention reaches: that of SARATHI's A6000 (Table 2)."""
BLOCK_TOKENS, MOST_REQUESTS, DELAY_S = 16, 128, 2.0
"""vLLM's block and batch in the paper's runs; the median scheduling delay above which a rate is too high."""
POLICIES: Final[tuple[str, ...]] = ("vLLM", "Orca", "Sarathi-Serve 512", "Sarathi-Serve 2048")
RATES: Final = {
    "smoke": (0.2, 0.6, 1.2),
    "classroom": tuple(round(0.16 * 1.25**step, 3) for step in range(11)),
    "full": tuple(round(0.1 * 1.1**step, 3) for step in range(30)),
}
REQUESTS: Final = {"smoke": 60, "classroom": 120, "full": 2048}
"""Of each run; the paper has 2048."""


def yi_34b_on_two_a100s() -> IterationCost:
    """The machine of the artifact: linear operators through its prefills, decodes through its largest batch.

    What a decode costs beside its matrices is mostly not attention: at most 8 % of it would be, at SARATHI's share
    of the bandwidth. So most of it is charged to the request, whatever its context.
    """
    lengths, seconds = _points(PREFILLS)
    per_token = seconds / lengths
    slope = np.polyfit(lengths[-3:], per_token[-3:], 1)[0]  # attention is what makes long prompts dear
    per_pair_s = 2 * float(slope)
    batches, steps = _points(DECODES)
    memory = 2 * hardware("a100").memory_bytes_per_s
    per_context_s = model_shape("yi-34b").kv_bytes_per_token / (ATTENTION_SHARE * memory)
    linear = seconds - per_pair_s * lengths * (lengths + 1) / 2
    per_decode_s = (steps[-1] - linear[0]) / batches[-1] - per_context_s * CONTEXT_TOKENS
    alone_s = steps[0] - per_decode_s - per_context_s * CONTEXT_TOKENS
    anchors = ((1.0, float(min(alone_s, linear[0]))), *zip(lengths.tolist(), linear.tolist(), strict=True))
    return IterationCost(
        name="Yi-34B on two A100s, anchored to the Sarathi-Serve artifact",
        linear=LinearCost(tuple(anchors)),
        per_pair_s=per_pair_s,
        per_context_token_s=float(per_context_s),
        per_decode_s=float(per_decode_s),
        rereads=False,
    )


def calibration() -> pd.DataFrame:
    """Every row of the artifact beside the model: what, size, paper_ms, model_ms, miss_percent."""
    cost = yi_34b_on_two_a100s()
    rows = [("prefill", n, 1000 * s, 1000 * cost.step_s(n, 0)) for n, s in zip(*_points(PREFILLS), strict=True)]
    rows += [
        ("decode", b, 1000 * s, 1000 * cost.step_s(0, 0, b, b * CONTEXT_TOKENS))
        for b, s in zip(*_points(DECODES), strict=True)
    ]
    mixed = fact(
        "sarathi_serve_artifact_mixed_batch", series="1021 prefill tokens + 3 decodes", x="total_ms"
    ).value
    rows.append(
        ("1021 prefill tokens + 3 decodes", 1024, mixed, 1000 * cost.step_s(1021, 0, 3, 3 * CONTEXT_TOKENS))
    )
    table = pd.DataFrame(rows, columns=["what", "size", "paper_ms", "model_ms"])
    return table.assign(miss_percent=100 * (table["model_ms"] / table["paper_ms"] - 1))


def budgets(slos_s: Sequence[float], decodes: int = 32, context_tokens: int = 4096) -> pd.DataFrame:
    """The largest token budget, in tiles of 128, whose iteration beside these decodes meets each TBT SLO.

    Returns:
        One row a SLO: slo_s, budget_tokens (0 where none does), iteration_s.
    """
    cost, rows = yi_34b_on_two_a100s(), list[dict[str, float]]()
    for slo_s in slos_s:
        fits = [n for n in range(128, 8193, 128) if _fused_s(cost, n, decodes, context_tokens) <= slo_s]
        budget = max(fits, default=0)
        rows.append(
            {
                "slo_s": slo_s,
                "budget_tokens": budget,
                "iteration_s": _fused_s(cost, budget, decodes, context_tokens) if budget else np.nan,
            }
        )
    return pd.DataFrame(rows)


def _fused_s(cost: IterationCost, tokens: int, decodes: int, context_tokens: int) -> float:
    """An iteration of the budget in the middle of a prompt of 4K, beside the decodes."""
    return cost.step_s(tokens - decodes, 2048, decodes, decodes * context_tokens)


def chunked_alone_over_both(budget_tokens: int = 1024, decodes: int = 32, context_tokens: int = 2048) -> float:
    """Gap between tokens where chunks and decodes take turns, over that where they share iterations (Table 4)."""
    cost = yi_34b_on_two_a100s()
    in_turn = cost.step_s(budget_tokens, 0) + cost.step_s(0, 0, decodes, decodes * context_tokens)
    return in_turn / cost.step_s(budget_tokens - decodes, 0, decodes, decodes * context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One engine under one policy and one rate of arrivals."""

    policy: str = "vLLM"
    rate: float = 0.5
    """Requests a second."""
    workload: str = "openchat_sharegpt4"
    requests: int = 200
    seed: int = 0

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row: what users saw."""
        run = run_pipeline(self.spec(), self.work())
        gaps = [b - a for seat in run.seats for a, b in pairwise(seat.token_s)]
        ttft = [seat.token_s[0] - seat.arrival_s for seat in run.seats]
        delays = [seat.scheduled_s - seat.arrival_s for seat in run.seats if seat.scheduled_s is not None]
        yield {
            "p50_ttft_s": float(np.median(ttft)),
            "p99_tbt_s": float(np.percentile(gaps, 99)),
            "largest_tbt_s": max(gaps),
            "median_delay_s": float(np.median(delays)),
            "refused": len(run.rejected),
        }

    def spec(self) -> PipelineSpec:
        """One stage, one batch."""
        shape, memory = model_shape("yi-34b"), 2 * hardware("a100").memory_bytes
        capacity = int((0.9 * memory - shape.weight_bytes) / shape.kv_bytes_per_token) // BLOCK_TOKENS
        most = 16 if self.policy == "Orca" else MOST_REQUESTS
        window = int(fact(WORKLOADS, series=self.workload, x="total_at_most").value)
        return PipelineSpec(
            clock=StageClock(cost=yi_34b_on_two_a100s(), stages=1, link=LinkLatency(1e30), hop_bytes_per_token=0),
            policy=policy_of(self.policy),
            limits=Limits(
                max_batch_tokens=window + most,
                max_requests=most,
                block_size_tokens=BLOCK_TOKENS,
                capacity_blocks=capacity,
                free_blocks=capacity,
                max_request_tokens=window,
            ),
            micro_batches=1,
        )

    def work(self) -> list[TracedRequest]:
        """Requests with the workload's median and 90th percentile of lengths, arriving as a Poisson process."""
        lengths = draw_lengths(self.workload, self.requests, seed=self.seed)
        arrivals = poisson_arrivals_s(self.requests, self.rate, seed=self.seed)
        return [
            traced(index, at_s, prompt, output)
            for index, (at_s, (prompt, output)) in enumerate(zip(arrivals.tolist(), lengths, strict=True))
        ]


def policy_of(name: str) -> BatchingPolicy:
    """The policy behind a name of the figure.

    Raises:
        ValueError: naming those there are.
    """
    made: dict[str, BatchingPolicy] = {
        "vLLM": VLLM(),
        "Orca": Orca(),
        "Sarathi-Serve 512": SarathiServe(chunk_tokens=512),
        "Sarathi-Serve 2048": SarathiServe(chunk_tokens=2048),
    }
    if name not in made:
        raise ValueError(f"no policy {name!r}; allowed are {', '.join(made)}")
    return made[name]


def draw_lengths(workload: str, count: int, *, seed: int = 0) -> list[tuple[int, int]]:
    """Prompt and output lengths: log-normal through the published medians and 90th percentiles.

    Those with more tokens in all than the paper keeps are drawn again.
    """
    rng, most = np.random.default_rng(seed), fact(WORKLOADS, series=workload, x="total_at_most").value
    shapes = [_lognormal(workload, part) for part in ("prompt", "output")]
    found: list[tuple[int, int]] = []
    while len(found) < count:
        prompt, output = (max(1, round(rng.lognormal(*shape))) for shape in shapes)
        if prompt + output <= most:
            found.append((prompt, output))
    return found


def capacity(served: pd.DataFrame, slos_s: Sequence[float]) -> pd.DataFrame:
    """The highest rate up to which every rate meets the SLO on P99 TBT and the limit on scheduling delay.

    Args:
        served: rows of `Serving` over rates.
        slos_s: limits on P99 TBT.

    Returns:
        Rows of policy, slo_s, requests_per_s (0 where not even the lowest rate does).
    """
    rows: list[dict[str, Any]] = []
    for policy, each in served.groupby("policy", sort=False):
        ordered = each.sort_values("rate")
        for slo_s in slos_s:
            meets = (ordered["p99_tbt_s"] <= slo_s) & (ordered["median_delay_s"] <= DELAY_S)
            passed = ordered["rate"][meets.cumprod().astype(bool)]
            rows.append({"policy": policy, "slo_s": slo_s, "requests_per_s": max(passed.tolist(), default=0.0)})
    return pd.DataFrame(rows)


def _lognormal(workload: str, part: str) -> tuple[float, float]:
    median, high = (fact(WORKLOADS, series=workload, x=f"{part}_{which}").value for which in ("median", "p90"))
    return float(np.log(median)), float(np.log(high / median) / 1.2815515655446004)


def _points(name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    table = curve(name)
    return np.asarray(table["x"], dtype=float), np.asarray(table["y"], dtype=float) / 1000
