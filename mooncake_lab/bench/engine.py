"""Speed beside a peer: paired runs, interleaved, medians of ratios; and the floor the machine sets.

Both sides get the same weights and prompts and must generate the same number of tokens. Each round runs both, in
alternating order, so that a busy machine slows both; a ratio is taken within a round.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch

from mooncake_lab.bench.baselines import (
    HuggingFaceContinuous,
    HuggingFaceGenerate,
    Subject,
    Tokens,
    hugging_face,
    our_engine,
)
from mooncake_lab.bench.floors import floor_seconds, rates_of, with_floors
from mooncake_lab.bench.interleaved import Decoding, HuggingFaceDecoding, OurDecoding
from mooncake_lab.bench.machine import commit, describe_machine, measure_peaks
from mooncake_lab.bench.rounds import alternate
from mooncake_lab.engine.backends import choose_backend
from mooncake_lab.engine.config import LlamaConfig, config_from_shape
from mooncake_lab.engine.loading import DTYPES
from mooncake_lab.engine.model import make_model
from mooncake_lab.engine.weights import random_weights
from mooncake_lab.perf import Hardware, model_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload to be timed."""

    name: str
    kind: Literal["prefill", "decode", "mixed"]
    prompt_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    """A request; of decode cases, the steps of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a case took."""

    case: str
    kind: str
    tokens: int
    """Prompt tokens of a prefill, generated ones otherwise."""
    seconds: float
    """Ours, the median of the rounds."""
    tokens_per_s: float
    bytes_moved: float
    """Weights and KVCache that have to be read."""
    flops: float
    floor_seconds: float
    """The least it can take: bytes over the highest bandwidth, or FLOPs over the highest rate, measured here."""
    bound_by: Literal["bandwidth", "compute"]
    peer_seconds: float | None
    ratio: float | None
    """Median over the rounds of peer seconds over ours; above 1 we are faster."""
    ratio_low: float | None
    """Lowest of the rounds."""
    ratio_high: float | None
    rounds: int


def prefill_case(tokens: int, batch: int = 1) -> Case:
    """A batch of equal prompts up to their first token."""
    return Case(
        name=f"prefill {batch} x {tokens}",
        kind="prefill",
        prompt_tokens=(tokens,) * batch,
        new_tokens=(1,) * batch,
    )


def decode_case(batch: int, prompt_tokens: int, steps: int = 32) -> Case:
    """Steps of a batch of equal requests whose prompts are done."""
    return Case(
        name=f"decode {batch} at {prompt_tokens}",
        kind="decode",
        prompt_tokens=(prompt_tokens,) * batch,
        new_tokens=(steps + 1,) * batch,
    )


def mixed_case(requests: int = 64, *, seed: int = 0, scale: float = 1.0) -> Case:
    """A burst: prompts of 64 to 1024 tokens, outputs of 16 to 128, uniform; `scale` shrinks both."""
    rng = np.random.default_rng(seed)
    prompts = (rng.integers(64, 1025, requests) * scale).astype(int).clip(1)
    outputs = (rng.integers(16, 129, requests) * scale).astype(int).clip(1)
    return Case(
        name=f"mixed {requests} requests",
        kind="mixed",
        prompt_tokens=tuple(prompts.tolist()),
        new_tokens=tuple(outputs.tolist()),
    )


class Bench:
    """One model, the engine and its peers, ready to be timed. Mutable: its subjects hold caches.

    Args:
        shape: a name in `perf.MODELS`.
        dtype: float32 or bfloat16.
        device: cpu or cuda.
        cache_tokens: room in our KVCache.
        clock: gives seconds.
    """

    def __init__(
        self,
        shape: str,
        dtype: str = "float32",
        device: str = "cpu",
        *,
        cache_tokens: int = 131072,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        place, kind = torch.device(device), DTYPES[dtype]
        self.config: LlamaConfig = config_from_shape(model_shape(shape), max_positions=16384)
        weights = random_weights(self.config, device=place, dtype=kind)
        model = make_model(weights, choose_backend(place, kind))
        self.ours = our_engine(model, cache_tokens=cache_tokens)
        self._model = peer = hugging_face(weights)
        self._peers: Mapping[str, Subject] = MappingProxyType(
            {
                "hf": HuggingFaceGenerate(peer),
                "whole": our_engine(model, cache_tokens=8192, chunk_tokens=8192),
                "hf-continuous": HuggingFaceContinuous(
                    peer, {"num_blocks": -(-cache_tokens // 256), "max_batch_tokens": 512}
                ),
            }
        )
        self._clock = clock
        self._dtype = kind
        self._device = device
        self.peaks: Hardware = _peaks(device, clock, dry=self.config.width < 256)

    def compare(
        self, case: Case, peer: str, rounds: int = 5, *, seed: int = 0, warm_up: bool = True
    ) -> Comparison:
        """Time a case, ours and the peer's, after one round that does not count unless `warm_up` says no.

        Raises:
            ValueError: when there is no such peer.
        """
        if peer != "none" and peer not in self._peers:
            raise ValueError(f"unknown peer {peer!r}; allowed are {', '.join(self._peers)}, none")
        rng = np.random.default_rng(seed)
        prompts: Tokens = [rng.integers(0, self.config.vocabulary, count).tolist() for count in case.prompt_tokens]
        if case.kind == "decode" and peer in {"hf", "none"}:
            times = self._turns(case, prompts[0], peer, rounds)
        else:
            subjects: list[Subject] = [self.ours] if peer == "none" else [self.ours, self._peers[peer]]
            works = [partial(self._time, subject, case, prompts) for subject in subjects]
            times = [seconds[warm_up:] for seconds in alternate(works, range(-warm_up, rounds))]
        return comparison(case, times, self.config, self._dtype.itemsize, self.peaks)

    def _turns(self, case: Case, prompt: list[int], peer: str, rounds: int) -> list[list[float]]:
        """Seconds of every round, ours and perhaps theirs; one more goes before, to warm up."""
        batch, steps = len(case.new_tokens), case.new_tokens[0] - 1
        ours = OurDecoding(self.ours.engine, prompt, batch, (steps + 1) * (rounds + 1) + 2, self._clock)
        both: list[Decoding] = [ours]
        if peer == "hf":
            both.append(HuggingFaceDecoding(self._model, prompt, batch, self._clock))
        times = alternate([partial(each.turn, steps) for each in both], range(rounds + 1))
        ours.close()
        return [seconds[1:] for seconds in times]

    def _time(self, subject: Subject, case: Case, prompts: Tokens) -> float:
        whole = self._seconds(subject, prompts, case.new_tokens)
        if case.kind != "decode":
            return whole
        return whole - self._seconds(subject, prompts, (1,) * len(prompts))

    def _seconds(self, subject: Subject, prompts: Tokens, new_tokens: Sequence[int]) -> float:
        start = self._clock()
        found = subject.generate(prompts, new_tokens)
        seconds = self._clock() - start
        if [len(tokens) for tokens in found] != list(new_tokens):
            raise RuntimeError(f"{type(subject).__name__} did not generate the tokens it was asked for")
        return seconds


def comparison(
    case: Case, times: Sequence[Sequence[float]], config: LlamaConfig, bytes_per_element: int, peaks: Hardware
) -> Comparison:
    """What a case took, from seconds of our rounds, and of the peer's where there is one; and the floor."""
    seconds = float(np.median(times[0]))
    ratios = np.array(times[1]) / np.array(times[0]) if len(times) > 1 else None
    prefilled, generated = sum(case.prompt_tokens), sum(case.new_tokens)
    tokens = prefilled if case.kind == "prefill" else generated - len(case.new_tokens) * (case.kind == "decode")
    moved, flops = work_of(case, config, bytes_per_element)
    floor, bound = floor_seconds(moved, flops, rates_of(peaks, bytes_per_element))
    return Comparison(
        case=case.name,
        kind=case.kind,
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        bytes_moved=moved,
        flops=flops,
        floor_seconds=floor,
        bound_by=bound,
        peer_seconds=None if ratios is None else float(np.median(times[1])),
        ratio=None if ratios is None else float(np.median(ratios)),
        ratio_low=None if ratios is None else float(ratios.min()),
        ratio_high=None if ratios is None else float(ratios.max()),
        rounds=len(times[0]),
    )


def _peaks(device: str, clock: Callable[[], float], *, dry: bool) -> Hardware:
    """The machine's peaks; those of a dry run are quick, and not to be quoted."""
    if dry:
        return measure_peaks(device, side=256, copy_bytes=1 << 22, repeats=2, clock=clock)
    return measure_peaks(device, kernels=device == "cpu", clock=clock)


def work_of(case: Case, config: LlamaConfig, bytes_per_element: int) -> tuple[float, float]:
    """The bytes that a case has to read, and its FLOPs.

    Bytes: weights once a step, and each request's KVCache once a step that it decodes. FLOPs: the multiplications
    of linear operators and of causal attention. Steps are as few as the longest output allows.
    """
    weights = config.linear_parameters * bytes_per_element
    kv = config.kv_bytes_per_token(bytes_per_element)
    first = case.kind == "decode"
    steps = max(case.new_tokens) - first
    moved = float(steps * weights)
    flops = 0.0
    for prompt, new in zip(case.prompt_tokens, case.new_tokens, strict=True):
        decodes = new - 1
        moved += kv * (decodes * prompt + decodes * (decodes + 1) // 2)
        begin = prompt if first else 0
        tokens = prompt + decodes - begin
        pairs = ((prompt + decodes) * (prompt + decodes + 1) - begin * (begin + 1)) / 2
        head = config.vocabulary * config.width
        flops += 2.0 * (config.linear_parameters - head) * tokens + 2.0 * head * (new - first)
        flops += 4.0 * config.layers * config.query_width * pairs
    return moved, flops


def compared_with_all(rows: Sequence[Comparison], peaks: Hardware, bytes_per_element: int) -> list[Comparison]:
    """Comparisons of one model on one machine with the floors of `with_floors`."""
    about = {"threads": 0, "dtype": "one", "peaks": rates_of(peaks, bytes_per_element)._asdict()}
    floored = with_floors([asdict(row) | about for row in rows])
    return [
        replace(row, floor_seconds=found["floor_seconds"], bound_by=found["bound_by"])
        for row, found in zip(rows, floored, strict=True)
    ]


def table(rows: Sequence[Comparison]) -> str:
    """Comparisons as text, one a line."""
    lines = [f"{'case':<22}{'tokens/s':>10}{'ratio':>8}{'of rounds':>16}{'x floor':>9}  bound by"]
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        spread = "-" if row.ratio is None else f"{row.ratio_low:.2f} to {row.ratio_high:.2f}"
        over = row.seconds / row.floor_seconds
        lines.append(f"{row.case:<22}{row.tokens_per_s:>10.0f}{ratio:>8}{spread:>16}{over:>9.2f}  {row.bound_by}")
    return "\n".join(lines)


def report(rows: Sequence[Comparison], peaks: Hardware, device: str) -> dict[str, Any]:
    """Comparisons as plain values, with the machine, its peaks, how busy it was, and what was measured when."""
    return {
        "machine": str(describe_machine(device)),
        "device": device,
        "date": describe_machine(device).date,
        "commit": commit(),
        "load_average": list(os.getloadavg()),
        "peaks": {
            "float32_flops_per_s": peaks.float32_flops_per_s,
            "bfloat16_flops_per_s": peaks.bfloat16_flops_per_s,
            "bytes_per_s": peaks.device_memory_bytes_per_s,
        },
        "cases": [asdict(row) for row in rows],
    }
