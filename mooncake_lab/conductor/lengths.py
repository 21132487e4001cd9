"""What finished requests teach about the length of answers: counts, kept by the cluster and shown in its views.

A request's future stays unknown: only answers that have ended are counted. Prompts and answers are sorted
by powers of two and of the square root of two; a book of counts is a value, and a new one is made for each answer.
"""

from math import log2
from operator import add
from typing import Final, NamedTuple

PROMPT_CLASSES = 18
"""Prompts up to 1, 2, 4, ... tokens; the last class is open."""
ANSWER_CLASSES = 32
"""Answers up to 1, 1.4, 2, 2.8, ... tokens; the last class is open."""
_LONGEST_TOLD_APART = 2 ** ((ANSWER_CLASSES - 1) / 2)
_ONE_ANSWER: Final = tuple((1,) * (k + 1) + (0,) * (ANSWER_CLASSES - k) for k in range(ANSWER_CLASSES + 1))
"""What one answer of class `k` adds to a row."""
LEAST_SEEN = 16
"""Answers that a class of prompts must have seen before it speaks for itself; until then all prompts do."""


class LengthBook(NamedTuple):
    """How many finished answers were longer than each class boundary, by class of prompt; the last row is all.

    `longer[i][k]` counts the answers to prompts of class `i` of more than `2 ** (k / 2)` tokens, after a first
    entry at `k = -1`, all of them.
    """

    longer: tuple[tuple[int, ...], ...] = tuple((0,) * (ANSWER_CLASSES + 1) for _ in range(PROMPT_CLASSES + 1))

    def with_answer(self, input_tokens: int, output_tokens: int) -> "LengthBook":
        """The book after one more answer."""
        k = 0 if output_tokens <= 1 else min(ANSWER_CLASSES, int(2 * log2(output_tokens) - 1e-9) + 1)
        rows = list(self.longer)
        for i in (_prompt_class(input_tokens), PROMPT_CLASSES):
            rows[i] = tuple(map(add, rows[i], _ONE_ANSWER[k]))  # once an answer in every simulation
        return LengthBook(tuple(rows))


def share_longer(book: LengthBook, input_tokens: int, *, beyond: float, given: float = 0.0) -> float:
    """The share of answers longer than `beyond` tokens among those longer than `given`, for similar prompts.

    Between class boundaries the count is interpolated over the logarithm of the length. With nothing seen, or
    nothing that long, nobody is expected to leave: the share is 1.

    Args:
        book: what was learned.
        input_tokens: of the prompt.
        beyond: tokens; below `given` the share is 1.
        given: tokens that this answer has already.
    """
    row = book.longer[_prompt_class(input_tokens)]
    if row[0] < LEAST_SEEN:
        row = book.longer[PROMPT_CLASSES]
    among = _longer(row, given)
    return 1.0 if among <= 0 or beyond <= given else _longer(row, beyond) / among


def _prompt_class(input_tokens: int) -> int:
    return min(PROMPT_CLASSES - 1, (input_tokens - 1).bit_length())


def _longer(row: tuple[int, ...], tokens: float) -> float:
    """Answers of more than so many tokens, interpolated."""
    if tokens <= 1:
        return row[0] + (row[1] - row[0]) * max(0.0, tokens)
    if tokens >= _LONGEST_TOLD_APART:
        return float(row[ANSWER_CLASSES])
    place = 2 * log2(tokens) + 1
    k = int(place)
    return row[k] + (row[k + 1] - row[k]) * (place - k)
