"""What the model sees and when: loops until induction appears, then pairs without text, then ever longer text.

Without the first stage the model stayed at chance for as long as it was trained.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_lab.compression.lab import tasks as v
from mooncake_lab.compression.lab.tasks import (
    Context,
    Sample,
    Tokens,
    copy,
    loop,
    medley,
    needle,
    question_first,
    recall,
    topic_text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage: contexts of one length."""

    name: str
    length: int
    """Tokens of a context."""
    rows: int
    """Contexts of a step."""
    until: float
    """The stage ends when the running share of right answers passes this, within the two limits below."""
    at_least: int
    """Fewest steps of the stage."""
    at_most: int
    """Most steps of the stage."""


STAGES: Final = (
    Stage(name="loops", length=32, rows=24, until=0.9, at_least=50, at_most=4000),
    Stage(name="pairs", length=64, rows=16, until=0.9, at_least=50, at_most=1500),
    Stage(name="text-128", length=128, rows=12, until=0.85, at_least=150, at_most=600),
    Stage(name="text-256", length=256, rows=8, until=0.85, at_least=200, at_most=700),
    Stage(name="text-512", length=512, rows=4, until=0.9, at_least=300, at_most=900),
    Stage(name="text-1024", length=1056, rows=2, until=1.0, at_least=3300, at_most=3300),
)
"""The last one has a fixed number of steps, over which the learning rate falls to zero."""


_SHARES: Final = MappingProxyType(
    {"medley": 0.45, "recall": 0.3, "needle": 0.06, "copy": 0.06, "question_first": 0.08, "topic_text": 0.05}
)
"""How often each task is drawn in the stages with text."""
_SINGLE: Final = 0.4
"""Share of `recall` contexts with one question only, as in the examination; contexts of one pair come on top."""
_FIRST_SHARE: Final = 0.25
"""Least share of a context's loss that its first answer has: the next ones have an example just before them."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's contexts."""

    tokens: Tokens
    """Shape (rows, length)."""
    weights: npt.NDArray[np.float32]
    """Same shape: what each token counts as an answer that its context determines; a context's sum is 1 or 0."""
    recalls: npt.NDArray[np.bool_]
    """Same shape: the answers to key-value questions and needles among them, which the stages go by."""


def draw_batch(stage: Stage, context: Context) -> Batch:
    """One step's contexts of a stage; in three of ten steps with text, twice as many of half the length."""
    halves = stage.name.startswith("text") and context.rng.random() < 0.3
    rows, length = (2 * stage.rows, stage.length // 2) if halves else (stage.rows, stage.length)
    samples = [_draw(stage, length, context) for _ in range(rows)]
    tokens = np.stack([sample.tokens for sample in samples])
    weights: npt.NDArray[np.float32] = np.zeros(tokens.shape, dtype=np.float32)
    recalls: npt.NDArray[np.bool_] = np.zeros(tokens.shape, dtype=np.bool_)
    for row, sample in enumerate(samples):
        if sample.task == "topic_text":
            continue
        said = sum(asked.answer_tokens for asked in sample.questions)
        first = sample.questions[0].answer_tokens
        share = max(_FIRST_SHARE, first / said)
        for turn, asked in enumerate(sample.questions):
            where = slice(asked.answer_at, asked.answer_at + asked.answer_tokens)
            weights[row, where] = (1 - share) / (said - first) if turn else share / first
            recalls[row, where] = sample.task in {"recall", "needle", "medley"} or stage.name == "loops"
    return Batch(tokens, weights, recalls)


def _draw(stage: Stage, length: int, context: Context) -> Sample:
    if stage.name == "loops":
        return loop(context, length, period=int(context.rng.integers(3, 13)))
    if stage.name == "pairs":
        pairs = int(context.rng.integers(2, (length - 2) // 8 + 1))
        return recall(context, length, pairs=pairs, questions=pairs)
    most = min(32, (length - 16) // 12)
    task = str(context.rng.choice(list(_SHARES), p=list(_SHARES.values())))
    if task in {"recall", "medley"}:
        pairs = min(most, int(2 ** context.rng.integers(0, 6)))
        several = int(context.rng.integers(1, 13)) if context.rng.random() < 0.5 else pairs
        single = task == "recall" and context.rng.random() < _SINGLE
        asked = 1 if single else min(several, pairs, (length - 16 - 4 * pairs) // 12)
        gap = int(context.rng.integers(0, 9)) if context.rng.random() < 0.5 else 0
        draw = recall if task == "recall" else medley
        return draw(context, length, pairs=pairs, questions=asked, gap=gap)
    others = {"needle": needle, "copy": copy, "topic_text": topic_text}
    if task in others:
        return others[task](context, length)
    return question_first(context, length, pairs=min(most, 8))


def rng_of(seed: int, step: int) -> np.random.Generator:
    """What a step's contexts are drawn with: the same after an interruption as without."""
    return np.random.default_rng([seed, step, v.VOCABULARY])
