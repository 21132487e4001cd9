"""The requests in flight as their clients see them: which are accepted, what they may need, and how they end.

vLLM admits every request and preempts when its GPU memory runs out. SGLang admits by an estimate of the answer
and retracts. Here a decode engine moves the KVCache of its newest request to host memory when its own is full. So
an answer that is longer than expected costs time, not the request. Admission bounds what waits in host memory:
KVCache that has no room in an engine.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.cluster import ClusterSpec, InstanceState, events
from mooncake_lab.conductor import Estimator
from mooncake_lab.core import Request, block_keys
from mooncake_lab.serving.launch import LONGEST_PAUSE_S
from mooncake_lab.serving.messages import Ready, SamplingParams
from mooncake_lab.serving.spec import LiveOptions
from mooncake_lab.serving.stream import End, FailedError, RejectedError, RequestStream, check_prompt

_LONGEST_WAIT_S: Final = 600.0


@final
class Clients:
    """The streams of all requests in flight, and the KVCache that they are expected to need. Mutable.

    Args:
        spec: of the cluster.
        options: likewise.
        ready: what a worker said about the model.
        workers: what the cluster knows about its workers now.
    """

    def __init__(
        self, spec: ClusterSpec, options: LiveOptions, ready: Ready, workers: Callable[[], list[InstanceState]]
    ) -> None:
        self.streams: dict[int, RequestStream] = {}
        """The answers to requests in flight, by request id."""
        self._spec = spec
        self._options = options
        self._ready = ready
        self._workers = workers
        self._next_id = 0
        self._room_tokens = ready.max_context_tokens  # of the smallest engine, when one was last up

    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer together: the context length, or the KVCache of an engine."""
        rooms = (each.decode.capacity_tokens for each in self._workers() if each.role != "prefill")
        self._room_tokens = min(rooms, default=self._room_tokens)
        return min(self._ready.max_context_tokens, self._room_tokens)

    def accept(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        traced: Request | None,
        session: str | None = None,
    ) -> tuple[RequestStream, Request, str]:
        """A stream for a new request, the request, and why there is no room for it (empty where there is).

        Raises:
            ValueError: when it can never be served, or its id is in use.
        """
        check_prompt(prompt, params, self.max_model_len(), self._ready.shape.vocabulary)
        own: dict[str, Any] = {
            "input_tokens": len(prompt),
            "block_keys": self._keys(prompt),
            "block_size_tokens": self._spec.block_size_tokens,
        }
        if traced is None:
            request = Request(id=self._next_id, arrival_s=0.0, session=session, **own)
        else:
            request = replace(traced, **own)
        if request.id in self.streams:
            raise ValueError(f"request {request.id} is in flight already")
        self._next_id = max(self._next_id, request.id + 1)  # workers and the log know each id of a run once
        stream = RequestStream(request_id=request.id, prompt=prompt, params=params)
        refusal = self._refusal(stream)
        self.streams[request.id] = stream
        return stream, request, refusal

    def extend(self, request: Request, tokens: int) -> Request | None:
        """The request with tokens of its answer at the end of its prompt; None where its answer is complete."""
        stream = self.streams[request.id]
        if stream.complete_by(self._ready.end_tokens) is not None:
            return None
        grown = request.input_tokens + tokens
        return replace(request, input_tokens=grown, block_keys=self._keys(stream.known(grown)))

    def note_reuse(self, event: events.PrefillDone | events.ChunkDone) -> None:
        """The first prefill says what was reused: a later one, after a failure, finds what the first computed."""
        stream = self.streams.get(event.attempt.request_id)
        if stream is not None and stream.cached_tokens is None:
            stream.cached_tokens = min(event.reused_tokens, len(stream.prompt))

    def reject(self, command: events.Reject, now_s: float, estimate: Estimator, *, is_shut: bool) -> None:
        """End a request that the coordinator rejected; its client learns why, and when to come again."""
        stream = self.streams.pop(command.request_id)
        if command.stage == "client":
            stream.close(End("cancelled", FailedError(command.reason) if is_shut else None))
        elif command.stage == "failed":
            stream.close(End("failed", FailedError(command.reason)))
        elif command.stage == "capacity":  # no worker could serve it
            stream.close(End("failed", FailedError(command.reason, LONGEST_PAUSE_S)))
        else:
            retry_after_s = self._retry_after_s(stream, now_s, estimate)
            stream.close(End("rejected", RejectedError(command.stage, command.reason, retry_after_s)))

    def finish(self, command: events.Finish) -> None:
        """End a request that has all its tokens."""
        stream = self.streams.pop(command.request_id)
        stream.close(End(stream.complete_by(self._ready.end_tokens) or "stop"))

    def cancel_all(self) -> None:
        """Requests in flight end as cancelled."""
        while self.streams:
            self.streams.popitem()[1].close(End("cancelled"))

    def expected_tokens(self, stream: RequestStream) -> int:
        """KVCache that a request is expected to come to.

        Its prompt, and `expected_answer_tokens` for its answer. An answer that has half of that is expected to
        become twice as long as it is, and no answer to become longer than it may.
        """
        answer = max(self._options.expected_answer_tokens, 2 * len(stream.tokens))
        return len(stream.prompt) + min(stream.params.max_new_tokens, answer)

    def held_tokens(self) -> int:
        """KVCache that all requests in flight are expected to come to."""
        return sum(map(self.expected_tokens, self.streams.values()))

    def _most_tokens(self) -> int:
        """KVCache that may be expected; 0 while no worker decodes."""
        room = sum(each.decode.capacity_tokens for each in self._workers() if each.role != "prefill")
        return int(self._options.max_kv_oversubscription * room)

    def _refusal(self, stream: RequestStream) -> str:
        """Why there is no room for one more request; empty where there is. Alone, a request always has room."""
        held, mine, most = self.held_tokens(), self.expected_tokens(stream), self._most_tokens()
        if not (self.streams and most and held + mine > most):
            return ""
        return (
            f"the requests in flight are expected to need {held} tokens of KVCache, and this one {mine};"
            f" allowed are {most}"
        )

    def _retry_after_s(self, stream: RequestStream, now_s: float, estimate: Estimator) -> float:
        """When a client that was refused may find room, and a shorter queue than now; at least 1 s.

        The tokens that must become free first, as a share of all that are held, of the time in which the latency
        model expects all prefills and decode steps to be done.
        """
        held, mine = self.held_tokens(), self.expected_tokens(stream)
        lacking = min(max(mine, held + mine - self._most_tokens()), held)
        known = sum(len(each.prompt) + len(each.tokens) for each in self.streams.values())
        decoding = [worker.decode for worker in self._workers() if worker.role != "prefill"]
        # a full batch on every engine; requests beyond it wait for their turn
        most = self._spec.pools[-1].max_requests or math.inf
        batch = sum(max(1, min(len(each.contexts), most)) for each in decoding)
        step_s = max(
            (estimate.decode_step_s(len(each.contexts), each.context_tokens) for each in decoding), default=0.0
        )
        backlogs_s = [each.prefill.view(0, now_s).backlog_s for each in self._workers() if each.role != "decode"]
        whole_s = max(backlogs_s, default=0.0) + step_s * (held - known) / max(1, batch)
        room_s = whole_s * lacking / held if held else 0.0
        return math.ceil(min(_LONGEST_WAIT_S, max(1.0, room_s, min(backlogs_s, default=0.0))))

    def _keys(self, prompt: npt.NDArray[np.int32]) -> tuple[bytes, ...]:
        """The keys of a prompt's blocks."""
        return tuple(block_keys(prompt, self._spec.block_size_tokens, namespace=self._ready.fingerprint))
