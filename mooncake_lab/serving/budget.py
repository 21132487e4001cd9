"""How much KVCache the requests under way are expected to need, and when a refused request may come again.

vLLM admits every request and preempts when its GPU memory runs out. SGLang admits by an estimate of the answer
and retracts. Here a decode engine moves the KVCache of its newest request to host memory when its own is full. So
an answer that is longer than expected costs time, not the request. Admission bounds what waits in host memory:
KVCache that has no room in an engine.
"""

import math
from collections import deque
from collections.abc import Mapping
from typing import Final, final

from mooncake_lab.conductor import Estimator
from mooncake_lab.serving.books import Books
from mooncake_lab.serving.spec import LiveSpec
from mooncake_lab.serving.ticket import Ticket

_WINDOW_S: Final = 30.0
_LEAST_ENDED: Final = 4
"""Requests that must have ended in the window before its rate counts."""
_LONGEST_S: Final = 600.0


@final
class Budget:
    """The KVCache tokens that are promised. Mutable: it remembers what ended and what was refused lately.

    Args:
        spec: of the cluster.
        under_way: the cluster's requests, which change under its hands.
        books: what the cluster believes about its workers.
    """

    def __init__(self, spec: LiveSpec, under_way: Mapping[int, Ticket], books: Books) -> None:
        self._spec = spec
        self._under_way = under_way
        self._books = books
        self._ended: deque[tuple[float, int]] = deque()  # when, and its tokens
        self._refused: deque[tuple[float, int]] = deque()  # when it may come again, and its tokens
        self._refused_tokens = 0

    def tokens(self, ticket: Ticket) -> int:
        """KVCache that a request is expected to come to.

        Its prompt, and `expected_answer_tokens` for its answer. An answer that has half of that is expected to
        become twice as long as it is, and no answer to become longer than it may.
        """
        answer = max(self._spec.expected_answer_tokens, 2 * len(ticket.tokens))
        return len(ticket.prompt) + min(ticket.asked.max_new_tokens, answer)

    def held(self) -> int:
        """Of all requests under way."""
        return sum(map(self.tokens, self._under_way.values()))

    def refusal(self, ticket: Ticket) -> str | None:
        """Why there is no room for one more request, if there is none. Alone, a request always has room."""
        count = len(self._under_way)
        if count >= self._spec.most_under_way:
            return f"{count} requests are under way; allowed are {self._spec.most_under_way}"
        held, mine, most = self.held(), self.tokens(ticket), self.most()
        if count and most and held + mine > most:
            return (
                f"the requests under way are expected to need {held} tokens of KVCache, and this one {mine};"
                f" allowed are {most}"
            )
        return None

    def most(self) -> int:
        """Tokens that may be expected; 0 while no worker decodes."""
        room = sum(a.capacity_tokens for a in self._books.accounts.values() if a.role != "prefill")
        return int(self._spec.most_waiting * room)

    def note_end(self, ticket: Ticket, now_s: float) -> None:
        """A request under way has ended."""
        self._ended.append((now_s, self.tokens(ticket)))

    def retry_after_s(self, ticket: Ticket, now_s: float, estimate: Estimator | None) -> float:
        """When a request that has no room now may find some, at least 1 s.

        The tokens that must become free first, over the rate at which tokens became free lately. Those who were
        refused before and told a time come first, so that not all come again at once; but nobody is told more than
        what is under way now will take.
        """
        while self._refused and self._refused[0][0] <= now_s:
            self._refused_tokens -= self._refused.popleft()[1]
        held, mine = self.held(), self.tokens(ticket)
        most = max(held, mine)
        lacking = min(max(mine, held + mine - self.most()) + self._refused_tokens, most)
        # what ended lately says too little after a quiet time, the model too little where it errs
        rate = max(self._observed_rate(now_s), self._believed_rate(held, now_s, estimate))
        wait_s = min(_LONGEST_S, max(1.0, lacking / rate)) if rate else 1.0
        due_s = max(now_s + wait_s, self._refused[-1][0] if self._refused else 0.0)
        if (
            self._refused_tokens < most
        ):  # who comes behind so many waits for all of them: it need not be remembered
            self._refused.append((due_s, mine))
            self._refused_tokens += mine
        return float(math.ceil(wait_s))

    def _observed_rate(self, now_s: float) -> float:
        """Tokens a second that ended requests set free lately; 0 where too few ended."""
        while self._ended and self._ended[0][0] <= now_s - _WINDOW_S:
            self._ended.popleft()
        if len(self._ended) < _LEAST_ENDED:
            return 0.0
        lasted_s = now_s - self._ended[0][0]
        return sum(tokens for _, tokens in self._ended) / lasted_s if lasted_s > 0 else 0.0

    def _believed_rate(self, held: int, now_s: float, estimate: Estimator | None) -> float:
        """The same by the latency model: all that is held, over the time of all prefills and all decode steps."""
        if estimate is None or not held:
            return 0.0
        known = sum(len(ticket.prompt) + len(ticket.tokens) for ticket in self._under_way.values())
        accounts = self._books.accounts.values()
        decoding = [account for account in accounts if account.role != "prefill"]
        # a full batch on every engine; requests beyond it wait for their turn
        batch = sum(max(1, min(len(a.contexts), self._spec.max_requests)) for a in decoding)
        step_s = max((estimate.decode_step_s(len(a.contexts), a.context_tokens) for a in decoding), default=0.0)
        backlog_s = max((a.backlog_s(now_s) for a in accounts if a.role != "decode"), default=0.0)
        whole_s = backlog_s + step_s * (held - known) / max(1, batch)
        return held / whole_s if whole_s > 0 else 0.0
