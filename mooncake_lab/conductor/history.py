"""The history of a cluster as views show it: lengths of finished answers and results of the last double checks.

It is built from the records of the run log, so the simulated and the live cluster have the same history. It
contains nothing of the future: the length of a running answer stays unknown.
"""

from collections import deque
from dataclasses import dataclass, field
from math import log2
from operator import add
from typing import Final, NamedTuple

import msgspec

from mooncake_lab.core import Arrived, Finished, FirstToken, Rejected

PROMPT_CLASSES = 18
"""Prompts up to 1, 2, 4, ... tokens; the last class is open."""
ANSWER_CLASSES = 32
"""Answers up to 1, 1.4, 2, 2.8, ... tokens; the last class is open."""
_ONE_ANSWER: Final = tuple((1,) * (k + 1) + (0,) * (ANSWER_CLASSES - k) for k in range(ANSWER_CLASSES + 1))
"""What one answer of class `k` adds to a row."""
LEAST_SEEN = 16
"""Answers that a class of prompts needs before its own counts are used; until then those of all prompts are."""


class LengthHistogram(NamedTuple):
    """Counts of finished answers longer than each class boundary, by class of prompt; the last row has them all.

    The classes of prompts are powers of two, and those of answers powers of the square root of two. A histogram is
    a value: each answer makes a new one. `longer[i][k]` counts the answers to prompts of class `i` of more than
    `2 ** (k / 2)` tokens, after a first entry at `k = -1`, all of them.
    """

    longer: tuple[tuple[int, ...], ...] = tuple((0,) * (ANSWER_CLASSES + 1) for _ in range(PROMPT_CLASSES + 1))

    def with_answer(self, input_tokens: int, output_tokens: int) -> "LengthHistogram":
        """The histogram with one more answer."""
        k = 0 if output_tokens <= 1 else min(ANSWER_CLASSES, int(2 * log2(output_tokens) - 1e-9) + 1)
        rows = list(self.longer)
        for i in (_prompt_class(input_tokens), PROMPT_CLASSES):
            rows[i] = tuple(map(add, rows[i], _ONE_ANSWER[k]))  # runs once per answer in every simulation
        return LengthHistogram(tuple(rows))


def share_longer(histogram: LengthHistogram, input_tokens: int, *, beyond: float, given: float = 0.0) -> float:
    """The share of answers longer than `beyond` tokens among those longer than `given`, for similar prompts.

    Between class boundaries the count is interpolated over the logarithm of the length. If no answer of that
    length was counted, no request is expected to leave, and the share is 1, as it is where `given` is the larger.
    """
    row = histogram.longer[_prompt_class(input_tokens)]
    if row[0] < LEAST_SEEN:
        row = histogram.longer[PROMPT_CLASSES]
    among = _longer(row, given)
    return _longer(row, max(beyond, given)) / among if among else 1.0


def _prompt_class(input_tokens: int) -> int:
    return min(PROMPT_CLASSES - 1, (input_tokens - 1).bit_length())


def _longer(row: tuple[int, ...], tokens: float) -> float:
    """Answers longer than a number of tokens, interpolated between class boundaries."""
    place = min(tokens if tokens < 1 else 2 * log2(tokens) + 1, ANSWER_CLASSES)
    k = min(int(place), ANSWER_CLASSES - 1)
    return row[k] + (row[k + 1] - row[k]) * (place - k)


class RecentView(msgspec.Struct, frozen=True, gc=False):
    """The requests that reached a decode instance recently."""

    period_s: float = 60.0
    received: int = 0
    """Requests whose KVCache arrived in the last `period_s` seconds."""
    refused: int = 0
    """Those that failed the double check, so that their prefill was wasted."""


@dataclass(slots=True, eq=False)
class History:
    """What views show of the past. Mutable: it grows with the log; policies have no memory of their own."""

    period_s: float = 60.0
    """The period over which a view counts double checks."""
    learns_lengths: bool = True
    """Whether it counts the lengths of answers: it need not where no policy asks for them."""
    lengths: LengthHistogram = field(default_factory=LengthHistogram)
    _input_tokens: dict[int, int] = field(default_factory=dict)
    _checks: deque[tuple[float, int]] = field(default_factory=deque)  # time and request
    _refused: set[int] = field(default_factory=set)  # requests whose check failed
    _shown: set[int] = field(default_factory=set)  # requests in flight whose first token was shown

    def note(self, record: Arrived | FirstToken | Finished | Rejected) -> None:
        """Learn from one record of the log; views show nothing of the other kinds."""
        match record:
            case Arrived():
                if self.learns_lengths:
                    self._input_tokens[record.request_id] = record.input_tokens
            case Finished():
                self._shown.discard(record.request_id)
                prompt_tokens = self._input_tokens.pop(record.request_id, None)
                if prompt_tokens is not None:  # its arrival may lie before the first record that was read
                    self.lengths = self.lengths.with_answer(prompt_tokens, record.output_tokens)
            case FirstToken():
                self._checks.append((record.at_s, record.request_id))
                self._shown.add(record.request_id)
            case Rejected():
                self._input_tokens.pop(record.request_id, None)
                if record.stage == "decode":
                    self._fail(record)
                self._shown.discard(record.request_id)

    def recent(self, now_s: float) -> RecentView:
        """The double checks of the last period."""
        while self._checks and self._checks[0][0] <= now_s - self.period_s:
            self._refused.discard(self._checks.popleft()[1])
        return RecentView(self.period_s, len(self._checks), len(self._refused))

    def _fail(self, record: Rejected) -> None:
        """Record a failed double check; where prefill shows first tokens, it was recorded as passed before."""
        if record.request_id in self._shown:
            passed = next((check for check in reversed(self._checks) if check[1] == record.request_id), None)
            if passed is not None:
                self._checks.remove(passed)
        self._checks.append((record.at_s, record.request_id))
        self._refused.add(record.request_id)
