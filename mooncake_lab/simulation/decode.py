"""A decode instance in virtual time: continuous batching, with exact token times at few events.

Between two changes of the batch nothing happens that a formula does not know: a step lasts
`constant + per request + per cached token`, and the cache grows by one token a request and step. So the
instance sleeps until its first member finishes, its memory is full, or somebody joins; what lay between
is one `DecodeStretch` record from which every token's time follows.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import simpy

from mooncake_lab.conductor import DecodeView, ServedView
from mooncake_lab.core import DecodeStretch, Finished, FirstToken, Record, Rejected, TracedRequest
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.steady import ROUNDING_S, Steady


@dataclass(slots=True, eq=False)
class _Member:
    """A request in the batch; `cached_tokens` is its context when it joined at step `joined_step`."""

    traced: TracedRequest
    cached_tokens: int
    produced_tokens: int
    joined_step: int
    resumed: bool = False


class DecodeInstance:
    """Decodes whatever KVCache it is given, up to the tokens that fit into its memory.

    A request that outgrows the memory all by itself is rejected then, as a coupled instance does; a prompt that
    cannot fit is not even placed (`conductor.decide`). Going back to host memory costs no time.
    """

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        model: LatencyModel,
        capacity_tokens: int,
        log: Callable[[Record], None],
        lost: Callable[[TracedRequest, int], None] | None = None,
    ) -> None:
        self.name = name
        self.alive = True
        self.capacity_tokens = capacity_tokens
        self.horizon_s = inf
        """When the run is cut: a stretch ends with the last step before it, so that its tokens are in the log."""
        self.promised_requests = 0
        """Requests placed here whose KVCache has not arrived."""
        self.promised_tokens = 0
        self._env = env
        self._model = model
        self._log = log
        self._lost = lost
        self._waiting: deque[_Member] = deque()
        self._members: dict[int, _Member] = {}
        self._finishing: list[tuple[int, int]] = []
        self._context_tokens = 0
        self._step = 0
        self._stretch: tuple[float, Steady, int] | None = None  # that runs: its start, pace and steps
        self._shortened = False  # whether that stretch was cut short already
        self._may_join = False  # whether joining would cut it short
        self._timer: simpy.Event | None = None  # when to look again
        self._coming: dict[int, ServedView] = {}
        self._present: dict[int, ServedView] = {}
        self._view: DecodeView | None = None  # until something changes

    def view(self) -> DecodeView:
        """What the Conductor may know of this instance now."""
        if self._view is None:
            self._view = DecodeView(
                self.name,
                self.requests,
                self.context_tokens,
                self.capacity_tokens,
                tuple(self._present.values()),
                tuple(self._coming.values()),
            )
        return self._view

    @property
    def requests(self) -> int:
        """Requests here or on their way."""
        return len(self._members) + len(self._waiting) + self.promised_requests

    @property
    def context_tokens(self) -> int:
        """KVCache tokens here (as of the batch's last change) or on their way."""
        here = self._context_tokens + self.promised_tokens
        return here + sum(member.cached_tokens for member in self._waiting) if self._waiting else here

    def promise(self, traced: TracedRequest, starts_s: float) -> None:
        """Count a request that was placed here and is still being prefilled; it is expected at `starts_s`."""
        request = traced.request
        self.promised_requests += 1
        self.promised_tokens += request.input_tokens
        self._coming[request.id] = ServedView(request.id, request.input_tokens, starts_s)
        self._view = None

    def break_promise(self, traced: TracedRequest) -> None:
        """A promised request goes elsewhere, or is refused."""
        self.promised_requests -= 1
        self.promised_tokens -= traced.request.input_tokens
        del self._coming[traced.request.id]
        self._view = None

    def die(self) -> None:
        """Stop with the step under way; whoever is here is lost, and said to be."""
        self.alive = False
        self._wake()

    def join(self, traced: TracedRequest, shown_tokens: int = 0, *, resumed: bool = False) -> None:
        """A request's KVCache is in GPU memory: it joins at the next step boundary.

        Args:
            traced: the request.
            shown_tokens: tokens its user has seen; with none, joining shows the one that prefill computed.
            resumed: whether it decoded elsewhere before, and prefill computed one more token than was seen.
        """
        self.break_promise(traced)
        request = traced.request
        self._present[request.id] = ServedView(request.id, request.input_tokens, self._env.now)
        self._waiting.append(_Member(traced, request.input_tokens, shown_tokens, 0, resumed))
        self._wake()

    def _wake(self) -> None:
        """Something changed: an idle instance looks at once, a stretch that runs ends with the step under way.

        Where memory is full, joining has to wait for somebody to finish.
        """
        if self._stretch is None:
            if self._timer is None:
                self._wait(0.0)
        elif not self._shortened and (self._may_join or not self.alive):
            self._shortened = True
            start_s, pace, steps = self._stretch
            begun = pace.steps_within(self._env.now - start_s) + 1
            if begun < steps:
                self._stretch = (start_s, pace, begun)
                self._wait(max(start_s + pace.seconds(begun) - self._env.now, 0.0))

    def _wait(self, seconds: float) -> None:
        self._timer = self._env.timeout(seconds)
        self._timer.callbacks.append(self._on_time)

    def _on_time(self, timer: simpy.Event) -> None:
        """The stretch is over, or somebody came to an idle instance: on to the next stretch."""
        if timer is not self._timer:
            return  # a stretch that was cut short
        self._view = None
        if self._stretch is not None:
            self._close(*self._stretch)
        self._stretch = self._timer = None
        if not self.alive:
            self._lose_everybody()
            return
        self._admit()
        self._make_room()  # before anything is counted: the stretch is that of those who stay
        if self._members:
            decode, batch, now_s = self._model.decode, len(self._members), self._env.now
            pace = Steady(decode.step_s(batch, self._context_tokens), decode.step_growth_s(batch))
            steps = pace.steps_before(self._steps_until_change(), self.horizon_s, now_s)
            self._stretch, self._shortened, self._may_join = (now_s, pace, steps), False, not self._waiting
            self._wait(pace.seconds(steps))

    def tokens_shown(self) -> dict[int, int]:
        """How many tokens each request here has received by now, those of the stretch under way included."""
        done = 0
        if self._stretch is not None:
            start_s, pace, steps = self._stretch
            done = min(steps, pace.steps_within(self._env.now - start_s - ROUNDING_S))
        shown = {member.traced.request.id: member.produced_tokens for member in self._waiting}
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

    def _lose_everybody(self) -> None:
        """The instance is dead: its KVCache is gone, the tokens it has shown are not."""
        for member in (*self._members.values(), *self._waiting):
            running = member.traced.request.id in self._members
            shown = member.produced_tokens + (self._step - member.joined_step if running else 0)
            if self._lost is not None:
                self._lost(member.traced, shown)
        self._members.clear()
        self._waiting.clear()

    def _start(self, member: _Member) -> None:
        request = member.traced.request
        if member.resumed:  # a token appears without a step of this batch
            self._log(
                DecodeStretch(
                    at_s=self._env.now,
                    instance=self.name,
                    start_s=self._env.now,
                    steps=1,
                    first_step_s=0.0,
                    step_growth_s=0.0,
                    request_ids=(request.id,),
                )
            )
            member.produced_tokens += 1
            member.resumed = False
        if member.produced_tokens == 0:
            self._log(FirstToken(at_s=self._env.now, request_id=request.id))
            member.produced_tokens = 1  # prefill computed it
        remaining = member.traced.output_tokens - member.produced_tokens
        if remaining <= 0:
            self._finish(request.id, member.produced_tokens)
            return
        member.joined_step = self._step
        self._members[request.id] = member
        self._context_tokens += member.cached_tokens
        heapq.heappush(self._finishing, (self._step + remaining, request.id))

    def _steps_until_change(self) -> int:
        """Steps until the first member finishes or memory is full; at least one."""
        finish = self._finishing[0][0] - self._step
        room = (self.capacity_tokens - self._context_tokens) // len(self._members)
        return max(1, min(finish, room))

    def _make_room(self) -> None:
        """When not even one more token a request fits, the newest member goes back to host memory.

        Who is alone then has outgrown the instance, and is rejected.
        """
        while self._members and self._context_tokens + len(self._members) > self.capacity_tokens:
            member = self._push_out()
            if self._members:
                self._waiting.appendleft(member)
            else:
                self._reject(member)
                self._admit()

    def _push_out(self) -> _Member:
        request_id, member = self._members.popitem()
        done = self._step - member.joined_step
        self._context_tokens -= member.cached_tokens + done
        member.cached_tokens += done
        member.produced_tokens += done
        self._finishing = [entry for entry in self._finishing if entry[1] != request_id]
        heapq.heapify(self._finishing)
        return member

    def _reject(self, member: _Member) -> None:
        request_id = member.traced.request.id
        del self._present[request_id]
        reason = (
            f"its KVCache of {member.cached_tokens} tokens cannot grow: {self.name} holds {self.capacity_tokens}"
        )
        self._log(Rejected(at_s=self._env.now, request_id=request_id, stage="capacity", reason=reason))

    def _close(self, start_s: float, pace: Steady, steps: int) -> None:
        """Write the stretch down and let finished members go."""
        self._log(
            DecodeStretch(
                at_s=self._env.now,
                instance=self.name,
                start_s=start_s,
                steps=steps,
                first_step_s=pace.first_s,
                step_growth_s=pace.growth_s,
                request_ids=tuple(self._members),
            )
        )
        self._step += steps
        self._context_tokens += len(self._members) * steps
        while self._finishing and self._finishing[0][0] <= self._step:
            _, request_id = heapq.heappop(self._finishing)
            member = self._members.pop(request_id)
            self._context_tokens -= member.cached_tokens + self._step - member.joined_step
            self._finish(request_id, member.traced.output_tokens)

    def _finish(self, request_id: int, output_tokens: int) -> None:
        del self._present[request_id]
        self._log(Finished(at_s=self._env.now, request_id=request_id, output_tokens=output_tokens))
