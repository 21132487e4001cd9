"""How much KVCache the requests in flight are expected to need, and when a refused request may come again.

vLLM admits every request and preempts when its GPU memory runs out. SGLang admits by an estimate of the answer
and retracts. Here a decode engine moves the KVCache of its newest request to host memory when its own is full. So
an answer that is longer than expected costs time, not the request. Admission bounds what waits in host memory:
KVCache that has no room in an engine.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from mooncake_lab.cluster import WorkerState
from mooncake_lab.conductor import Estimator
from mooncake_lab.serving.spec import LiveSpec
from mooncake_lab.serving.stream import RequestStream

_WINDOW_S: Final = 30.0
_LEAST_ENDED: Final = 4
"""Requests that must have ended in the window before its rate counts."""
_LONGEST_S: Final = 600.0


@final
class KVBudget:
    """The KVCache tokens that are promised. Mutable: it remembers what ended and what was refused lately.

    Args:
        spec: of the cluster.
        streams: of the requests in flight, which change.
        workers: what the cluster knows about its workers now.
    """

    def __init__(
        self, spec: LiveSpec, streams: Mapping[int, RequestStream], workers: Callable[[], Sequence[WorkerState]]
    ) -> None:
        self._spec = spec
        self._streams = streams
        self._workers = workers
        self._ended: deque[tuple[float, int]] = deque()  # when, and its tokens
        self._refused: deque[tuple[float, int]] = deque()  # when it may come again, and its tokens
        self._refused_tokens = 0

    def tokens(self, stream: RequestStream) -> int:
        """KVCache that a request is expected to come to.

        Its prompt, and `expected_answer_tokens` for its answer. An answer that has half of that is expected to
        become twice as long as it is, and no answer to become longer than it may.
        """
        answer = max(self._spec.expected_answer_tokens, 2 * len(stream.tokens))
        return len(stream.prompt) + min(stream.params.max_new_tokens, answer)

    def held(self) -> int:
        """Of all requests in flight."""
        return sum(map(self.tokens, self._streams.values()))

    def refusal(self, stream: RequestStream) -> str:
        """Why there is no room for one more request; empty where there is. Alone, a request always has room."""
        held, mine, most = self.held(), self.tokens(stream), self.most()
        if self._streams and most and held + mine > most:
            return (
                f"the requests in flight are expected to need {held} tokens of KVCache, and this one {mine};"
                f" allowed are {most}"
            )
        return ""

    def most(self) -> int:
        """Tokens that may be expected; 0 while no worker decodes."""
        room = sum(each.capacity_tokens for each in self._workers() if each.role != "prefill")
        return int(self._spec.most_waiting * room)

    def note_end(self, stream: RequestStream, at_s: float) -> None:
        """A request in flight has ended."""
        self._ended.append((at_s, self.tokens(stream)))

    def retry_after_s(self, stream: RequestStream, now_s: float, estimate: Estimator) -> float:
        """When a request that has no room now may find some, at least 1 s.

        The tokens that must become free first, over the rate at which tokens became free lately. Requests that
        were refused before and given a time come first, so that not all come again at once; but no time is longer
        than what is in flight now will take.
        """
        while self._refused and self._refused[0][0] <= now_s:
            self._refused_tokens -= self._refused.popleft()[1]
        held, mine = self.held(), self.tokens(stream)
        most = max(held, mine)
        lacking = min(max(mine, held + mine - self.most()) + self._refused_tokens, most)
        # what ended lately says too little after a quiet time, the model too little where it errs
        rate = max(self._observed_rate(now_s), self._estimated_rate(held, now_s, estimate))
        wait_s = min(_LONGEST_S, max(1.0, lacking / rate)) if rate else 1.0
        due_s = max(now_s + wait_s, self._refused[-1][0] if self._refused else 0.0)
        if self._refused_tokens < most:  # behind so many, a request waits for all: it need not be remembered
            self._refused.append((due_s, mine))
            self._refused_tokens += mine
        return float(math.ceil(wait_s))

    def _observed_rate(self, now_s: float) -> float:
        """Tokens per second that ended requests set free lately; 0 where too few ended."""
        while self._ended and self._ended[0][0] <= now_s - _WINDOW_S:
            self._ended.popleft()
        if len(self._ended) < _LEAST_ENDED:
            return 0.0
        lasted_s = now_s - self._ended[0][0]
        return sum(tokens for _, tokens in self._ended) / lasted_s if lasted_s > 0 else 0.0

    def _estimated_rate(self, held: int, now_s: float, estimate: Estimator) -> float:
        """The same by the latency model: all that is held, over the time of all prefills and all decode steps."""
        if not held:
            return 0.0
        known = sum(len(stream.prompt) + len(stream.tokens) for stream in self._streams.values())
        workers = self._workers()
        decoding = [worker for worker in workers if worker.role != "prefill"]
        # a full batch on every engine; requests beyond it wait for their turn
        batch = sum(max(1, min(len(each.contexts), self._spec.max_requests)) for each in decoding)
        step_s = max((estimate.decode_step_s(len(w.contexts), w.context_tokens) for w in decoding), default=0.0)
        backlogs_s = (each.prefill_view(0, now_s).backlog_s for each in workers if each.role != "decode")
        whole_s = max(backlogs_s, default=0.0) + step_s * (held - known) / max(1, batch)
        return held / whole_s if whole_s > 0 else 0.0
