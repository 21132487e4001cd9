"""Chunked prefill on the real engine: equal to a whole prefill, and what it costs here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from mooncake_lab.chapters.chunked.model import pieces, reread_tokens
from mooncake_lab.chapters.engine.measuring import Clock, measured_by, one_thread, random_prompt
from mooncake_lab.core import check_scale
from mooncake_lab.engine import EngineSettings, LlamaModel, PrefillEngine, load_model

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
