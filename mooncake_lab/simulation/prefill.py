"""A prefill instance in virtual time: a queue, a prefix cache, and computation one prompt after the other."""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import simpy

from mooncake_lab.conductor import Placement, PrefillView
from mooncake_lab.core import Prefilled, Record, Request, TracedRequest
from mooncake_lab.simulation.pool import PrefixPool
from mooncake_lab.simulation.service import PrefillService

_TICKS_PER_S: Final = 2**80
"""The backlog is counted in whole ticks: every float of at least 4 ns is a whole number of them, so that the count
is the exact sum of what is queued, and 0 when nothing is."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A placed request on its way through prefill."""

    traced: TracedRequest
    placement: Placement
    believed_s: float
    """How long the Conductor thinks its prefill takes."""
    fetched: simpy.Event | None
    """Happens when the prefix blocks that come from elsewhere are here."""

    @property
    def is_ready(self) -> bool:
        """Whether all that it waits for is here."""
        return self.fetched is None or self.fetched.processed


class PrefillInstance:
    """Computes prompts in order of arrival, reusing the prefix its cache holds when it starts.

    One at a time on a single node; on a group of nodes the next one starts when the first node is done with it.
    It idles only while the prefix of the next one is on its way, and with `overtaking` not even then, if another
    prompt waits (I4).
    """

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        service: PrefillService,
        pool: PrefixPool,
        *,
        log: Callable[[Record], None],
        started: Callable[[Job, float], None],
        rose: Callable[[Request, str, float, int], None],
        computed: Callable[[Job], None],
        wanted: Callable[[Job], bool],
        overtaking: bool = False,
    ) -> None:
        self.name = name
        self.alive = True
        self.queued_requests = 0
        self.assigned_requests = 0
        self._env = env
        self._service = service
        self._pool = pool
        self._log = log
        self._started = started
        self._rose = rose
        self._computed = computed
        self._wanted = wanted
        self._overtaking = overtaking
        self._queue: deque[Job] = deque()
        self._awake: simpy.Event = env.event()
        self._queued_ticks = 0
        self._queued_s = 0.0
        self._running_until_s = 0.0
        self._free_at_s: list[float] = []
        env.process(self._live())

    def view(self, matched_blocks: int, outgoing_flows: int, now_s: float) -> PrefillView:
        """What the Conductor may know of this instance now; the backlog is what it believes to be left.

        Of a group it believes that prompts follow one another, though they overlap by the drain of a pipeline.
        """
        running_s = self._running_until_s - now_s
        return PrefillView(
            self.name,
            self._queued_s + running_s if running_s > 0 else self._queued_s,
            self.queued_requests,
            self.assigned_requests,
            matched_blocks,
            outgoing_flows,
        )

    def die(self) -> None:
        """Stop at once; what is queued or running here is never finished."""
        self.alive = False
        self._queue.clear()

    def submit(self, job: Job) -> None:
        """Queue a placed request."""
        self.queued_requests += 1
        self.assigned_requests += 1
        self._count(job, 1)
        self._queue.append(job)
        if job.fetched is not None:
            assert job.fetched.callbacks is not None  # noqa: S101  # nothing arrives at the moment it is asked for
            job.fetched.callbacks.append(self._wake)
        self._wake()

    def _count(self, job: Job, sign: int) -> None:
        """Add a job to the believed backlog, or take it off (-1), without the residue that floats would leave.

        A residue of 1e-16 s would decide between idle instances.
        """
        self._queued_ticks += sign * int(job.believed_s * _TICKS_PER_S)
        self._queued_s = self._queued_ticks / _TICKS_PER_S

    def _wake(self, _: simpy.Event | None = None) -> None:
        if not self._awake.triggered:
            self._awake.succeed()

    def _next(self) -> Job | None:
        """The one to compute now, taken out of the queue; None where all that may start wait for their prefix.

        Those that a death has sent elsewhere are forgotten on the way.
        """
        place = 0
        while place < len(self._queue):
            job = self._queue[place]
            if not self._wanted(job):
                del self._queue[place]
                self._count(job, -1)
                self.queued_requests -= 1
            elif job.is_ready:
                del self._queue[place]
                return job
            elif self._overtaking:
                place += 1
            else:
                return None
        return None

    def _live(self) -> Generator[simpy.Event, Any, None]:
        while self.alive:
            job = self._next()
            if job is None:
                self._awake = self._env.event()
                yield self._awake
                continue
            self._count(job, -1)
            self._running_until_s = self._env.now + job.believed_s
            yield self._start(job)
            self._running_until_s = self._env.now

    def _start(self, job: Job) -> simpy.Event:
        """Begin with a prompt; what comes back happens when the next one can begin."""
        request, now_s = job.traced.request, self._env.now
        found = self._pool.reuse(self.name, request)
        reused = min(found.blocks * request.block_size_tokens, request.input_tokens - 1)
        from_ssd = min(found.from_ssd * request.block_size_tokens, reused)
        free_s = [max(0.0, at_s - now_s) for at_s in self._free_at_s]
        finish_s = self._service.finish_s(request.input_tokens, reused, from_ssd, free_s)
        self._started(job, finish_s[-1])  # layers stream to the decode instance while the next ones compute
        done = self._env.timeout(finish_s[-1])
        done.callbacks.append(partial(self._done, job, now_s, reused, from_ssd))
        if len(finish_s) == 1:
            return done
        self._free_at_s = [now_s + each_s for each_s in finish_s]
        return self._env.timeout(finish_s[0])

    def _done(self, job: Job, start_s: float, reused: int, from_ssd: int, _: simpy.Event) -> None:
        """A prompt is computed, unless its instance died meanwhile."""
        if not self.alive:
            return
        request = job.traced.request
        if from_ssd:
            self._rose(request, self.name, start_s, from_ssd)
        self._pool.keep(self.name, request)
        self._log(
            Prefilled(
                at_s=self._env.now,
                request_id=request.id,
                instance=self.name,
                start_s=start_s,
                computed_tokens=request.input_tokens - reused,
                reused_tokens=reused,
            )
        )
        self.queued_requests -= 1
        self._computed(job)
