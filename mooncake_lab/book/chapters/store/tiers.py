"""A conversation through the real engine with each tier in turn, and the bandwidth from which on reuse pays."""

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, cast, final

import numpy as np
import pandas as pd

from mooncake_lab.bench.machine import describe_machine, measure_peaks
from mooncake_lab.bench.measuring import computing_threads
from mooncake_lab.bench.media import LAYERWISE_MEDIA, prefill_engine
from mooncake_lab.bench.rounds import timed
from mooncake_lab.book.experiments import at_scale
from mooncake_lab.core import MIB
from mooncake_lab.engine.layerwise.prefill import LayerwisePrefill
from mooncake_lab.engine.loading import load_model
from mooncake_lab.perf import exact_prefill_flops, kv_bytes, model_shape, reuse_bandwidth_bytes_per_s
from mooncake_lab.store.backends import Buffer, DramBackend, Reservation, StorageBackend
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

NO_TIER: Final = "none"
MB: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns of one conversation, each prefilled with every tier in turn; run it with `cache=False`.

    Each turn's prompt is the turn before, the token that was answered, and new tokens. The engine forgets its own
    KVCache before every prefill, so what is reused comes from the tier.
    """

    model: str = "lab-8m"
    tiers: tuple[str, ...] = (NO_TIER, *LAYERWISE_MEDIA)
    turns: int = 5
    turn_tokens: int = 128
    block_tokens: int = 64
    rounds: int = 2
    """Conversations; one more warms up."""
    threads: int = 1
    seed: int = 0

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """One row a tier and turn: TTFT with its extremes, what was reused, and whether the token is the same."""
        taken: dict[tuple[str, int], list[tuple[float, int, bool]]] = {}
        with computing_threads(self.threads), ExitStack() as stack:
            ways = self._ways(stack)
            for number in range(self.rounds + 1):
                for turn, tier, found in ways.converse(self, np.random.default_rng([self.seed, number])):
                    if number:
                        taken.setdefault((tier, turn), []).append(found)
            machine = str(describe_machine("cpu"))
        for (tier, turn), found in taken.items():
            seconds = [each[0] for each in found]
            plain = [each[0] for each in taken[self.tiers[0], turn]]
            yield {
                "tier": tier,
                "turn": turn,
                "prompt_tokens": turn * self.turn_tokens + turn - 1,
                "reused_tokens": found[0][1],
                "ttft_ms": 1e3 * statistics.median(seconds),
                "least_ms": 1e3 * min(seconds),
                "most_ms": 1e3 * max(seconds),
                "speedup": statistics.median(a / b for a, b in zip(plain, seconds, strict=True)),
                "same_tokens": all(each[2] for each in found),
                "machine": machine,
            }

    def _ways(self, stack: ExitStack) -> "_Ways":
        longest = self.turns * (self.turn_tokens + 1)
        ready = load_model(f"random:{self.model}", device="cpu", seed=self.seed, positions=longest + 1)
        engine = prefill_engine(ready, longest)
        token_bytes = ready.config.kv_bytes_per_token(ready.embedding.dtype.itemsize)
        room_bytes = (self.rounds + 2) * longest * token_bytes + 64 * MIB
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prefills: dict[str, tuple[LayerwisePrefill, Any]] = {}
        for tier in self.tiers:
            if tier != NO_TIER:
                medium, grow_cold = stack.enter_context(LAYERWISE_MEDIA[tier](folder / tier, room_bytes))
                store = stack.enter_context(TieredStore([TierSettings(medium=medium)]))
                layerwise = LayerwisePrefill(engine, store, block_tokens=self.block_tokens)
                prefills[tier] = stack.enter_context(layerwise), grow_cold
        return _Ways(engine, prefills, ready.config.vocabulary)


@final
@dataclass(frozen=True, slots=True)
class _Ways:
    """One engine, and a layer-wise prefill for each tier."""

    engine: Any
    prefills: Mapping[str, tuple[LayerwisePrefill, Any]]
    vocabulary: int

    def converse(
        self, plan: Conversation, draw: np.random.Generator
    ) -> Iterator[tuple[int, str, tuple[float, int, bool]]]:
        """Seconds, reused tokens and whether the token is that of no tier, by turn and tier."""
        prompt = np.empty(0, np.int32)
        answered: list[int] = []
        for turn in range(1, plan.turns + 1):
            said = draw.integers(0, self.vocabulary, plan.turn_tokens).astype(np.int32)
            prompt = np.concatenate([prompt, np.array(answered, np.int32), said])
            expected: int | None = None
            for tier in plan.tiers:
                self.engine.engine.allocator.forget()
                seconds, reused, token = self._prefill(tier, prompt)
                expected = token if expected is None else expected
                yield turn, tier, (seconds, reused, token == expected)
            answered = [cast("int", expected)]

    def _prefill(self, tier: str, prompt: Any) -> tuple[float, int, int]:
        if tier == NO_TIER:
            started_s = time.perf_counter()
            result = self.engine.prefill(prompt)
            return time.perf_counter() - started_s, 0, int(result.first_token)
        layerwise, grow_cold = self.prefills[tier]
        grow_cold()
        started_s = time.perf_counter()
        found = layerwise.prefill(prompt)
        seconds = time.perf_counter() - started_s
        layerwise.flush()
        return seconds, found.loaded_tokens, int(found.prefill.first_token)


def measured_conversation(scale: str, *, seed: int = 0) -> Conversation:
    """What is measured at a scale: seconds, about ten seconds, minutes."""
    larger = {"model": "lab-30m", "turns": 8, "turn_tokens": 512, "block_tokens": 256, "rounds": 5}
    smoke = {"model": "lab-tiny", "turns": 3, "turn_tokens": 64, "block_tokens": 32, "rounds": 1}
    return at_scale(Conversation(seed=seed), scale, smoke=smoke, full=larger, gpu=larger)


@final
class _Throttled:
    """A DRAM medium that reads no faster than a given bandwidth; everything else is DRAM's own.

    Mutable: the bandwidth is turned between reads.
    """

    def __init__(self, medium: DramBackend) -> None:
        self._medium = medium
        self.bytes_per_s = float("inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._medium, name)

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """Read, and let pass what the bytes take at the bandwidth."""
        ends_s = (
            time.perf_counter() + sum(reservation.layer_bytes[first_layer:][: len(buffers)]) / self.bytes_per_s
        )
        self._medium.read_into(reservation, buffers, first_layer=first_layer)
        while (left_s := ends_s - time.perf_counter()) > 0:
            time.sleep(left_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """One prefix loaded at several bandwidths, against computing it; run it with `cache=False`."""

    model: str = "lab-8m"
    prefix_tokens: int = 512
    new_tokens: int = 32
    block_tokens: int = 64
    around: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
    """Bandwidths to try, as multiples of the prefix's bytes over the seconds that computing it takes."""
    rounds: int = 2
    threads: int = 1
    seed: int = 0

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """One row a bandwidth: recompute over reuse, medians paired in rounds; and what Eq. 2 asks for."""
        tokens = self.prefix_tokens + self.new_tokens
        with computing_threads(self.threads):
            ready = load_model(f"random:{self.model}", device="cpu", seed=self.seed, positions=tokens + 1)
            prefix_bytes = self.prefix_tokens * ready.config.kv_bytes_per_token(ready.embedding.dtype.itemsize)
            engine = prefill_engine(ready, tokens)
            prompt = np.random.default_rng(self.seed).integers(0, ready.config.vocabulary, tokens).astype(np.int32)
            inner = DramBackend(prefix_bytes + 16 * MIB)
            medium = _Throttled(inner)
            with (
                TieredStore([TierSettings(medium=cast("StorageBackend", medium))]) as store,
                LayerwisePrefill(engine, store, block_tokens=self.block_tokens, overlap=False) as layerwise,
            ):
                layerwise.prefill(prompt[: self.prefix_tokens])
                layerwise.flush()

                def computed_s(length: int) -> float:
                    engine.engine.allocator.forget()
                    return timed(lambda: engine.prefill(prompt[:length]))

                def reused_s(bytes_per_s: float) -> float:
                    engine.engine.allocator.forget()
                    medium.bytes_per_s = bytes_per_s
                    return timed(lambda: layerwise.prefill(prompt, keep=False))

                computed_s(tokens)
                alone_s = statistics.median(computed_s(self.prefix_tokens) for _ in range(3))
                rates = [factor * prefix_bytes / alone_s for factor in self.around]
                ratios: dict[float, list[float]] = {rate: [] for rate in rates}
                for _ in range(self.rounds):
                    for rate in rates:
                        ratios[rate].append(computed_s(tokens) / reused_s(rate))
            inner.close()
            peak = measure_peaks("cpu", side=512, copy_bytes=8 * MIB).float32_flops_per_s
            machine = str(describe_machine("cpu"))
        shape = replace(model_shape(self.model), bytes_per_element=4)
        flops = float(exact_prefill_flops(shape, float(self.prefix_tokens)))
        for rate, found in ratios.items():
            yield {
                "mb_per_s": rate / MB,
                "ratio": statistics.median(found),
                "equation_2_mb_per_s": float(reuse_bandwidth_bytes_per_s(shape, float(self.prefix_tokens), peak))
                / MB,
                "exact_mb_per_s": float(kv_bytes(shape, float(self.prefix_tokens))) / flops * peak / MB,
                "achieved_mb_per_s": prefix_bytes / alone_s / MB,
                "share_of_peak": flops / alone_s / peak,
                "machine": machine,
            }


def break_even_at(scale: str, *, seed: int = 0) -> BreakEven:
    """What is measured at a scale."""
    larger = {"model": "lab-30m", "prefix_tokens": 2048, "block_tokens": 256, "rounds": 7}
    smoke = {"model": "lab-tiny", "prefix_tokens": 128, "rounds": 1}
    return at_scale(BreakEven(seed=seed), scale, smoke=smoke, full=larger, gpu=larger)


def crossing_mb_per_s(rows: pd.DataFrame) -> float | None:
    """The bandwidth at which reuse and recomputation take equally long, between two that were tried.

    Returns:
        MB/s, by straight lines between points on logarithmic axes; `None` where no two points enclose it.
    """
    points = np.log(rows[["mb_per_s", "ratio"]].to_numpy(dtype=float)).tolist()
    for (rate, gain), (next_rate, next_gain) in reversed([*pairwise(points)]):
        if gain < 0 <= next_gain:
            return float(np.exp(rate - gain / (next_gain - gain) * (next_rate - rate)))
    return None


BANDWIDTHS: Final = {
    "equation_2_mb_per_s": "Eq. 2 as printed, at this machine's peak",
    "exact_mb_per_s": "Eq. 2 with the exact count, at the peak",
    "achieved_mb_per_s": "Eq. 2 with the time that computing takes",
}
"""What Eq. 2 asks for, read in three ways; columns of `BreakEven`."""
