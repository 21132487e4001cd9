"""Chapter 04: chunked prefill modelled, run by the real engine, and beside SARATHI and Sarathi-Serve."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab import perf
from mooncake_lab.bench.measuring import Clock, measured_by, one_thread, random_prompt
from mooncake_lab.book.experiments import at_scale, tabulated, value, where
from mooncake_lab.book.paper import (
    ComparisonTable,
    claimed,
    compared,
    comparison_table,
    fact,
    within,
)
from mooncake_lab.book.testbeds.sarathi import llama_13b_on_a6000
from mooncake_lab.core import sum_in_order
from mooncake_lab.engine import EngineSettings, LlamaModel, PrefillEngine, load_model

LENGTHS = (1024, 2048, 3072)
"""The paper's sequence lengths: 1K, 2K, 3K."""
CHUNKS = tuple(range(64, 513, 64))
"""The chunk sizes of SARATHI Fig. 13."""
_OPERATORS: Final = {
    "preproj": "qkv", "postproj": "output", "ffn1": "gate and up", "ffn2": "down", "attention": "attention"
}  # fmt: skip
"""The operators of SARATHI Fig. 4 and our kernels."""


def pieces(prompt_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """A prompt cut up: pairs of the tokens before a piece and the tokens in it; for errors see `chunk_sizes`."""
    sizes = perf.chunk_sizes(prompt_tokens, chunk_tokens)
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


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


def prefill_seconds(cost: perf.IterationCost, prompt_tokens: int, chunk_tokens: int) -> float:
    """Seconds of a prompt in chunks, nothing beside it."""
    return sum_in_order(cost.step_s(size, start) for start, size in pieces(prompt_tokens, chunk_tokens))


@tabulated
def chunk_overhead(
    lengths: Sequence[int] = LENGTHS, chunks: Sequence[int] = CHUNKS, *, rereads: bool = True
) -> Iterator[dict[str, Any]]:
    """What chunking costs on the A6000, relative to a whole prompt (SARATHI Fig. 13 a and b).

    `rereads` says whether each chunk reads the keys and values before it again (assumption B63).
    """
    for tiles in (True, False):
        cost = llama_13b_on_a6000(tiles=tiles, rereads=rereads)
        for prompt in lengths:
            whole_s = cost.step_s(prompt, 0)
            for chunk in chunks:
                attention_s = sum_in_order(
                    cost.chunk_attention_s(size, start) for start, size in pieces(prompt, chunk)
                )
                yield {
                    "prompt_tokens": prompt,
                    "chunk_tokens": chunk,
                    "tiles": tiles,
                    "attention": attention_s / cost.chunk_attention_s(prompt),
                    "prefill": prefill_seconds(cost, prompt, chunk) / whole_s,
                    "reread_over_prompt": reread_tokens(prompt, chunk) / prompt,
                }


@tabulated
def end_to_end_gain(
    settings: Iterable[tuple[int, int]], chunks: Sequence[int] = CHUNKS
) -> Iterator[dict[str, Any]]:
    """Throughput of SARATHI over the baseline by chunk size, each at its own balance (SARATHI Fig. 13 c)."""
    for tiles in (True, False):
        cost = llama_13b_on_a6000(tiles=tiles)
        for total, batch in settings:
            for fused in chunks:
                work = perf.Workload.balanced(total, fused, batch)
                gain = perf.separate_round(cost, work).seconds / perf.piggyback_round(cost, work, fused).seconds
                yield {"total_tokens": total, "batch": batch, "fused_tokens": fused, "tiles": tiles, "gain": gain}


@tabulated
def saturation(
    tokens: Sequence[int], batches: Sequence[int], context_tokens: int = 1024
) -> Iterator[dict[str, Any]]:
    """Tokens a millisecond of one layer, for a prefill and for decodes (SARATHI Fig. 4a)."""
    cost, layers = llama_13b_on_a6000(), perf.model_shape("llama-13b").layers
    times = [("prefill", n, cost.step_s(n, 0)) for n in tokens]
    times += [("decode", n, cost.step_s(0, 0, n, n * context_tokens)) for n in batches]
    times += [("decode without its attention", n, cost.linear.seconds(n)) for n in batches]
    for stage, n, seconds in times:
        yield {"stage": stage, "tokens": n, "tokens_per_ms": n * layers / (1000 * seconds)}


@tabulated
def intensities(batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """FLOPs for each byte moved, operator by operator, with 1,024 tokens per request (SARATHI Fig. 4b).

    Every operator reads its weights (or the KVCache) and its inputs and writes its outputs, once.
    """
    shape, ridge = perf.model_shape("llama-13b"), perf.ridge_flops_per_byte(perf.hardware("a6000"))
    for stage in ("prefill", "decode"):
        for batch in batches:
            for operator, work in _operators(shape, stage, batch, 1024).items():
                row: dict[str, Any] = {"stage": stage, "operator": operator, "batch": batch}
                intensity = work.intensity_flops_per_byte
                yield row | {"intensity_flops_per_byte": intensity, "ridge_flops_per_byte": ridge}


def _operators(shape: perf.ModelShape, stage: str, batch: int, each: int) -> dict[str, perf.Work]:
    """The work of one layer's operators, by the names of the paper."""
    tokens, context = (batch * each if stage == "prefill" else batch), batch * each
    pairs = batch * each * (each + 1) / 2 if stage == "prefill" else context
    work = perf.kernel_work(shape, tokens, context, pairs)
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
        shared = {"round": number, "tokens": tokens, "machine": measured_by(self.device)}
        for chunk, each in sorted(seconds.items()):
            row = shared | {"chunk_tokens": chunk, "iterations": len(pieces(tokens, chunk))}
            yield row | {"seconds": each, "over_whole": each / seconds[tokens]}


def measured_chunks(scale: str, *, seed: int = 0) -> MeasuredChunks:
    """What is measured at a scale."""
    return at_scale(
        MeasuredChunks(seed=seed),
        scale,
        smoke={"model": "lab-8m", "prompt_tokens": (128, 256), "chunks": (32, 64, 128), "rounds": 2},
        full={"model": "lab-100m", "prompt_tokens": (1024, 2048), "chunks": (64, 128, 256, 512), "rounds": 9},
        gpu={"model": "llama3-8b", "prompt_tokens": (2048, 16384), "chunks": (64, 128, 256, 512, 1024, 4096)}
        | {"rounds": 9, "device": "cuda"},
    )


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
        prefix_caching=False,
        block_size_tokens=BLOCK_TOKENS,
        cache_blocks=-(-tokens // BLOCK_TOKENS) + 1,
        max_batch_tokens=tokens,
        max_requests=1,
    )
    timed: dict[str, Any] = {} if clock is None else {"clock": clock}
    return PrefillEngine(model, settings, chunk_tokens=chunk, **timed)


def _prefill_s(model: LlamaModel, prompt: Any, chunk: int, clock: Clock) -> float:
    return _engine(model, len(prompt), chunk, clock).prefill(prompt).seconds


def beside_papers(
    overhead: pd.DataFrame, speeds: pd.DataFrame, *, tiles: bool = True, prompt_tokens: int = 1024
) -> ComparisonTable:
    """What chunking costs on the modelled A6000, beside the paper.

    The model of the A6000 that judges SARATHI's throughput judges these claims as well.

    Args:
        overhead: rows of `chunk_overhead`.
        speeds: rows of `saturation`.
        tiles: whether times of the machine jump at the edges of tiles (assumption B63).
        prompt_tokens: the length of the prompt (assumption B67).
    """
    tiled = where(overhead, tiles=tiles, prompt_tokens=prompt_tokens).set_index("chunk_tokens")
    ours: dict[str, dict[int, float]] = {name: tiled[name].to_dict() for name in ("prefill", "attention")}
    saturated = max(where(speeds, stage="prefill")["tokens_per_ms"].tolist())
    printed = fact("sarathi_fig04_saturation", series="prefill", x="throughput_tokens_per_ms")
    words = "model of the A6000: speed of a saturated layer"
    return comparison_table(
        [
            claimed("S10", ours["prefill"][64]),
            claimed("S42", ours["prefill"][128]),
            claimed("S11", ours["prefill"][256]),
            claimed("S43", ours["prefill"][512]),
            claimed("S41", ours["attention"][64]),
            compared(words, printed, saturated, within(0.05), evidence="calibrated"),
        ]
    )


def chunk_loss_percent(overhead: pd.DataFrame) -> float:
    """Throughput that chunks of 256 tokens lose against a whole prompt of 1,024, on the modelled A6000."""
    ratio = value(overhead, "prefill", tiles=True, prompt_tokens=1024, chunk_tokens=256)
    return 100 * (1 - 1 / ratio)
