"""Filler: sentences about a machine room, drawn from word lists that every machine has."""

from typing import Final

import numpy as np
import numpy.typing as npt

_THINGS: Final = [
    "scheduler",
    "cache",
    "block",
    "queue",
    "node",
    "prompt",
    "token",
    "layer",
    "worker",
    "request",
    "cluster",
    "buffer",
    "kernel",
    "tensor",
    "index",
    "trace",
    "client",
    "server",
    "batch",
    "page",
    "prefix",
    "answer",
    "window",
    "budget",
    "link",
    "switch",
    "fan",
    "rack",
    "disk",
    "cable",
    "clock",
    "meter",
    "lamp",
    "door",
    "shelf",
    "note",
    "table",
    "map",
    "letter",
    "engine",
    "garden",
    "river",
    "bridge",
    "station",
    "market",
    "harbour",
    "valley",
    "winter",
    "morning",
    "summer",
    "student",
    "teacher",
    "painter",
    "baker",
    "doctor",
    "pilot",
    "captain",
    "miller",
    "gardener",
    "sailor",
    "clerk",
    "guard",
    "guest",
    "neighbour",
    "cousin",
]
_QUALITIES: Final = [
    "warm",
    "cold",
    "old",
    "new",
    "small",
    "large",
    "quick",
    "slow",
    "quiet",
    "loud",
    "bright",
    "dark",
    "early",
    "late",
    "simple",
    "strange",
    "heavy",
    "light",
    "narrow",
    "wide",
    "empty",
    "full",
    "busy",
    "idle",
    "round",
    "flat",
    "green",
    "blue",
    "grey",
    "gentle",
    "careful",
    "patient",
    "hungry",
    "honest",
    "distant",
    "local",
]
_DOINGS: Final = [
    "keeps",
    "moves",
    "holds",
    "reads",
    "writes",
    "finds",
    "loses",
    "sends",
    "takes",
    "counts",
    "checks",
    "opens",
    "closes",
    "follows",
    "leaves",
    "meets",
    "carries",
    "measures",
    "repairs",
    "paints",
    "watches",
    "passes",
    "shares",
    "copies",
    "sorts",
    "fills",
    "clears",
    "warms",
    "cools",
    "turns",
    "calls",
    "remembers",
]
_PLACES: Final = (
    "near",
    "behind",
    "above",
    "under",
    "beside",
    "before",
    "after",
    "without",
    "with",
    "for",
    "from",
)
_MANNERS: Final = ("again", "slowly", "at once", "every day", "in time", "by hand", "twice", "as planned", "alone")
_JOINS: Final = (", and ", ", but ", "; then ", ", while ", ". ", ". ", ". ", ". ")


def filler(rng: np.random.Generator, length: int) -> npt.NDArray[np.int64]:
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


def _pick(rng: np.random.Generator, words: "tuple[str, ...] | list[str]") -> str:
    return words[int(rng.integers(len(words)))]
