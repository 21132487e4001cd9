"""Speed beside peers: rounds in which all take turns, and medians of ratios.

All get the same weights and prompts and must generate the same number of tokens. Each round runs all of them, in
alternating order, so that a busy machine slows all; a ratio is taken within a round. One case has one number of
ours, whichever peers it is compared with.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from mooncake_lab.bench.peers import (
    HuggingFaceGenerate,
    OurEngine,
    ReusingSubject,
    Subject,
    Tokens,
    hugging_face,
    our_engine,
)
from mooncake_lab.bench.rounds import Rounds, alternating_rounds, same
from mooncake_lab.engine.backends import choose_backend
from mooncake_lab.engine.config import LlamaConfig, config_from_shape
from mooncake_lab.engine.loading import DTYPES
from mooncake_lab.engine.model import make_model
from mooncake_lab.engine.reference import Clock
from mooncake_lab.engine.weights import LlamaWeights, random_weights
from mooncake_lab.perf import model_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload to be timed."""

    name: str
    kind: Literal["prefill", "decode", "mixed", "reuse"]
    prompt_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    """A request; of decode cases, the steps of a round."""
    reused_tokens: int = 0
    """First tokens of the prompt that were computed before; more than none in a case of reuse."""

    @property
    def tokens(self) -> int:
        """Prompt tokens of a prefill, without reused ones; of other cases the tokens generated in the time."""
        if self.kind in {"prefill", "reuse"}:
            return sum(self.prompt_tokens) - self.reused_tokens
        return sum(self.new_tokens) - len(self.new_tokens) * (self.kind == "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a case took, ours and a peer's."""

    case: str
    kind: str
    peer: str
    tokens: int
    """As `Case.tokens`."""
    seconds: float
    """Ours, the median of the rounds."""
    tokens_per_s: float
    peer_seconds: float
    ratio: float
    """Median over the rounds of peer seconds over ours; above 1 we are faster."""
    ratio_low: float
    """Lowest of the rounds."""
    ratio_high: float
    rounds: int
    compared_tokens: int
    """Tokens of the first request that both generated; 0 unless the case is a decode."""
    same_tokens: int
    """How many of them are equal before the first that differs."""


def prefill_case(tokens: int) -> Case:
    """A prompt up to its first token."""
    return Case(name=f"prefill 1 x {tokens}", kind="prefill", prompt_tokens=(tokens,), new_tokens=(1,))


def reuse_case(tokens: int, reused_tokens: int) -> Case:
    """A prompt up to its first token, whose first tokens another request has just computed."""
    return Case(
        name=f"prefill 1 x {tokens}, {reused_tokens} of them reused",
        kind="reuse",
        prompt_tokens=(tokens,),
        new_tokens=(1,),
        reused_tokens=reused_tokens,
    )


def decode_case(batch: int, prompt_tokens: int, steps: int) -> Case:
    """Steps of a batch of equal requests whose prompts are done."""
    return Case(
        name=f"decode {batch} at {prompt_tokens}",
        kind="decode",
        prompt_tokens=(prompt_tokens,) * batch,
        new_tokens=(steps + 1,) * batch,
    )


def mixed_case(requests: int, *, seed: int = 0, scale: float = 1.0) -> Case:
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
    """One model, our engine and its peers, ready to be timed. Mutable: they hold caches, and peers may be added.

    Args:
        shape: a name in `perf.MODELS`.
        dtype: float32 or bfloat16.
        cache_tokens: room in our KVCache.
        clock: gives seconds.
    """

    def __init__(
        self, shape: str, dtype: str = "float32", *, cache_tokens: int, clock: Clock = time.perf_counter
    ) -> None:
        cpu, kind = torch.device("cpu"), DTYPES[dtype]
        self.config: LlamaConfig = config_from_shape(model_shape(shape), max_positions=16384)
        self.weights: LlamaWeights = random_weights(self.config, device=cpu, dtype=kind)
        self._model = make_model(self.weights, choose_backend(cpu, kind))
        self.ours: OurEngine = our_engine(self._model, cache_tokens=cache_tokens)
        self.transformers = hugging_face(self.weights)
        self.peers: dict[str, Subject] = {"hf": HuggingFaceGenerate(self.transformers)}
        self._clock = clock

    def compare(
        self, case: Case, peers: Sequence[str], rounds: int, *, seed: int = 0, warm_up: bool = True
    ) -> list[Comparison]:
        """Time a case, ours and the peers', after one round that does not count unless `warm_up` says no.

        Raises:
            TypeError: when a peer of a case of reuse reuses nothing.
        """
        rng = np.random.default_rng(seed)
        prompts: Tokens = [rng.integers(0, self.config.vocabulary, count).tolist() for count in case.prompt_tokens]
        subjects = [self.ours, *(self.peers[name] for name in peers)]
        extra = 1 if warm_up else 0
        if case.kind == "decode":
            taken, tokens = self._decodes(case, prompts[0], subjects, rounds, extra)
        else:
            works = [partial(each.seconds, prompts, case.new_tokens, self._clock) for each in subjects]
            if case.kind == "reuse":
                ours = our_engine(self._model, cache_tokens=2 * case.prompt_tokens[0], prefix_caching=True)
                reusing = [ours, *map(_reusing, subjects[1:])]
                works = [partial(each.reuse_s, prompts[0], case.reused_tokens, self._clock) for each in reusing]
            taken, tokens = _in_rounds(works, rounds, extra), [list[int]() for _ in subjects]
        return [
            _comparison(case, name, taken, index, tokens[0], tokens[index])
            for index, name in enumerate(peers, start=1)
        ]

    def _decodes(
        self, case: Case, prompt: list[int], subjects: Sequence[Subject], rounds: int, warm_up: int
    ) -> tuple[Rounds[int], list[list[int]]]:
        """The rounds, and the tokens of the first request of each subject."""
        batch, steps = len(case.new_tokens), case.new_tokens[0] - 1
        most_tokens = (steps + 1) * (warm_up + rounds) + 2
        with ExitStack() as open_ones:
            decodings = [
                open_ones.enter_context(closing(each.decoding(prompt, batch, most_tokens, self._clock)))
                for each in subjects
            ]
            taken = _in_rounds([partial(each.turn, steps) for each in decodings], rounds, warm_up)
            return taken, [list(each.tokens) for each in decodings]


def _in_rounds(works: Sequence[Callable[[], float]], rounds: int, warm_up: int) -> Rounds[int]:
    """Ours is 0, and the peers are the others."""
    return alternating_rounds(dict(enumerate(map(same, works))), rounds, warm_up=warm_up)


def _reusing(subject: Subject) -> ReusingSubject:
    if not isinstance(subject, ReusingSubject):
        raise TypeError(f"{type(subject).__name__} reuses no prefixes; leave it out of a case of reuse")
    return subject


def _comparison(
    case: Case,
    peer: str,
    taken: Rounds[int],
    index: int,
    our_tokens: Sequence[int],
    their_tokens: Sequence[int],
) -> Comparison:
    seconds, ratio = taken.median_s(0), taken.ratio(index, 0)
    differ = (i for i, pair in enumerate(zip(our_tokens, their_tokens, strict=True)) if pair[0] != pair[1])
    return Comparison(
        case=case.name,
        kind=case.kind,
        peer=peer,
        tokens=case.tokens,
        seconds=seconds,
        tokens_per_s=case.tokens / seconds,
        peer_seconds=taken.median_s(index),
        ratio=ratio.median,
        ratio_low=ratio.least,
        ratio_high=ratio.most,
        rounds=len(taken.seconds[0]),
        compared_tokens=len(our_tokens),
        same_tokens=next(differ, len(our_tokens)),
    )
