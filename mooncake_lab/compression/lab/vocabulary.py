"""The tokens of the lab's model: bytes for text, and names for keys, values, topics and commands."""

from collections.abc import Iterable
from typing import Final

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
