"""SARATHI's machines as iteration costs: LLaMA-13B on an A6000, and LLaMA-33B on an A100 by transfer.

Nothing is typed in and nothing is tuned: every coefficient follows from one row of SARATHI Table 2 or one point of
its Fig. 7. Table 4 and Figures 8 to 11 and 13 are predictions.
"""

from dataclasses import replace
from typing import Final

import pandas as pd

from mooncake_lab.book.paper import fact
from mooncake_lab.core import entry
from mooncake_lab.perf import IterationCost, LinearCost, hardware, model_shape, transferred

TABLE_2: Final = "sarathi_table2_per_token_time"
FIGURE_7: Final = "sarathi_fig07_tile_quantisation"
PREFILL, DECODE, MIXED = (
    "prefill only",
    "decode only, batch 4, context 1024",
    "1021 prefill tokens + 3 decodes",
)
PROMPT_TOKENS, DECODES, CONTEXT_TOKENS, RIDERS = 1024, 4, 1024, 3
"""What the rows of Table 2 say they are."""

TESTBEDS: Final = ("LLaMA-13B/A6000", "LLaMA-33B/A100")


def tile_tokens() -> int:
    """The tile that the paper found on its GPUs."""
    return int(fact("sarathi_text_constants", series=TESTBEDS[0], x="tile_tokens").value)


def llama_13b_on_a6000(*, tiles: bool = True, rereads: bool = True) -> IterationCost:
    """The machine of Table 2 and Fig. 7, whose kernels round up to tiles and whose chunks reread the KVCache."""
    tile = tile_tokens()
    per_pair_s = _seconds(PREFILL, "attention_ms") / (PROMPT_TOKENS * (PROMPT_TOKENS + 1) / 2)
    per_context_s = _seconds(DECODE, "attention_ms") / (DECODES * CONTEXT_TOKENS)
    cost = IterationCost(
        name="LLaMA-13B on an A6000, anchored to SARATHI Table 2 and Fig. 7",
        linear=LinearCost(((1.0, 1.0), (2.0, 1.0))),
        per_pair_s=per_pair_s,
        per_context_token_s=per_context_s,
        rereads=rereads,
    )
    chunk = PROMPT_TOKENS - RIDERS
    known_s = cost.chunk_attention_s(chunk) + cost.decode_attention_s(RIDERS * CONTEXT_TOKENS)
    return replace(
        cost,
        linear=LinearCost(_anchors(cost, tile), tile if tiles else 1),
        beside_s=max(_seconds(MIXED, "attention_ms") - known_s, 0.0),
    )


def _anchors(cost: IterationCost, tile: int) -> tuple[tuple[float, float], ...]:
    """Linear seconds at whole tiles: those of Fig. 7 without their attention, and both rows of Table 2."""
    points: list[tuple[float, float]] = [(float(DECODES), _seconds(DECODE, "linear_ms"))]
    for tokens in _figure_7():
        total_s = fact(FIGURE_7, x=tokens).value / 1000
        rounded = -(-tokens // tile) * tile  # one token into the third tile pays for all of it
        points.append((float(rounded), total_s - cost.chunk_attention_s(tokens)))
    return (*points, (float(PROMPT_TOKENS), _seconds(PREFILL, "linear_ms")))


def llama_33b_on_a100(*, tiles: bool = True, rereads: bool = True, share: float = 1.0) -> IterationCost:
    """The second machine, of which the paper prints no iteration time: carried over by the roofline.

    Args:
        tiles: whether times jump at the edges of tiles.
        rereads: whether each chunk reads the keys and values before it again.
        share: of its peak, over the share that the A6000 reaches (assumption B64).
    """
    a100 = hardware("a100")
    return transferred(
        llama_13b_on_a6000(tiles=tiles, rereads=rereads),
        source=(model_shape("llama-13b"), hardware("a6000")),
        target=(model_shape("llama-33b"), replace(a100, bfloat16_flops_per_s=share * a100.bfloat16_flops_per_s)),
        name="LLaMA-33B on an A100, carried over from LLaMA-13B on an A6000 by the roofline",
    )


def machine(name: str, *, tiles: bool = True, rereads: bool = True, a100_share: float = 1.0) -> IterationCost:
    """The iteration cost of a machine of SARATHI Table 4, one of `TESTBEDS`; any other name is a ValueError."""
    made = {
        TESTBEDS[0]: llama_13b_on_a6000(tiles=tiles, rereads=rereads),
        TESTBEDS[1]: llama_33b_on_a100(tiles=tiles, rereads=rereads, share=a100_share),
    }
    return entry(made, name, "no testbed")


def anchors_met() -> pd.DataFrame:
    """The rows of Table 2 and the points of Fig. 7 beside the model that was drawn through them.

    All but the mixed row are met by construction.
    """
    cost, chunk = llama_13b_on_a6000(), PROMPT_TOKENS - RIDERS
    alone_s = cost.step_s(0, 0, DECODES, DECODES * CONTEXT_TOKENS)
    mixed_s = cost.step_s(chunk, 0, RIDERS, RIDERS * CONTEXT_TOKENS)
    rows = [
        ("Table 2: 1024 prompt tokens", _seconds(PREFILL, "total_ms"), cost.step_s(PROMPT_TOKENS, 0)),
        ("Table 2: 4 decodes at 1024", _seconds(DECODE, "total_ms"), alone_s),
        ("Table 2: 1021 prompt tokens + 3 decodes", _seconds(MIXED, "total_ms"), mixed_s),
        *((f"Fig. 7: {n} tokens", fact(FIGURE_7, x=n).value / 1000, cost.step_s(n, 0)) for n in _figure_7()),
    ]
    table = pd.DataFrame(rows, columns=["anchor", "paper_ms", "model_ms"])
    table[["paper_ms", "model_ms"]] *= 1000
    return table.assign(miss_percent=100 * (table["model_ms"] / table["paper_ms"] - 1))


def _figure_7() -> tuple[int, int, int]:
    """Tokens of the three points: one tile, two, and one token more."""
    tile = tile_tokens()
    return tile, 2 * tile, 2 * tile + 1


def _seconds(series: str, x: str) -> float:
    return fact(TABLE_2, series=series, x=x).value / 1000
