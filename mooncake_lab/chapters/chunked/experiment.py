"""Chapter 04: chunked prefill modelled, run by the real engine, and beside SARATHI and Sarathi-Serve."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab.bench.measuring import Clock, measured_by, one_thread, random_prompt
from mooncake_lab.core import check_scale
from mooncake_lab.engine import EngineSettings, LlamaModel, PrefillEngine, load_model
from mooncake_lab.paper import (
    ComparisonTable,
    claimed,
    compared,
    comparison_table,
    fact,
    factor,
    order,
    within,
)
from mooncake_lab.perf import (
    IterationCost,
    ModelShape,
    Work,
    Workload,
    hardware,
    kernel_work,
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
_OPERATORS: Final = {
    "preproj": "qkv", "postproj": "output", "ffn1": "gate and up", "ffn2": "down", "attention": "attention"
}  # fmt: skip
"""The operators of SARATHI Fig. 4 and our kernels."""


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


def intensities(batches: Sequence[int]) -> pd.DataFrame:
    """FLOPs for each byte moved, operator by operator, with 1,024 tokens per request (SARATHI Fig. 4b).

    Every operator reads its weights (or the KVCache) and its inputs and writes its outputs, once.

    Returns:
        Rows of stage, operator, batch, intensity_flops_per_byte, ridge_flops_per_byte.
    """
    shape, ridge = model_shape("llama-13b"), ridge_flops_per_byte(hardware("a6000"))
    rows: list[dict[str, Any]] = []
    for stage in ("prefill", "decode"):
        for batch in batches:
            rows += [
                {
                    "stage": stage,
                    "operator": operator,
                    "batch": batch,
                    "intensity_flops_per_byte": work.intensity_flops_per_byte,
                    "ridge_flops_per_byte": ridge,
                }
                for operator, work in _operators(shape, stage, batch, 1024).items()
            ]
    return pd.DataFrame(rows)


def _operators(shape: ModelShape, stage: str, batch: int, each: int) -> dict[str, Work]:
    """The work of one layer's operators, by the names of the paper."""
    tokens, context = (batch * each if stage == "prefill" else batch), batch * each
    pairs = batch * each * (each + 1) / 2 if stage == "prefill" else context
    work = kernel_work(shape, tokens, context, pairs)
    return {paper: work[ours] for paper, ours in _OPERATORS.items()}


BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedEqualsWhole:
    """One prompt, prefilled whole and in chunks by the real engine: is it the same?"""

    model: str = "lab-tiny"
    prompt_tokens: int = 700
    chunks: tuple[int, ...] = (64, 100, 256)
    """With 64 and 256 the last chunk is short; 100 is not a multiple of `BLOCK_TOKENS`."""
    seed: int = 0

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row a chunk size: iterations, same_first_token, and the largest differences in keys and values."""
        model = load_model(f"random:{self.model}", device="cpu", seed=self.seed, positions=self.prompt_tokens)
        prompt = random_prompt(self.prompt_tokens, model.config.vocabulary, seed=self.seed)
        whole = _engine(model, self.prompt_tokens).prefill(prompt)
        for chunk in self.chunks:
            engine = _engine(model, self.prompt_tokens, chunk)
            cut = engine.prefill(prompt)
            apart = [
                (a - b).abs().amax(dim=(1, 2, 3)).tolist()
                for a, b in zip(whole.kv.layers, cut.kv.layers, strict=True)
            ]
            keys, values = np.max(apart, axis=0).tolist()
            yield {
                "chunk_tokens": chunk,
                "iterations": len(engine.engine.log),
                "same_first_token": cut.first_token == whole.first_token,
                "keys_apart": keys,
                "values_apart": values,
            }


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredChunks:
    """Prefill of one prompt at several chunk sizes, really run; every round visits every size in a new order.

    Run it with `cache=False`: a time measured yesterday says nothing about now.
    """

    model: str = "lab-30m"
    prompt_tokens: tuple[int, ...] = (512, 1024)
    chunks: tuple[int, ...] = (32, 64, 128, 256, 512)
    rounds: int = 3
    seed: int = 0
    device: str = "cpu"

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """One row a prompt length, chunk size and round, beside the whole prompt of the same round."""
        with one_thread(self.device) as clock:
            longest = max(self.prompt_tokens)
            model = load_model(f"random:{self.model}", device=self.device, seed=self.seed, positions=longest)
            prompt = random_prompt(longest, model.config.vocabulary, seed=self.seed)
            order = np.random.default_rng(self.seed)
            for number in range(self.rounds + 1):
                for tokens in self.prompt_tokens:
                    sizes = [*(chunk for chunk in self.chunks if chunk < tokens), tokens]
                    seconds = {
                        chunk: _prefill_s(model, prompt[:tokens], chunk, clock)
                        for chunk in order.permutation(sizes).tolist()
                    }
                    if number:  # round 0 warms up
                        yield from self._of_round(number, tokens, seconds)

    def _of_round(self, number: int, tokens: int, seconds: Mapping[int, float]) -> Iterable[Mapping[str, Any]]:
        for chunk, each in sorted(seconds.items()):
            yield {
                "round": number,
                "tokens": tokens,
                "chunk_tokens": chunk,
                "iterations": len(pieces(tokens, chunk)),
                "reread_over_prompt": reread_tokens(tokens, chunk) / tokens,
                "seconds": each,
                "over_whole": each / seconds[tokens],
                "machine": measured_by(self.device),
            }


def measured_chunks(scale: str, *, seed: int = 0) -> MeasuredChunks:
    """What is measured at a scale.

    Raises:
        ValueError: when there is no such scale.
    """
    base = MeasuredChunks(seed=seed)
    by_scale = {
        "smoke": replace(base, model="lab-8m", prompt_tokens=(128, 256), chunks=(32, 64, 128), rounds=2),
        "classroom": base,
        "full": replace(base, model="lab-100m", prompt_tokens=(1024, 2048), chunks=(64, 128, 256, 512), rounds=9),
        "gpu": replace(
            base, model="llama3-8b", prompt_tokens=(2048, 16384), chunks=(64, 128, 256, 512, 1024, 4096),
            rounds=9, device="cuda",
        ),
    }  # fmt: skip  # one line of numbers a scale
    return by_scale[check_scale(scale)]


def chunk_medians(measured: pd.DataFrame) -> pd.DataFrame:
    """Medians over the rounds: ms, tokens_per_s, and over_whole with its extremes, by tokens and chunk_tokens.

    Ratios are taken round by round before the median, so that a slow minute slows both sides of each.
    """
    grouped = measured.groupby(["tokens", "chunk_tokens"], as_index=False).agg(
        iterations=("iterations", "first"),
        seconds=("seconds", "median"),
        over_whole=("over_whole", "median"),
        least=("over_whole", "min"),
        most=("over_whole", "max"),
    )
    return grouped.assign(ms=1000 * grouped["seconds"], tokens_per_s=grouped["tokens"] / grouped["seconds"])


def _engine(model: LlamaModel, tokens: int, chunk: int | None = None, clock: Clock | None = None) -> PrefillEngine:
    settings = EngineSettings(
        prefix_reuse=False,
        block_size_tokens=BLOCK_TOKENS,
        cache_blocks=-(-tokens // BLOCK_TOKENS) + 1,
        max_batch_tokens=tokens,
        max_requests=1,
    )
    if clock is None:
        return PrefillEngine(model, settings, chunk_tokens=chunk)
    return PrefillEngine(model, settings, chunk_tokens=chunk, clock=clock)


def _prefill_s(model: LlamaModel, prompt: Any, chunk: int, clock: Clock) -> float:
    return _engine(model, len(prompt), chunk, clock).prefill(prompt).seconds


def beside_papers(overhead: pd.DataFrame, speeds: pd.DataFrame) -> ComparisonTable:
    """What chunking costs on the modelled A6000, beside the paper.

    The model of the A6000 that judges SARATHI's throughput judges these claims as well.

    Args:
        overhead: rows of `chunk_overhead`; those of prompts of 1,024 tokens are compared.
        speeds: rows of `saturation`, with a prefill of 512 tokens or more.
    """
    tiled = overhead[overhead["tiles"] & (overhead["prompt_tokens"] == 1024)].set_index("chunk_tokens")
    ours: dict[str, dict[int, float]] = {name: tiled[name].to_dict() for name in ("prefill", "attention")}
    figure, series = "sarathi_fig13_chunk_overhead", "total prefill"
    saturated = max(speeds[speeds["stage"] == "prefill"]["tokens_per_ms"].tolist())
    model = "model of the A6000"
    return comparison_table(
        [
            claimed("S10", ours["prefill"][64]),
            claimed("S11", ours["prefill"][256]),
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


def chunk_loss_percent(overhead: pd.DataFrame) -> float:
    """Throughput that chunks of 256 tokens lose against a whole prompt of 1,024, on the modelled A6000."""
    rows = overhead[overhead["tiles"] & (overhead["prompt_tokens"] == 1024)]
    ratios = dict(zip(rows["chunk_tokens"].tolist(), rows["prefill"].tolist(), strict=True))
    return 100 * (1 - 1 / ratios[256])
