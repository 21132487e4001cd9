"""A decode instance in virtual time: continuous batching, with exact token times at few events.

Between two changes of the batch, step times follow a formula: a step lasts `constant + per request + per cached
token`, and the cache grows by one token per request and step. So the instance sleeps until its first request
finishes, its memory is full, or a request joins; the steps until then are one `StepDone` event from which every
token's time follows. This is the fast path of `Instance` under `DecodeOnly`; tests compare the two.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from mooncake_lab.cluster import Attempt, AttemptFailed, DecodeStarted, Event, RequestDone
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.event_loop import EventLoop
from mooncake_lab.simulation.steady import Steady, Stretch


@dataclass(slots=True, eq=False)
class _DecodeRequest:
    """A request in the batch; `cached_tokens` is its context when it joined at step `joined_step`."""

    attempt: Attempt
    cached_tokens: int
    output_tokens: int
    produced_tokens: int
    """Those of the output that its client had when it joined."""
    shows_computed: bool
    """Whether the token that its prefill computed is shown when it joins."""
    joined_step: int = 0
    started: bool = False


class DecodeInstance:
    """Decodes whatever KVCache it is given, up to the tokens that fit into its memory.

    A request that outgrows the memory all by itself is rejected then, as a coupled instance does; a prompt that
    cannot fit is not even placed (`conductor.decide`). Going back to host memory costs no time.
    """

    def __init__(
        self,
        loop: EventLoop,
        name: str,
        model: LatencyModel,
        capacity_tokens: int,
        report: Callable[[Event], None],
    ) -> None:
        self.name = name
        self.up = True
        self.capacity_tokens = capacity_tokens
        self.horizon_s = inf
        """When the run is cut: a stretch ends with the last step before it, so that its tokens are in the log."""
        self._loop = loop
        self._model = model
        self._report = report
        self._waiting: deque[_DecodeRequest] = deque()
        self._members: dict[int, _DecodeRequest] = {}
        self._finishing: list[tuple[int, int]] = []
        self._context_tokens = 0
        self._step = 0
        self._stretch: Stretch | None = None  # that runs
        self._shortened = False  # whether that stretch was cut short already
        self._may_join = False  # whether joining would cut it short
        self._waits = False  # for the next look
        self._looks = 0  # timers that were set; only the last one counts

    def stop(self) -> None:
        """Stop with the step under way; each request that is here is then reported as failed."""
        self.up = False
        self._wake()

    def join(
        self, attempt: Attempt, *, context_tokens: int, output_tokens: int, shown_tokens: int, shows_computed: bool
    ) -> None:
        """A request's KVCache is in GPU memory: it joins at the next step boundary.

        Args:
            attempt: of the request.
            context_tokens: its prompt.
            output_tokens: those of its answer, the tokens that were shown before included.
            shown_tokens: tokens that its client has.
            shows_computed: whether the token that prefill computed is shown as it joins.
        """
        self._waiting.append(_DecodeRequest(attempt, context_tokens, output_tokens, shown_tokens, shows_computed))
        self._wake()

    def _wake(self) -> None:
        """Something changed: an idle instance looks at once, a stretch that runs ends with the step under way.

        Where memory is full, a request can only join when another one finishes.
        """
        if self._stretch is None:
            if not self._waits:
                self._wait(0.0)
        elif not self._shortened and (self._may_join or not self.up):
            self._shortened = True
            shorter = self._stretch.cut(self._loop.now_s)
            if shorter.steps < self._stretch.steps:
                self._stretch = shorter
                self._wait(max(shorter.end_s - self._loop.now_s, 0.0))

    def _wait(self, seconds: float) -> None:
        self._waits = True
        self._looks += 1
        self._loop.call_later(seconds, self._look, self._looks)

    def _look(self, timer: int) -> None:
        """The stretch is over, or a request came to an idle instance: the next stretch begins."""
        if timer != self._looks:
            return  # a stretch that was cut short
        if self._stretch is not None:
            self._close(self._stretch)
        self._stretch, self._waits = None, False
        if not self.up:
            self._fail_all()
            return
        self._admit()
        self._make_room()  # before anything is counted: the stretch is that of those who stay
        if self._members:
            decode, batch, now_s = self._model.decode, len(self._members), self._loop.now_s
            pace = Steady(decode.step_s(batch, self._context_tokens), decode.step_growth_s(batch))
            steps = pace.steps_before(self._steps_until_change(), self.horizon_s, now_s)
            self._stretch = Stretch(now_s, pace, steps)
            self._shortened, self._may_join = False, not self._waiting
            self._wait(pace.seconds(steps))

    def tokens_shown(self) -> dict[int, int]:
        """How many tokens each request here has received by now, those of the stretch under way included."""
        done = 0 if self._stretch is None else self._stretch.steps_ended(self._loop.now_s)
        shown = {member.attempt.request_id: member.produced_tokens for member in self._waiting}
        for request_id, member in self._members.items():
            shown[request_id] = member.produced_tokens + self._step - member.joined_step + done
        return {request_id: tokens for request_id, tokens in shown.items() if tokens}

    def _admit(self) -> None:
        """Let waiting requests join, first come first served, as far as their KVCache fits."""
        while self._waiting:
            member = self._waiting[0]
            fits = self._context_tokens + len(self._members) + member.cached_tokens < self.capacity_tokens
            if not fits and self._members:
                return
            self._waiting.popleft()
            self._start(member)

    def _fail_all(self) -> None:
        """The instance is down: its KVCache is gone."""
        members = [*self._members.values(), *self._waiting]
        self._members.clear()
        self._waiting.clear()
        for member in members:
            self._fail(member, "its decode instance failed", retriable=True)

    def _fail(self, member: _DecodeRequest, reason: str, *, retriable: bool) -> None:
        self._report(
            AttemptFailed(
                at_s=self._loop.now_s, attempt=member.attempt, reason=reason, retriable=retriable, stage="capacity"
            )
        )

    def _start(self, member: _DecodeRequest) -> None:
        if not member.started:
            member.started = True
            self._report(DecodeStarted(at_s=self._loop.now_s, attempt=member.attempt))
            member.produced_tokens += member.shows_computed
        remaining = member.output_tokens - member.produced_tokens
        if remaining <= 0:
            self._finish(member)
            return
        member.joined_step = self._step
        request_id = member.attempt.request_id
        self._members[request_id] = member
        self._context_tokens += member.cached_tokens
        heapq.heappush(self._finishing, (self._step + remaining, request_id))

    def _steps_until_change(self) -> int:
        """Steps until the first member finishes or memory is full; at least one."""
        finish = self._finishing[0][0] - self._step
        room = (self.capacity_tokens - self._context_tokens) // len(self._members)
        return max(1, min(finish, room))

    def _make_room(self) -> None:
        """Swap out the newest requests until one more token per request fits.

        A request that is alone then has outgrown the instance, and is rejected.
        """
        while self._members and self._context_tokens + len(self._members) > self.capacity_tokens:
            member = self._push_out()
            if self._members:
                self._waiting.appendleft(member)
            else:
                held = f"its KVCache of {member.cached_tokens} tokens cannot grow"
                self._fail(member, f"{held}: {self.name} holds {self.capacity_tokens}", retriable=False)
                self._admit()

    def _push_out(self) -> _DecodeRequest:
        request_id, member = self._members.popitem()
        done = self._step - member.joined_step
        self._context_tokens -= member.cached_tokens + done
        member.cached_tokens += done
        member.produced_tokens += done
        self._finishing = [entry for entry in self._finishing if entry[1] != request_id]
        heapq.heapify(self._finishing)
        return member

    def _close(self, stretch: Stretch) -> None:
        """Report the stretch and let finished members go."""
        self._report(stretch.done(self.name, self._loop.now_s, tuple(self._members)))
        self._step += stretch.steps
        self._context_tokens += len(self._members) * stretch.steps
        while self._finishing and self._finishing[0][0] <= self._step:
            _, request_id = heapq.heappop(self._finishing)
            member = self._members.pop(request_id)
            self._context_tokens -= member.cached_tokens + self._step - member.joined_step
            self._finish(member)

    def _finish(self, member: _DecodeRequest) -> None:
        self._report(RequestDone(at_s=self._loop.now_s, attempt=member.attempt))
