"""Questions about a context: what is asked, what the answer is, and where in the context it lies.

A context is filler text with records scattered in it. Every maker below draws one `Sample`: tokens, the first
place of every answer and its length, and the places of what the answer rests on (which only an oracle knows).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

BYTES: Final = 256
KEYS: Final = 64
VALUES: Final = 64
ENDINGS: Final = 64
TOPICS: Final = 8
FIRST_KEY: Final = BYTES
FIRST_VALUE: Final = FIRST_KEY + KEYS
FIRST_ENDING: Final = FIRST_VALUE + VALUES
FIRST_TOPIC: Final = FIRST_ENDING + ENDINGS
_COMMANDS: Final = ("BEGIN", "SET", "GET", "NEEDLE", "ASK", "COPY", "PASTE", "WANT", "ANSWER", "GEN", "END")
_FIRST_COMMAND: Final = FIRST_TOPIC + TOPICS
BEGIN, SET, GET, NEEDLE, ASK, COPY, PASTE, WANT, ANSWER, GEN, END = range(
    _FIRST_COMMAND, _FIRST_COMMAND + len(_COMMANDS)
)
VOCABULARY: Final = 480
"""A multiple of 32: the last few are never used."""


def readable(tokens: Iterable[int]) -> str:
    """Tokens as text: bytes as they are, everything else by name in brackets."""
    return "".join(_name(int(token)) for token in tokens)


def _name(token: int) -> str:
    if token < FIRST_KEY:
        return chr(token)
    for first, letter, next_first in (
        (FIRST_KEY, "k", FIRST_VALUE),
        (FIRST_VALUE, "v", FIRST_ENDING),
        (FIRST_ENDING, "w", FIRST_TOPIC),
    ):
        if token < next_first:
            return f"[{letter}{token - first}]"
    if token < _FIRST_COMMAND:
        return f"[topic {token - FIRST_TOPIC}]"
    place = token - _FIRST_COMMAND
    return f"[{_COMMANDS[place]}]" if place < len(_COMMANDS) else f"[unused {token}]"


Tokens = npt.NDArray[np.int64]
"""Token ids, shape (n,)."""

NEEDLE_TOKENS: Final = 4
VALUE_TOKENS: Final = 2
"""A value and its ending: the first token of an answer comes out of prefill, the second out of the cache."""
COPY_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a sample."""

    asked_at: int
    """Where its first token is; tokens before it are what an earlier turn has seen."""
    answer_at: int
    """Where its answer begins: the tokens before it are the prompt."""
    answer_tokens: int
    evidence: tuple[int, ...]
    """Places of the context that the answer rests on."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A context and its questions, answers included."""

    task: str
    tokens: Tokens
    questions: tuple[Question, ...]

    def prompt(self, question: int = 0) -> Tokens:
        """What a model sees before the answer to a question."""
        return self.tokens[: self.questions[question].answer_at]

    def answer(self, question: int = 0) -> Tokens:
        """What it should say then."""
        asked = self.questions[question]
        return self.tokens[asked.answer_at : asked.answer_at + asked.answer_tokens]


@dataclass(frozen=True, slots=True)
class Context:
    """Where everything of a sample comes from: a source of randomness and a pool of filler."""

    rng: np.random.Generator
    pool: Tokens

    def text(self, length: int) -> Tokens:
        """A stretch of filler."""
        start = int(self.rng.integers(len(self.pool) - length))
        return self.pool[start : start + length]

    def scatter(self, length: int, records: Sequence[Tokens]) -> tuple[Tokens, list[int]]:
        """Exactly `length` tokens: filler with the records in it, in order, at random places; where each begins.

        Raises:
            ValueError: when the records alone are longer.
        """
        room = length - 1 - sum(len(record) for record in records)
        if room < 0:
            raise ValueError(f"{len(records)} records of {length - 1 - room} tokens do not fit into {length}")
        cuts = np.sort(self.rng.integers(0, room + 1, size=len(records)))
        text = self.text(room)
        parts: list[Tokens] = [np.array([BEGIN])]
        places: list[int] = []
        done, size = 0, 1
        for cut, record in zip(cuts.tolist(), records, strict=True):
            parts += [text[done:cut], record]
            places.append(size + cut - done)
            size += cut - done + len(record)
            done = cut
        return np.concatenate([*parts, text[done:]]), places

    def distinct(self, first: int, among: int, count: int) -> Tokens:
        """Draw `count` different tokens of one kind."""
        return first + self.rng.choice(among, size=count, replace=False)


def recall(context: Context, length: int, *, pairs: int, questions: int, gap: int = 0) -> Sample:
    """`[SET] key value ending` records in filler, then `[GET] key value ending`, each about another pair.

    Args:
        context: randomness and filler.
        length: tokens of all, answers included.
        pairs: records.
        questions: at the end; at most `pairs`.
        gap: filler between one answer and the next question.
    """
    records = draw_records(context, pairs)
    asked = context.rng.permutation(pairs)[:questions]
    start = length - (2 + VALUE_TOKENS) * questions - gap * (questions - 1)
    body, places = context.scatter(start, records)
    parts, found = [body], []
    for turn, pair in enumerate(asked.tolist()):
        if turn and gap:
            parts.append(context.text(gap))
            start += gap
        parts.append(np.concatenate([[GET], records[pair][1:]]))
        evidence = tuple(range(places[pair], places[pair] + len(records[pair])))
        found.append(Question(start, start + 2, VALUE_TOKENS, evidence))
        start += 2 + VALUE_TOKENS
    return Sample("recall", np.concatenate(parts), tuple(found))


def needle(context: Context, length: int, *, depth: float | None = None) -> Sample:
    """One `[NEEDLE]` and four values in filler; `[ASK]` at the end wants the four back.

    Args:
        context: randomness and filler.
        length: tokens of all, the answer included.
        depth: how far down the context it lies (0 to 1); None draws it.
    """
    secret = context.distinct(FIRST_VALUE, VALUES, NEEDLE_TOKENS)
    size = 1 + NEEDLE_TOKENS
    room = length - 1 - 2 * size
    at = int(context.rng.integers(room + 1)) if depth is None else round(depth * room)
    text = context.text(room)
    record = np.concatenate([[NEEDLE], secret])
    tokens = np.concatenate([[BEGIN], text[:at], record, text[at:], [ASK], secret])
    asked = Question(length - size, length - NEEDLE_TOKENS, NEEDLE_TOKENS, tuple(range(1 + at, 1 + at + size)))
    return Sample("needle", tokens, (asked,))


def copy(context: Context, length: int, *, span: int = COPY_TOKENS) -> Sample:
    """`[COPY]` and random bytes, keys and values in filler; `[PASTE]` wants them all back, in order."""
    what = context.rng.integers(FIRST_TOPIC, size=span)
    record = np.concatenate([[COPY], what])
    body, (at,) = context.scatter(length - 1 - span, [record])
    asked = Question(length - 1 - span, length - span, span, tuple(range(at, at + span + 1)))
    return Sample("copy", np.concatenate([body, [PASTE], what]), (asked,))


def question_first(context: Context, length: int, *, pairs: int) -> Sample:
    """`[WANT] key` before everything, the records after it, and only `[ANSWER]` at the end.

    The answer repeats the key before value and ending: nothing behind the records says which one is wanted.
    """
    records = draw_records(context, pairs)
    wanted = int(context.rng.integers(pairs))
    start = length - 2 - VALUE_TOKENS
    body, places = context.scatter(start - 2, records)
    record = records[wanted]
    tokens = np.concatenate([body[:1], [WANT], record[1:2], body[1:], [ANSWER], record[1:]])
    at = places[wanted] + 2
    asked = Question(start, start + 1, 1 + VALUE_TOKENS, (1, 2, *range(at, at + len(record))))
    return Sample("question_first", tokens, (asked,))


def draw_records(context: Context, pairs: int) -> list[Tokens]:
    """`[SET] key value ending`: keys differ, and so do values."""
    keys = context.distinct(FIRST_KEY, KEYS, pairs)
    values = context.distinct(FIRST_VALUE, VALUES, pairs)
    endings = FIRST_ENDING + context.rng.integers(ENDINGS, size=pairs)
    return [np.array([SET, *record]) for record in zip(keys, values, endings, strict=True)]


Maker = Callable[[Context, int], Sample]
"""Draws a sample of a length."""

EXAMINED: Final[Mapping[str, Maker]] = MappingProxyType(
    {
        "recall": lambda context, length: recall(context, length, pairs=16, questions=1),
        "needle": needle,
        "two_questions": lambda context, length: recall(context, length, pairs=16, questions=2, gap=24),
        "one_pair": lambda context, length: recall(context, length, pairs=1, questions=1),
        "copy": copy,
        "question_first": lambda context, length: question_first(context, length, pairs=8),
    }
)
"""The examination: what the trained model is asked, and what compression may break."""


def rng_of(seed: int, step: int) -> np.random.Generator:
    """What the contexts of a training step or of an examination are drawn with."""
    return np.random.default_rng([seed, step, VOCABULARY])


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_THINGS: Final = _words("""
    scheduler cache block queue node prompt token layer worker request cluster buffer kernel tensor index trace
    client server batch page prefix answer window budget link switch fan rack disk cable clock meter lamp door
    shelf note table map letter engine garden river bridge station market harbour valley winter morning summer
    student teacher painter baker doctor pilot captain miller gardener sailor clerk guard guest neighbour cousin
""")
_QUALITIES: Final = _words("""
    warm cold old new small large quick slow quiet loud bright dark early late simple strange heavy light narrow
    wide empty full busy idle round flat green blue grey gentle careful patient hungry honest distant local
""")
_DOINGS: Final = _words("""
    keeps moves holds reads writes finds loses sends takes counts checks opens closes follows leaves meets
    carries measures repairs paints watches passes shares copies sorts fills clears warms cools turns calls
    remembers
""")
_PLACES: Final = _words("""
    near behind above under beside before after without with for from
""")
_MANNERS: Final = ("again", "slowly", "at once", "every day", "in time", "by hand", "twice", "as planned", "alone")
_JOINS: Final = (", and ", ", but ", "; then ", ", while ", ". ", ". ", ". ", ". ")


def filler(rng: np.random.Generator, length: int) -> Tokens:
    """At least `length` bytes of sentences, cut to exactly that: token ids below 256.

    Args:
        rng: what it is drawn with.
        length: bytes.
    """
    parts: list[str] = []
    size = 0
    while size < length:
        part = _clause(rng) + _pick(rng, _JOINS)
        parts.append(part)
        size += len(part)
    return np.frombuffer("".join(parts).encode()[:length], dtype=np.uint8).astype(np.int64)


def _clause(rng: np.random.Generator) -> str:
    clause = f"{_noun(rng)} {_pick(rng, _DOINGS)} {_noun(rng)}"
    if rng.random() < 0.5:
        clause += f" {_pick(rng, _PLACES)} {_noun(rng)}"
    if rng.random() < 0.3:
        clause += f" {_pick(rng, _MANNERS)}"
    return clause


def _noun(rng: np.random.Generator) -> str:
    article = _pick(rng, ("the", "the", "a", "one", "this", "their"))
    quality = f" {_pick(rng, _QUALITIES)}" if rng.random() < 0.6 else ""
    return f"{article}{quality} {_pick(rng, _THINGS)}"


def _pick(rng: np.random.Generator, words: Sequence[str]) -> str:
    return words[int(rng.integers(len(words)))]
