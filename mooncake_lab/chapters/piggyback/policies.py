"""SARATHI's schemes as policies of this package, every iteration of theirs timed by a testbed's cost."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.batching import BatchingPolicy, Limits, Orca, Plan, Progress, RequestLevel, Sarathi, trace_plans
from mooncake_lab.perf import Workload
from mooncake_lab.simulation import plan_s
from mooncake_lab.testbeds.sarathi import machine

BLOCK_TOKENS: Final = 16
POLICIES: Final = ("baseline", "Orca best", "SARATHI")
"""The schemes of SARATHI's evaluation: prompts together and then decodes; whole prompts; chunks."""


def policy_of(name: str, fused_tokens: int) -> BatchingPolicy:
    """The batching policy behind a name of SARATHI's evaluation.

    Raises:
        ValueError: naming those there are.
    """
    if name not in POLICIES:
        raise ValueError(f"no scheme {name!r}; allowed are {', '.join(POLICIES)}")
    made: dict[str, BatchingPolicy] = {
        "baseline": RequestLevel(),
        "Orca best": Orca(max_prefills=1),
        "SARATHI": Sarathi(chunk_tokens=fused_tokens, chunk="fixed"),
    }
    return made[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledRun:
    """Equal requests under a real batching policy, every iteration timed by the cost of a SARATHI testbed."""

    testbed: str = "LLaMA-13B/A6000"
    scheme: str = "SARATHI"
    fused_tokens: int = 256
    total_tokens: int = 1024
    batch: int = 18
    rounds: int = 4
    """Requests over batch size: with many, the ramps at both ends matter less."""

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row: seconds a round, iterations by kind, and the seconds spent in each kind."""
        work = Workload.balanced(self.total_tokens, self.fused_tokens, self.batch)
        cost = machine(self.testbed)
        plans = [step.plan for step in _log(work, policy_of(self.scheme, self.fused_tokens), self.rounds)]
        seconds = [plan_s(cost, plan) for plan in plans]
        kinds = [_kind(plan) for plan in plans]
        yield {
            "prompt_tokens": work.prompt_tokens,
            "decode_steps": work.decode_steps,
            "seconds_a_round": sum(seconds) / self.rounds,
            **{f"{kind}_iterations": kinds.count(kind) for kind in ("prefill", "hybrid", "decode")},
            **{
                f"{kind}_s": sum(s for s, k in zip(seconds, kinds, strict=True) if k == kind) / self.rounds
                for kind in ("prefill", "hybrid", "decode")
            },
        }


def _kind(plan: Plan) -> str:
    return "hybrid" if plan.prefills and plan.decodes else "prefill" if plan.prefills else "decode"


def _log(work: Workload, policy: BatchingPolicy, rounds: int) -> Sequence[Any]:
    count, output = rounds * work.batch, work.decode_steps + 1  # the prefill gives the first token
    requests = [
        Progress(request_id=i, arrival=i, prompt_tokens=work.prompt_tokens, max_new_tokens=output)
        for i in range(count)
    ]
    capacity = work.batch * -(-(work.prompt_tokens + output) // BLOCK_TOKENS)
    limits = Limits(
        max_batch_tokens=work.batch * (work.prompt_tokens + 1),
        max_requests=work.batch,
        block_size_tokens=BLOCK_TOKENS,
        capacity_blocks=capacity,
        free_blocks=capacity,
    )
    return trace_plans(policy, requests, limits, dict.fromkeys(range(count), output))


def beside_closed_form(modelled: pd.DataFrame, expected: Mapping[str, float]) -> pd.DataFrame:
    """Simulated rounds beside closed ones: scheme, simulated_s, closed_s, apart_percent (ramps at both ends)."""
    closed = np.asarray([expected[scheme] for scheme in modelled["scheme"].tolist()])
    apart = 100 * (np.asarray(modelled["seconds_a_round"]) / closed - 1)
    return pd.DataFrame(
        {
            "scheme": modelled["scheme"],
            "simulated_s": modelled["seconds_a_round"],
            "closed_s": closed,
            "apart_percent": apart,
        }
    )
