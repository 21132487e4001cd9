"""The history of a cluster as views show it; policies have no memory of their own.

It is built from the records of the run log, so the simulated and the live cluster have the same history, and it
contains nothing of the future.
"""

from collections import deque
from dataclasses import dataclass, field

from mooncake_lab.conductor.lengths import LengthHistogram
from mooncake_lab.conductor.view import RecentView
from mooncake_lab.core import Arrived, DecodeStretch, Finished, FirstToken, Record, Rejected


@dataclass(slots=True, eq=False)
class History:
    """Lengths of finished answers and results of the last double checks. Mutable: it grows with the log."""

    window_s: float = 60.0
    """The period over which a view counts double checks."""
    lengths: LengthHistogram = field(default_factory=LengthHistogram)
    _input_tokens: dict[int, int] = field(default_factory=dict)
    _checks: deque[tuple[float, int]] = field(default_factory=deque)  # time and request
    _refused: set[int] = field(default_factory=set)  # requests whose check failed
    _shown: set[int] = field(default_factory=set)  # requests in flight whose first token was shown

    def note(self, record: Record) -> None:
        """Learn from one record of the log."""
        if type(record) is DecodeStretch:
            return  # every second record is one, and the history needs none of them
        match record:
            case Arrived():
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
            case _:
                pass

    def recent(self, now_s: float) -> RecentView:
        """The double checks of the last window."""
        while self._checks and self._checks[0][0] <= now_s - self.window_s:
            self._refused.discard(self._checks.popleft()[1])
        return RecentView(self.window_s, len(self._checks), len(self._refused))

    def _fail(self, record: Rejected) -> None:
        """Record a failed double check; where prefill shows first tokens, it was recorded as passed before."""
        if record.request_id in self._shown:
            passed = next((check for check in reversed(self._checks) if check[1] == record.request_id), None)
            if passed is not None:
                self._checks.remove(passed)
        self._checks.append((record.at_s, record.request_id))
        self._refused.add(record.request_id)
