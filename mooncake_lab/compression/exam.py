"""The examination: is the answer right, when only part of the cache is left?

Greedy generation gives the right answer exactly when, with the right tokens fed back, every next token is right;
so one pass over question and answer decides, and no decoding loop is needed.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mooncake_lab.compression.held import Held
from mooncake_lab.compression.questions import EXAMINED, Context, Sample, Tokens, filler, rng_of
from mooncake_lab.compression.session import Method, PrefillMethod, Session

When = Literal["asked", "later", "turn"]
"""When the cache is made smaller: after the question, before it, or after an earlier one, as in a dialogue."""
Make = Callable[[Sample], Method]
"""Makes a method for a sample; only an oracle looks at it."""

_EXAM_SEED, _POOL_BYTES = 9_000_000, 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamMark:
    """What one method made of one question."""

    right: bool
    """Whether every token of the answer was the likeliest."""
    device_bytes: int
    """Bytes of the compressed context, before question and answer are added; whole blocks."""
    host_bytes: int


def exam(task: str, prompts: int, *, seed: int = 0, length: int = 1024) -> list[Sample]:
    """Samples that training never saw: filler and records come from other seeds.

    Raises:
        ValueError: when there is no such task.
    """
    if task not in EXAMINED:
        raise ValueError(f"no task {task!r}; there are {', '.join(EXAMINED)}")
    rng = rng_of(_EXAM_SEED + seed, list(EXAMINED).index(task))
    context = Context(rng, filler(rng, max(_POOL_BYTES, 4 * length)))
    return [EXAMINED[task](context, length) for _ in range(prompts)]


def marks(
    session: Session, sample: Sample, methods: Mapping[str, Make], *, when: When = "asked"
) -> dict[str, ExamMark]:
    """What each method makes of a sample's last question.

    Args:
        session: the model.
        sample: a context and its questions.
        methods: by name.
        when: at which moment the cache is made smaller.
    """
    last, first = sample.questions[-1], sample.questions[0]
    compress_at = {"asked": last.answer_at, "later": last.asked_at, "turn": first.answer_at}[when]
    prompt, end = sample.tokens[:compress_at], last.answer_at + last.answer_tokens
    rest, answer = sample.tokens[compress_at : end - 1], sample.tokens[last.answer_at : end]
    made = {name: make(sample) for name, make in methods.items()}
    whole = session.prefill(prompt, window=max((method.window for method in made.values()), default=0))
    held: dict[str, Held] = {}
    opinions: dict[str, torch.Tensor] = {}
    for name, method in made.items():
        prefilled = method.prefill(session.plain, prompt) if isinstance(method, PrefillMethod) else whole
        held[name], opinions[name] = session.hold(prefilled, method), prefilled.logits
    sizes = {name: (each.device_bytes, each.host_bytes) for name, each in held.items()}
    right = _right(session, held, opinions, rest, answer)
    for each in held.values():
        each.release()
    return {
        name: ExamMark(right=right[name], device_bytes=device, host_bytes=host)
        for name, (device, host) in sizes.items()
    }


def _right(
    session: Session, held: Mapping[str, Held], opinions: Mapping[str, torch.Tensor], rest: Tokens, answer: Tokens
) -> dict[str, bool]:
    """Whether each cache predicts the whole answer; caches of one kind go through the model together."""
    kinds: dict[tuple[type, ...], list[str]] = defaultdict(list)
    for name, each in held.items():
        kinds[tuple(type(layer) for layer in each.layers)].append(name)
    right: dict[str, bool] = {}
    for names in kinds.values():
        tokens = np.tile(rest, (len(names), 1))
        logits = session.extend([held[name] for name in names], tokens, every=True)
        for name, row in zip(names, logits.argmax(dim=-1).view(len(names), -1), strict=True):
            said = torch.cat((opinions[name].argmax()[None], row)).cpu().numpy()
            right[name] = bool((said[-len(answer) :] == answer).all())
    return right
