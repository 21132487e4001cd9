"""The policies of prefill instances and of decode instances: prompts alone, and decodes alone.

`SteadyDecodeOnly` is `DecodeOnly` for a simulator: the iterations up to the next change at once.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, final

from mooncake_lab.batching.batch_builder import (
    BatchBuilder,
    known_blocks,
    require_positive,
    steady_while_blocks_last,
)
from mooncake_lab.batching.plan import Limits, Plan, Progress


@dataclass(frozen=True, slots=True)
class PrefillOnly:
    """Prompts first come, first served; a request is done here with its first token, then its blocks move on.

    Published: Mooncake, FAST'25 §3 (prefill pool; chunked above a threshold, `prefill_chunk`).

    Assumptions: short prompts share an iteration and the last is cut to its tokens. A request whose first token is
    out is no longer planned; it holds its blocks until they have moved.
    """

    chunk_tokens: int | None = None
    """Tokens of an iteration, to which the last prompt is cut; None takes the instance's limit."""
    pack_tokens: int | None = None
    """Tokens up to which another prompt joins an iteration; one that would exceed them waits, and is then computed
    alone if it is longer. 1 computes one prompt at a time; None only cuts."""

    def __post_init__(self) -> None:
        require_positive("PrefillOnly.chunk_tokens", self.chunk_tokens)
        require_positive("PrefillOnly.pack_tokens", self.pack_tokens)

    steady_steps = steady_while_blocks_last
    reservation = staticmethod(known_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """Pieces of prompts up to the tokens of an iteration."""
        prefilling = [request for request in running if not request.decoding]
        batch = BatchBuilder(prefilling, limits, self.reservation, self.chunk_tokens)
        tokens = sum([batch.advance(request, request.pending_tokens) for request in batch.running])
        for request in batch.candidates(waiting, grows=False):
            new_tokens = request.pending_tokens
            if not self.joins(new_tokens, tokens) or not batch.admit(request, new_tokens):
                break
            tokens += new_tokens
        return batch.plan("prompts, first come, first served")

    def joins(self, new_tokens: int, batch_tokens: int) -> bool:
        """Whether a prompt with so many tokens to compute joins an iteration that has so many; the first does."""
        most = self.pack_tokens
        return not batch_tokens or most is None or batch_tokens + new_tokens <= most


@dataclass(frozen=True, slots=True)
class DecodeOnly:
    """Every request whose KVCache has arrived joins at once and advances by one token per iteration.

    Published: Mooncake, FAST'25 §3 (decode pool, continuous batching).

    Assumptions: on shortage of blocks the newest request is swapped out, as this instance has no prefill to
    recompute it with. A waiting request whose KVCache is not here yet is passed over.
    """

    steady_steps = steady_while_blocks_last
    reservation = staticmethod(known_blocks)

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """All decodes, old and new."""
        batch = BatchBuilder(running, limits, self.reservation)
        batch.make_room(swap=True)
        batch.decode()
        for request in batch.candidates([request for request in waiting if request.decoding]):
            if not batch.admit(request, 1):
                break
        return batch.plan("decodes only")


@dataclass(slots=True, kw_only=True, eq=False)
class DecodingRequest:
    """A request whose KVCache is at a decode instance. Mutable: it decodes, or waits for room."""

    request_id: int
    cached_tokens: int
    """Tokens in its KVCache when it was admitted last, or as it waits."""
    output_tokens: int
    """Tokens of its whole answer."""
    produced_tokens: int
    """Tokens of its answer that its client had then."""
    joining_tokens: int = 0
    """Tokens that its client gets when it is admitted: the one that prefill computed, or none."""
    joined_step: int = 0
    """The step of the instance at which it was admitted last."""


_Request = TypeVar("_Request", bound=DecodingRequest)


@final
class SteadyDecodeOnly(Generic[_Request]):
    """A decode instance under `DecodeOnly`, for whoever knows the lengths of answers. Mutable: requests decode.

    Every iteration gives each running request one token. So the batch is the same until a request finishes, the
    memory is full, or another request comes, and what it is then follows from the number of iterations. Tests hold
    it equal to an `Instance` that plans each iteration.

    Args:
        capacity_tokens: KVCache that fits.
        max_requests: the most that run at once; None is no limit.
    """

    def __init__(self, capacity_tokens: int, max_requests: int | None = None) -> None:
        self.waiting: deque[_Request] = deque()
        self.running: dict[int, _Request] = {}
        """The batch, by request id, in order of admission."""
        self.context_tokens = 0
        """KVCache of the batch."""
        self._capacity_tokens = capacity_tokens
        self._max_requests = max_requests
        self._step = 0  # iterations so far
        self._finishing: list[tuple[int, int]] = []  # a heap: the step after which each running request is done

    def admit(self) -> list[_Request]:
        """Let waiting requests join, first come, first served, as far as their KVCache fits.

        Returns:
            Those that joined; one whose answer is complete with the token that it gets as it joins does not run.
        """
        admitted = list[_Request]()
        while self.waiting:
            request, batch = self.waiting[0], len(self.running)
            fits = self.context_tokens + batch + request.cached_tokens < self._capacity_tokens
            if batch and not (fits and (self._max_requests is None or batch < self._max_requests)):
                break
            admitted.append(self.waiting.popleft())
            request.produced_tokens += request.joining_tokens
            request.joining_tokens, request.joined_step = 0, self._step
            steps = request.output_tokens - request.produced_tokens
            if steps > 0:
                self.running[request.request_id] = request
                self.context_tokens += request.cached_tokens
                heapq.heappush(self._finishing, (self._step + steps, request.request_id))
        return admitted

    def make_room(self) -> _Request | None:
        """Swap out the newest requests until one more token of each fits.

        Returns:
            A request that was alone and has outgrown the memory; it is gone.
        """
        while self.running and self.context_tokens + len(self.running) > self._capacity_tokens:
            request_id, request = self.running.popitem()
            done = self._step - request.joined_step
            self.context_tokens -= request.cached_tokens + done
            request.cached_tokens += done
            request.produced_tokens += done
            self._finishing = [entry for entry in self._finishing if entry[1] != request_id]
            heapq.heapify(self._finishing)
            if not self.running:
                return request
            self.waiting.appendleft(request)
        return None

    def steady_steps(self) -> int:
        """Iterations until a request finishes or the memory is full, if no request comes; at least one."""
        room = (self._capacity_tokens - self.context_tokens) // len(self.running)
        return max(1, min(self._finishing[0][0] - self._step, room))

    def apply(self, steps: int) -> list[_Request]:
        """Count iterations as computed; the requests that are done with them."""
        self._step += steps
        self.context_tokens += len(self.running) * steps
        done = list[_Request]()
        while self._finishing and self._finishing[0][0] <= self._step:
            request = self.running.pop(heapq.heappop(self._finishing)[1])
            self.context_tokens -= request.cached_tokens + self._step - request.joined_step
            done.append(request)
        return done

    def produced_tokens(self, steps: int) -> dict[int, int]:
        """Tokens of each request's answer, when so many iterations more are computed."""
        produced = {request.request_id: request.produced_tokens for request in self.waiting}
        for request_id, request in self.running.items():
            produced[request_id] = request.produced_tokens + self._step - request.joined_step + steps
        return produced

    def remove(self, request: _Request) -> None:
        """A request leaves, whether it runs or waits."""
        if self.running.get(request.request_id) is not request:
            self.waiting.remove(request)
            return
        del self.running[request.request_id]
        self.context_tokens -= request.cached_tokens + self._step - request.joined_step
        self._finishing = [entry for entry in self._finishing if entry[1] != request.request_id]
        heapq.heapify(self._finishing)

    def clear(self) -> list[_Request]:
        """Take out all requests, those of the batch first."""
        requests = [*self.running.values(), *self.waiting]
        self.running.clear()
        self.waiting.clear()
        return requests
