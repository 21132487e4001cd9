"""What the cluster believes about one worker, after the last event about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from mooncake_lab.cluster.events import Attempt, ChunkDone, Preempted, Role
from mooncake_lab.conductor import DecodeView, PrefillView, ServedView
from mooncake_lab.core import Request

_TICKS_PER_S: Final = 2**80
"""The backlog is counted in whole ticks: every float of at least 4 ns is a whole number of them, so that the count
is the exact sum of what is queued, and 0 when nothing is."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that was sent to a worker, until the worker says that it is computed or dropped."""

    estimated_s: float
    """How long the Conductor estimates its prefill to take."""
    started: bool = False
    tier_read: bool = False


@dataclass(slots=True, eq=False)
class WorkerState:
    """The load of one worker. Mutable: it changes with every event about the worker."""

    name: str
    role: Role
    capacity_tokens: int = 0
    cache: str | None = None
    up: bool = True
    up_s: float = 0.0
    """When it came up."""
    assigned_requests: int = 0
    """Requests ever sent there to prefill."""
    prompts: dict[Attempt, _Prompt] = field(default_factory=dict[Attempt, _Prompt])
    reading: dict[Attempt, str] = field(default_factory=dict[Attempt, str])
    """Attempts whose prefix it reads from SSD, to send it to another worker."""
    sending: dict[Attempt, str] = field(default_factory=dict[Attempt, str])
    """Attempts whose KVCache it sends as fast as the network allows, with the worker that receives it."""
    arriving: dict[Attempt, str] = field(default_factory=dict[Attempt, str])
    """Those whose last byte is sent, and has not arrived."""
    contexts: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens of each request that decodes there or is on its way: its prompt and what was shown of its answer."""
    missing: dict[int, int] = field(default_factory=dict[int, int])
    """Those of them that are not in GPU memory, because the request was preempted or resumed there."""
    context_tokens: int = 0
    """KVCache tokens of all of them."""
    coming: dict[int, ServedView] = field(default_factory=dict[int, ServedView])
    decoding: dict[int, ServedView] = field(default_factory=dict[int, ServedView])
    started: set[int] = field(default_factory=set[int])
    """Requests in its batch, or taken out of it for want of memory."""
    stepped_until_s: float = 0.0
    """When its last decode step ended."""
    latest_view: DecodeView | None = None
    """It as a place to decode; None since something changed."""
    _plain_view: PrefillView | None = None
    """It as a place to prefill while it computes, sends and matches nothing; None since its queue changed."""
    _queued_ticks: int = 0
    _queued_s: float = 0.0
    _latest: Attempt | None = None
    _latest_until_s: float = 0.0
    _iteration_s: float = 0.0
    _of_iteration: set[ChunkDone | Preempted] = field(default_factory=set[ChunkDone | Preempted])

    # prefill

    def prefill_view(self, matched_blocks: int, now_s: float) -> PrefillView:
        """The worker as a place to prefill.

        The backlog of a pipelined group is counted as if its prompts did not overlap.
        """
        running_s = self._latest_until_s - now_s
        plain = running_s <= 0 and not matched_blocks and not self.sending
        if plain and self._plain_view is not None:
            return self._plain_view
        view = PrefillView(
            self.name,
            self._queued_s + running_s if running_s > 0 else self._queued_s,
            len(self.prompts),
            self.assigned_requests,
            matched_blocks,
            len(self.sending),
        )
        if plain:
            self._plain_view = view
        return view

    def add_prompt(self, attempt: Attempt, estimated_s: float) -> None:
        """A prompt is sent there."""
        self.prompts[attempt] = _Prompt(estimated_s)
        self.assigned_requests += 1
        self._count(estimated_s, 1)

    def start_prompt(self, attempt: Attempt, at_s: float) -> bool:
        """It began to compute a prompt; false where that is no news."""
        prompt = self.prompts.get(attempt)
        if prompt is None or prompt.started:
            return False
        prompt.started = True
        self._count(prompt.estimated_s, -1)
        self._latest, self._latest_until_s = attempt, at_s + prompt.estimated_s
        return True

    def free_slot(self, at_s: float) -> None:
        """It can begin the next prompt."""
        self._latest, self._latest_until_s = None, at_s

    def remove_prompt(self, attempt: Attempt, at_s: float) -> bool:
        """A prompt is computed or dropped; false where that is no news."""
        prompt = self.prompts.pop(attempt, None)
        if prompt is None:
            return False
        self._plain_view = None
        if not prompt.started:
            self._count(prompt.estimated_s, -1)
        elif self._latest == attempt:
            self.free_slot(at_s)
        return True

    def read_tier(self, attempt: Attempt) -> bool:
        """It has read blocks from its SSD, for its own prompt or to send them; false where that is no news."""
        destination = self.reading.pop(attempt, None)
        if destination is not None:
            self.sending[attempt] = destination
            return True
        prompt = self.prompts.get(attempt)
        if prompt is None or prompt.tier_read:
            return False
        prompt.tier_read = True
        return True

    def sent(self, attempt: Attempt) -> None:
        """The last byte of a transfer is on its way: the next transfer does not share the network card with it."""
        destination = self.sending.pop(attempt, None)
        if destination is not None:
            self.arriving[attempt] = destination

    def end_sending(self, attempt: Attempt) -> bool:
        """A transfer has arrived, or is given up; false where that is no news."""
        if self.sending.pop(attempt, None) is not None:
            return True
        late = self.arriving or self.reading  # often neither, and every request comes by here
        return bool(late) and (self.arriving.pop(attempt, None) or self.reading.pop(attempt, None)) is not None

    def stop_sending_to(self, worker: str) -> None:
        """A worker that received KVCache from it is down."""
        for under_way in (self.reading, self.sending, self.arriving):
            for attempt in [attempt for attempt, destination in under_way.items() if destination == worker]:
                del under_way[attempt]

    def _count(self, estimated_s: float, sign: int) -> None:
        """Add to the backlog, or take off (-1), without the residue of floats: 1e-16 s would break a tie."""
        self._plain_view = None
        self._queued_ticks += sign * int(estimated_s * _TICKS_PER_S)
        self._queued_s = self._queued_ticks / _TICKS_PER_S

    # decode

    def decode_view(self) -> DecodeView:
        """It as a place to decode."""
        if self.latest_view is None:
            self.latest_view = DecodeView(
                self.name,
                len(self.contexts),
                self.context_tokens,
                self.capacity_tokens,
                tuple(self.decoding.values()),
                tuple(self.coming.values()),
            )
        return self.latest_view

    def expect(self, request: Request, starts_s: float) -> None:
        """A request will decode there."""
        self.coming[request.id] = ServedView(request.id, request.input_tokens, starts_s)
        self.contexts[request.id] = request.input_tokens
        self.context_tokens += request.input_tokens
        self.latest_view = None

    def join(self, request_id: int, at_s: float) -> None:
        """A request that was on its way is there."""
        self.decoding[request_id] = ServedView(request_id, self.coming.pop(request_id).input_tokens, at_s)
        self.latest_view = None

    def step(self, request_ids: Sequence[int], steps: int, until_s: float) -> None:
        """Add tokens to each of these requests."""
        contexts = self.contexts
        for request_id in request_ids:
            contexts[request_id] += steps
        self.context_tokens += steps * len(request_ids)
        self.stepped_until_s = until_s
        self.latest_view = None

    def is_news(self, event: ChunkDone | Preempted) -> bool:
        """Whether an event was not reported before; those of later iterations are reported later."""
        if event.at_s > self._iteration_s:
            self._iteration_s = event.at_s
            self._of_iteration.clear()
        elif event.at_s < self._iteration_s or event in self._of_iteration:
            return False
        self._of_iteration.add(event)
        return True

    def hold(self, request_id: int, tokens: int) -> None:
        """Set how many tokens of a request's prompt and answer are in GPU memory."""
        missing = self.contexts[request_id] - tokens
        if not missing and not self.missing:
            return
        self.context_tokens += self.missing.pop(request_id, 0) - missing
        if missing:
            self.missing[request_id] = missing
        self.latest_view = None

    def release(self, request_id: int) -> None:
        """A request does not decode there any more, or will not."""
        self.context_tokens -= self.contexts.pop(request_id, 0) - self.missing.pop(request_id, 0)
        self.coming.pop(request_id, None)
        self.decoding.pop(request_id, None)
        self.started.discard(request_id)
        self.latest_view = None
