"""Chapter 04's numbers held against SARATHI §5.4 and Fig. 13, and against the Sarathi-Serve artifact."""

import pandas as pd

from mooncake_lab.paper import (
    ComparisonTable,
    claim,
    claimed,
    compared,
    comparison_table,
    fact,
    factor,
    order,
    within,
)


def beside_papers(overhead: pd.DataFrame, speeds: pd.DataFrame, *, prompt_tokens: int = 1024) -> ComparisonTable:
    """What chunking costs on the modelled A6000, beside the paper.

    The model of the A6000 that judges SARATHI's throughput judges these claims as well.

    Args:
        overhead: rows of `chunk_overhead`.
        speeds: rows of `saturation`, with a prefill of 512 tokens or more.
        prompt_tokens: the prompt length to compare at.
    """
    tiled = overhead[overhead["tiles"] & (overhead["prompt_tokens"] == prompt_tokens)].set_index("chunk_tokens")
    ours: dict[str, dict[int, float]] = {name: tiled[name].to_dict() for name in ("prefill", "attention")}
    figure, series = "sarathi_fig13_chunk_overhead", "total prefill"
    saturated = max(speeds[speeds["stage"] == "prefill"]["tokens_per_ms"].tolist())
    model = "model of the A6000"
    return comparison_table(
        [
            claimed(claim("S10"), ours["prefill"][64]),
            claimed(claim("S11"), ours["prefill"][256]),
            compared(
                f"{model}: attention in chunks of 64 over whole",
                fact(figure, series="attention", x=64),
                ours["attention"][64],
                factor(1.5, sense="above", threshold=1),
                evidence="simulated",
            ),
            compared(
                f"{model}: prefill in chunks of 512 over a whole one (at most)",
                fact(figure, series=series, x=512),
                ours["prefill"][512],
                order("at_most", fact(figure, series=series, x=512).value),
                evidence="simulated",
            ),
            compared(
                f"{model}: speed of a saturated layer",
                fact("sarathi_fig04_saturation", series="prefill", x="throughput_tokens_per_ms"),
                saturated,
                within(0.05),
                evidence="calibrated",
            ),
        ]
    )


def chunk_loss_percent(overhead: pd.DataFrame, *, chunk_tokens: int = 256, prompt_tokens: int = 1024) -> float:
    """Throughput that chunks of this size lose against a whole prompt, on the modelled A6000."""
    rows = overhead[overhead["tiles"] & (overhead["prompt_tokens"] == prompt_tokens)]
    ratios = dict(zip(rows["chunk_tokens"].tolist(), rows["prefill"].tolist(), strict=True))
    return 100 * (1 - 1 / ratios[chunk_tokens])
