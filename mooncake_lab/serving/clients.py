"""The requests in flight as their clients see them: which are accepted, what they may need, and how they end."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import final

import numpy as np
import numpy.typing as npt

from mooncake_lab.cluster import ChunkDone, Finish, PrefillDone, Reject, WorkerState
from mooncake_lab.conductor import Estimator
from mooncake_lab.core import Request, block_keys
from mooncake_lab.serving.budget import KVBudget
from mooncake_lab.serving.messages import Ready, SamplingParams
from mooncake_lab.serving.spec import LiveSpec
from mooncake_lab.serving.stream import End, FailedError, RejectedError, RequestStream, check_prompt


@final
class Clients:
    """The streams of all requests in flight, and the KVCache that they are expected to need. Mutable.

    Args:
        spec: of the cluster.
        ready: what the workers said about the model.
        workers: what the cluster knows about its workers now.
    """

    def __init__(
        self, spec: LiveSpec, ready: Callable[[], Ready], workers: Callable[[], list[WorkerState]]
    ) -> None:
        self.streams: dict[int, RequestStream] = {}
        """The answers to requests in flight, by request id."""
        self.budget = KVBudget(spec, self.streams, workers)
        self._spec = spec
        self._ready = ready
        self._workers = workers
        self._ids = itertools.count()

    def begin_run(self) -> None:
        """Requests in flight end as cancelled, and what was learned of their needs is forgotten."""
        for stream in self.streams.values():
            stream.close(End("cancelled"))
        self.streams.clear()
        self.budget = KVBudget(self._spec, self.streams, self._workers)

    def max_model_len(self) -> int:
        """The most tokens that a prompt and its answer may have together: the window, or an engine's KVCache."""
        rooms = (each.capacity_tokens for each in self._workers() if each.role != "prefill")
        return min((self._ready().window, *rooms))

    def accept(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        request_id: int | None,
        arrival_s: float,
        session: str | None,
        priority: int,
    ) -> tuple[RequestStream, Request, str]:
        """A stream for a new request, the request, and why there is no room for it (empty where there is).

        Raises:
            ValueError: when it can never be served, or its id is in use.
        """
        check_prompt(prompt, params, self.max_model_len(), self._ready().shape.vocabulary)
        request = Request(
            id=next(self._ids) if request_id is None else request_id,
            arrival_s=arrival_s,
            input_tokens=len(prompt),
            block_keys=self._keys(prompt),
            block_size_tokens=self._spec.block_size_tokens,
            session=session,
            priority=priority,
        )
        if request.id in self.streams:
            raise ValueError(f"request {request.id} is in flight already")
        stream = RequestStream(request_id=request.id, prompt=prompt, params=params)
        refusal = self.budget.refusal(stream)
        self.streams[request.id] = stream
        return stream, request, refusal

    def extend(self, request: Request, tokens: int) -> Request | None:
        """The request with tokens of its answer at the end of its prompt; None where its answer is complete."""
        stream = self.streams[request.id]
        if stream.complete_by(self._ready().end_tokens) is not None:
            return None
        grown = request.input_tokens + tokens
        known = np.concatenate([stream.prompt, np.asarray(stream.tokens, dtype=np.int32)])[:grown]
        return replace(request, input_tokens=grown, block_keys=self._keys(known))

    def note_reuse(self, event: PrefillDone | ChunkDone, *, is_current: bool) -> None:
        """The first prefill says what was reused: a later one, after a failure, finds what the first computed."""
        stream = self.streams.get(event.attempt.request_id)
        if stream is not None and stream.cached_tokens is None and is_current:
            stream.cached_tokens = min(event.reused_tokens, len(stream.prompt))

    def reject(self, command: Reject, now_s: float, estimate: Estimator, *, is_shut: bool) -> None:
        """End a request that the coordinator rejected; its client learns why, and when to come again."""
        stream = self.streams.pop(command.request_id)
        if command.stage == "client":
            stream.close(End("cancelled", FailedError(command.reason) if is_shut else None))
        elif command.stage == "failed":
            stream.close(End("failed", FailedError(command.reason)))
        else:
            retry_after_s = self._retry_after_s(stream, now_s, estimate)
            stream.close(End("rejected", RejectedError(command.stage, command.reason, retry_after_s)))
        if command.stage != "frontdoor":
            self.budget.note_end(stream, now_s)

    def finish(self, command: Finish, now_s: float) -> None:
        """End a request that has all its tokens."""
        stream = self.streams.pop(command.request_id)
        stream.close(End(stream.complete_by(self._ready().end_tokens) or "stop"))
        self.budget.note_end(stream, now_s)

    def _retry_after_s(self, stream: RequestStream, now_s: float, estimate: Estimator) -> float:
        """When a client that was refused may find room, and a shorter queue than now."""
        backlogs = [each.prefill_view(0, now_s).backlog_s for each in self._workers() if each.role != "decode"]
        shortest_s = float(math.ceil(min(backlogs, default=0.0)))
        return max(shortest_s, self.budget.retry_after_s(stream, now_s, estimate))

    def _keys(self, prompt: npt.NDArray[np.int32]) -> tuple[bytes, ...]:
        """The keys of a prompt's blocks."""
        return tuple(block_keys(prompt, self._spec.block_size_tokens, namespace=self._ready().fingerprint))
