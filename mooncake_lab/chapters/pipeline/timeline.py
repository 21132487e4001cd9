"""Small pipelines drawn iteration by iteration: what SARATHI Figures 1 and 5 sketch, simulated."""

from dataclasses import replace
from typing import Any

import pandas as pd

from mooncake_lab.batching import Limits
from mooncake_lab.chapters.pipeline.experiment import BLOCK_TOKENS, Gpt3, policy_of, traced
from mooncake_lab.metrics.pipeline_bubbles import CAUSES, gap_causes, gaps_s
from mooncake_lab.simulation import PipelineRun, PipelineSpec, run_pipeline

SKETCH = ((900, 8), (350, 8), (600, 8), (250, 8), (500, 6), (300, 6))
"""Prompt and output tokens of the requests of the sketch: unequal prompts, a few decodes each."""


def two_stages(scheme: str, *, fused_tokens: int = 256, places: int = 2) -> PipelineRun:
    """Six requests through two stages of GPT-3, two micro-batches in flight."""
    capacity = places * 2048 // BLOCK_TOKENS
    spec = PipelineSpec(
        clock=replace(Gpt3().clock(8), stages=2),
        policy=policy_of(scheme, fused_tokens),
        limits=Limits(
            max_batch_tokens=4096,
            max_requests=places,
            block_size_tokens=BLOCK_TOKENS,
            capacity_blocks=capacity,
            free_blocks=capacity,
            max_request_tokens=2048,
        ),
        micro_batches=2,
    )
    return run_pipeline(spec, [traced(i, 0.0, prompt, output) for i, (prompt, output) in enumerate(SKETCH)])


def timeline(run: PipelineRun) -> pd.DataFrame:
    """Iterations and the gaps between them.

    Returns:
        Rows of stage, micro_batch, start_ms, end_ms, what: prompts, decodes, both, or the cause of a gap.
    """
    rows: list[dict[str, Any]] = []
    gaps, causes = gaps_s(run), gap_causes(run)
    for index, batch in enumerate(run.micro_batch):
        prompts, decodes = run.prompt_tokens[index], run.decodes[index]
        what = "both" if prompts and decodes else "prompts" if prompts else "decodes"
        for stage, (start_s, end_s) in enumerate(zip(run.start_s[index], run.end_s[index], strict=True)):
            shared = {"stage": stage, "micro_batch": batch, "prompt_tokens": prompts, "decodes": decodes}
            rows.append(shared | {"start_ms": 1000 * start_s, "end_ms": 1000 * end_s, "what": what})
            gap_s = float(gaps[index, stage])
            if gap_s > 1e-9:
                times = {"start_ms": 1000 * (start_s - gap_s), "end_ms": 1000 * start_s}
                rows.append(shared | times | {"what": CAUSES[int(causes[index, stage])]})
    return pd.DataFrame(rows)


def quantiles(runs: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """The columns `prefix_p0` to `prefix_p100` of runs as rows: scheme, share, value."""
    found = [name for name in runs.columns if str(name).startswith(f"{prefix}_p")]
    rows = [
        {"scheme": row["scheme"], "share": int(name.removeprefix(f"{prefix}_p")) / 100, "value": row[name]}
        for _, row in runs.iterrows()
        for name in found
    ]
    return pd.DataFrame(rows)


def shares_by_cause(runs: pd.DataFrame) -> pd.DataFrame:
    """Percent of all stage time by scheme and what it was spent on; 100 a row."""
    names = ("busy", *CAUSES)
    spent = {name: runs[f"spent_{name}_s"].to_numpy() for name in names}
    table = pd.DataFrame(spent, index=pd.Index(runs["scheme"], name="scheme"))
    return 100 * table.div(table.sum(axis=1), axis=0)


def sensitivity(runs: pd.DataFrame) -> pd.DataFrame:
    """The paper's three ratios, and Orca's completion time over that of the replicas, by the cost of decodes.

    Returns:
        Rows of decode_attention, overhead_ms_a_layer, requests, decode_ms, prompt_ms, fused_ms,
        prompt_over_decode, orca_over_sarathi, replicas_over_sarathi, orca_over_replicas,
        bubbles_orca_over_sarathi.
    """
    rows: list[dict[str, float]] = []
    for attention, overhead in sorted({*zip(runs["decode_attention"], runs["overhead_ms_a_layer"], strict=True)}):
        chosen = (runs["decode_attention"] == attention) & (runs["overhead_ms_a_layer"] == overhead)
        by_scheme = runs[chosen].set_index("scheme")
        done: dict[str, float] = by_scheme["completion_s"].to_dict()
        idle: dict[str, float] = by_scheme["median_bubble_s"].to_dict()
        stage: dict[str, float] = by_scheme.loc["SARATHI", ["decode_ms", "prompt_ms", "fused_ms"]].to_dict()
        rows.append(
            {"decode_attention": attention, "overhead_ms_a_layer": overhead}
            | {"requests": min(by_scheme["requests"].tolist())}
            | stage
            | {
                "prompt_over_decode": stage["prompt_ms"] / stage["decode_ms"],
                "orca_over_sarathi": done["Orca best"] / done["SARATHI"],
                "replicas_over_sarathi": done["TP8 replicas"] / done["SARATHI"],
                "orca_over_replicas": done["Orca best"] / done["TP8 replicas"],
                "bubbles_orca_over_sarathi": idle["Orca best"] / idle["SARATHI"],
            }
        )
    return pd.DataFrame(rows)
