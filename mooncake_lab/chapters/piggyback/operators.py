"""Where an iteration's time goes: by operator, by tile, and by part of a round (SARATHI Figures 3, 7 and 10)."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from mooncake_lab.chapters.piggyback.model import LARGEST, TOTALS
from mooncake_lab.perf import Workload, model_shape, piggyback_round, separate_round
from mooncake_lab.testbeds.sarathi import llama_13b_on_a6000


def time_per_token(batches: Sequence[int] = (1, 2, 4, 8, 12, 18), tokens: int = 1024) -> pd.DataFrame:
    """Milliseconds a token by operator, prefill and decode, over batch size (SARATHI Fig. 3).

    The linear time is split among its operators by their weights, which is how bytes and FLOPs both split.

    Returns:
        Rows of stage, batch, operator, ms.
    """
    cost, shares = llama_13b_on_a6000(), operator_shares()
    rows: list[dict[str, Any]] = []
    for batch in batches:
        stages = {
            "prefill": (batch * tokens, batch * cost.chunk_attention_s(tokens)),
            "decode": (batch, cost.decode_attention_s(batch * tokens)),
        }
        for stage, (count, attention_s) in stages.items():
            linear_s = cost.linear.seconds(count)
            parts = {name: share * linear_s for name, share in shares.items()} | {"attention": attention_s}
            rows += [
                {"stage": stage, "batch": batch, "operator": name, "ms": 1000 * seconds / count}
                for name, seconds in parts.items()
            ]
    return pd.DataFrame(rows)


def operator_shares(model: str = "llama-13b") -> dict[str, float]:
    """The share of each linear operator in the weights of a layer."""
    shape = model_shape(model)
    weights = {
        "preproj": shape.width * (shape.query_width + 2 * shape.kv_width),
        "postproj": shape.width * shape.query_width,
        "ffn1": (shape.ffn_matrices - 1) * shape.width * shape.ffn_width,
        "ffn2": shape.width * shape.ffn_width,
    }
    return {name: count / shape.layer_parameters for name, count in weights.items()}


def sawtooth(most_tokens: int = 1024) -> pd.DataFrame:
    """Iteration time over its tokens, with tiles and without (SARATHI Fig. 7): tokens, tiles, ms."""
    rows: list[dict[str, Any]] = []
    for tiles in (True, False):
        cost = llama_13b_on_a6000(tiles=tiles)
        rows += [{"tokens": n, "tiles": tiles, "ms": 1000 * cost.step_s(n, 0)} for n in range(1, most_tokens + 1)]
    return pd.DataFrame(rows)


def breakdown(chunks: Sequence[int] = (256, 512)) -> pd.DataFrame:
    """Where the time of a round goes, with and without piggybacking, at the balance (SARATHI Fig. 10).

    Returns:
        Rows of label, batch, fused_tokens, scheme, part, seconds.
    """
    cost = llama_13b_on_a6000()
    rows: list[dict[str, Any]] = []
    for fused in chunks:
        for label, total in TOTALS.items():
            batch = LARGEST[label]
            work = Workload.balanced(total, fused, batch)
            rounds = {"baseline": separate_round(cost, work), "SARATHI": piggyback_round(cost, work, fused)}
            for scheme, each in rounds.items():
                parts = {name: value for name, value in asdict(each).items() if name.endswith("_s")}
                rows += [
                    {
                        "label": label, "batch": batch, "fused_tokens": fused, "scheme": scheme,
                        "part": name.removesuffix("_s").replace("_", " "), "seconds": seconds,
                    }
                    for name, seconds in parts.items()
                ]  # fmt: skip  # one row of a table
    return pd.DataFrame(rows)
