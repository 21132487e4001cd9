"""What a cluster remembers of its past, for views to show: policies themselves remember nothing.

It is learned from the log, so the simulated and the real cluster learn alike, and nothing of the future.
"""

from collections import deque
from dataclasses import dataclass, field

from mooncake_lab.conductor.lengths import LengthBook
from mooncake_lab.conductor.view import RecentView
from mooncake_lab.core import Arrived, DecodeStretch, Finished, FirstToken, Record, Rejected


@dataclass(slots=True, eq=False)
class Experience:
    """Lengths of finished answers, and how the last double checks went. Mutable: it grows with the log."""

    window_s: float = 60.0
    """How far back the view of double checks reaches."""
    lengths: LengthBook = field(default_factory=LengthBook)
    _input_tokens: dict[int, int] = field(default_factory=dict)
    _checks: deque[tuple[float, int]] = field(default_factory=deque)  # when, and whose
    _refused: set[int] = field(default_factory=set)  # those among them that failed
    _shown: set[int] = field(default_factory=set)  # requests under way whose first token is out

    def note(self, record: Record) -> None:
        """Learn from one record of the log."""
        if type(record) is DecodeStretch:
            return  # every other record is one, and teaches nothing
        match record:
            case Arrived():
                self._input_tokens[record.request_id] = record.input_tokens
            case Finished():
                self._shown.discard(record.request_id)
                prompt_tokens = self._input_tokens.pop(record.request_id, None)
                if prompt_tokens is not None:  # one that arrived before this book was opened teaches nothing
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
        """How the double checks of the last window went."""
        while self._checks and self._checks[0][0] <= now_s - self.window_s:
            self._refused.discard(self._checks.popleft()[1])
        return RecentView(self.window_s, len(self._checks), len(self._refused))

    def _fail(self, record: Rejected) -> None:
        """A double check failed now; where prefill shows first tokens, it was taken for passed before."""
        if record.request_id in self._shown:
            passed = next((check for check in reversed(self._checks) if check[1] == record.request_id), None)
            if passed is not None:
                self._checks.remove(passed)
        self._checks.append((record.at_s, record.request_id))
        self._refused.add(record.request_id)
