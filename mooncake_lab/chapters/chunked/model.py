"""Chunked prefill on paper: saturation, arithmetic intensity by operator, masks, and what chunking costs."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab.perf import (
    IterationCost,
    ModelShape,
    Workload,
    hardware,
    model_shape,
    piggyback_round,
    ridge_flops_per_byte,
    separate_round,
)
from mooncake_lab.testbeds.sarathi import llama_13b_on_a6000

LENGTHS = (1024, 2048, 3072)
"""The paper's sequence lengths: 1K, 2K, 3K."""
CHUNKS = tuple(range(64, 513, 64))
"""The chunk sizes of SARATHI Fig. 13."""


def pieces(prompt_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """A prompt cut up: pairs of the tokens before a piece and the tokens in it; the last one may be short.

    Raises:
        ValueError: when either number is below 1.
    """
    if min(prompt_tokens, chunk_tokens) < 1:
        raise ValueError(f"a prompt of {prompt_tokens} in chunks of {chunk_tokens}; both must be at least 1")
    starts = range(0, prompt_tokens, chunk_tokens)
    return [(start, min(chunk_tokens, prompt_tokens - start)) for start in starts]


def reread_tokens(prompt_tokens: int, chunk_tokens: int) -> int:
    """Cached tokens that the pieces of a prompt read again: for N whole chunks `c N (N-1) / 2` (SARATHI §4.2)."""
    return sum(start for start, _ in pieces(prompt_tokens, chunk_tokens))


def masked_pairs(prompt_tokens: int, chunk_tokens: int) -> int:
    """Pairs of a token and one it attends to, over all pieces: the same for every chunk, `P (P+1) / 2`."""
    return sum(size * start + size * (size + 1) // 2 for start, size in pieces(prompt_tokens, chunk_tokens))


def masks(prompt_tokens: int = 12, chunk_tokens: int = 4) -> list[npt.NDArray[np.int64]]:
    """What each piece may attend to (SARATHI Fig. 6): arrays of shape (piece, tokens so far) of 0 and 1."""
    return [
        np.tril(np.ones((size, start + size), dtype=np.int64), k=start)
        for start, size in pieces(prompt_tokens, chunk_tokens)
    ]


def prefill_seconds(cost: IterationCost, prompt_tokens: int, chunk_tokens: int) -> float:
    """Seconds of a prompt in chunks, nothing beside it."""
    return sum(cost.step_s(size, start) for start, size in pieces(prompt_tokens, chunk_tokens))


def chunk_overhead(lengths: Sequence[int] = LENGTHS, chunks: Sequence[int] = CHUNKS) -> pd.DataFrame:
    """What chunking costs on the A6000, relative to a whole prompt (SARATHI Fig. 13 a and b).

    Returns:
        One row a setting: prompt_tokens, chunk_tokens, tiles, attention, prefill (ratios), reread_over_prompt.
    """
    rows: list[dict[str, float]] = []
    for tiles in (True, False):
        cost = llama_13b_on_a6000(tiles=tiles)
        for prompt in lengths:
            whole_s = cost.step_s(prompt, 0)
            for chunk in chunks:
                attention_s = sum(cost.chunk_attention_s(size, start) for start, size in pieces(prompt, chunk))
                rows.append(
                    {
                        "prompt_tokens": prompt,
                        "chunk_tokens": chunk,
                        "tiles": tiles,
                        "attention": attention_s / cost.chunk_attention_s(prompt),
                        "prefill": prefill_seconds(cost, prompt, chunk) / whole_s,
                        "reread_over_prompt": reread_tokens(prompt, chunk) / prompt,
                    }
                )
    return pd.DataFrame(rows)


def end_to_end_gain(settings: Iterable[tuple[int, int]], chunks: Sequence[int] = CHUNKS) -> pd.DataFrame:
    """Throughput of SARATHI over the baseline by chunk size, each at its own balance (SARATHI Fig. 13 c).

    Args:
        settings: pairs of sequence length and batch.
        chunks: chunk and decodes together.

    Returns:
        One row a setting, chunk and tile switch: total_tokens, batch, fused_tokens, tiles, gain.
    """
    rows: list[dict[str, float]] = []
    for tiles in (True, False):
        cost = llama_13b_on_a6000(tiles=tiles)
        for total, batch in settings:
            for fused in chunks:
                work = Workload.balanced(total, fused, batch)
                gain = separate_round(cost, work).seconds / piggyback_round(cost, work, fused).seconds
                rows.append(
                    {"total_tokens": total, "batch": batch, "fused_tokens": fused, "tiles": tiles, "gain": gain}
                )
    return pd.DataFrame(rows)


def saturation(tokens: Sequence[int], batches: Sequence[int], context_tokens: int = 1024) -> pd.DataFrame:
    """Tokens a millisecond of one layer, for a prefill and for decodes (SARATHI Fig. 4a).

    Returns:
        Rows of stage (prefill, decode, or decode without its attention), tokens (of the iteration), tokens_per_ms.
    """
    cost, layers = llama_13b_on_a6000(), model_shape("llama-13b").layers
    rows = [("prefill", n, cost.step_s(n, 0)) for n in tokens]
    rows += [("decode", n, cost.step_s(0, 0, n, n * context_tokens)) for n in batches]
    rows += [("decode without its attention", n, cost.linear.seconds(n)) for n in batches]
    return pd.DataFrame(
        [{"stage": stage, "tokens": n, "tokens_per_ms": n * layers / (1000 * s)} for stage, n, s in rows]
    )


def intensities(
    batches: Sequence[int], tokens_each: int = 1024, *, model: str = "llama-13b", device: str = "a6000"
) -> pd.DataFrame:
    """FLOPs for each byte moved, operator by operator (SARATHI Fig. 4b).

    Every operator reads its weights (or the KVCache) and its inputs and writes its outputs, once.

    Returns:
        Rows of stage, operator, batch, intensity_flops_per_byte, ridge_flops_per_byte.
    """
    shape, ridge = model_shape(model), ridge_flops_per_byte(hardware(device))
    rows: list[dict[str, Any]] = []
    for stage in ("prefill", "decode"):
        for batch in batches:
            rows += [
                {
                    "stage": stage,
                    "operator": operator,
                    "batch": batch,
                    "intensity_flops_per_byte": flops / moved,
                    "ridge_flops_per_byte": ridge,
                }
                for operator, flops, moved in _operators(shape, stage, batch, tokens_each)
            ]
    return pd.DataFrame(rows)


def _operators(shape: ModelShape, stage: str, batch: int, each: int) -> list[tuple[str, float, float]]:
    """Name, FLOPs and bytes of one layer's operators."""
    rows = batch * each if stage == "prefill" else batch
    context = batch * each
    pairs = batch * each * (each + 1) / 2 if stage == "prefill" else context
    matrices = {
        "preproj": (shape.width, shape.query_width + 2 * shape.kv_width),
        "postproj": (shape.query_width, shape.width),
        "ffn1": (shape.width, (shape.ffn_matrices - 1) * shape.ffn_width),
        "ffn2": (shape.ffn_width, shape.width),
    }
    size = shape.bytes_per_element
    found = [
        (name, 2.0 * rows * a * b, float(size * (a * b + rows * (a + b)))) for name, (a, b) in matrices.items()
    ]
    attention = size * (2.0 * context * shape.kv_width + 2.0 * rows * shape.query_width)
    return [*found, ("attention", 4.0 * shape.query_width * pairs, attention)]
