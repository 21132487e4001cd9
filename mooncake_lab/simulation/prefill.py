"""A prefill instance in virtual time: a queue, a prefix cache, and computation one prompt after the other."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_lab.cluster import Event, PrefillDone, PrefillDropped, PrefillSlotFree, PrefillStarted, TierRead
from mooncake_lab.perf import CppGroup, LatencyModel, cpp_finish_s
from mooncake_lab.simulation.event_loop import EventLoop
from mooncake_lab.simulation.kv_transfer import KVTransfer, PrefillJob
from mooncake_lab.simulation.pool import PrefixPool


@dataclass(frozen=True, slots=True)
class PrefillService:
    """The clock of a prefill instance."""

    model: LatencyModel
    group: CppGroup | None = None
    """The nodes that compute a prompt in turns; None is one node that computes it whole."""

    def finish_s(
        self, tokens: int, reused_tokens: int, ssd_tokens: int = 0, free_s: Sequence[float] = ()
    ) -> list[float]:
        """In how many seconds each node is done with a prompt that begins now; the last one ends it.

        A single node is done when the prompt is. The first of a group can begin the next prompt when it is done
        with this one, so that the pipeline stays full (arXiv §5.1).

        Args:
            tokens: of the prompt.
            reused_tokens: of its prefix.
            ssd_tokens: those of the reused that have to be read from SSD.
            free_s: in how many seconds each node of a group is done with the prompt before.
        """
        if self.group is None:
            return [self._read_beside(self.model.prefill.seconds(tokens, reused_tokens), ssd_tokens)]
        columns = cpp_finish_s(self.group, tokens, reused_tokens, free_s=free_s)
        done_s = [column[-1] for column in columns]
        waited_s = self._read_beside(done_s[-1], ssd_tokens) - done_s[-1]
        return [each_s + waited_s for each_s in done_s]

    def _read_beside(self, compute_s: float, ssd_tokens: int) -> float:
        """Seconds of a computation beside which a prefix is read from SSD.

        Layer `l` can be computed when it was read, and is computed while the next ones are read: as in arXiv
        §5.2, where this overlap is described for DRAM. All layers are equal, so what is not hidden is one layer of
        the shorter of the two.
        """
        if not ssd_tokens:
            return compute_s
        read_s = self.model.ssd_load_s(ssd_tokens)
        return max(compute_s, read_s) + min(compute_s, read_s) / self.model.shape.layers


class PrefillInstance:
    """Computes prompts in order of arrival, reusing the prefix its cache holds when it starts.

    One at a time on a single node; on a group of nodes the next one starts when the first node is done with it.
    It idles only while the prefix of the next one is on its way, and with `overtaking` not even then, if another
    prompt waits (I4).
    """

    def __init__(
        self,
        loop: EventLoop,
        name: str,
        service: PrefillService,
        pool: PrefixPool,
        transfer: KVTransfer,
        report: Callable[[Event], None],
        *,
        overtaking: bool = False,
    ) -> None:
        self.name = name
        self.up = True
        self._loop = loop
        self._service = service
        self._pool = pool
        self._transfer = transfer
        self._report = report
        self._overtaking = overtaking
        self._queue: deque[PrefillJob] = deque()
        self._idle = True  # and not about to look into the queue
        self._free_at_s: list[float] = []

    def stop(self) -> None:
        """Stop at once; what is queued or running here is never finished."""
        self.up = False
        self._queue.clear()

    def submit(self, job: PrefillJob) -> None:
        """Queue a placed request."""
        self._queue.append(job)
        job.fetched = self._wake
        self._wake()

    def _wake(self) -> None:
        """An idle instance looks into its queue, after all that happens at this moment."""
        if self._idle:
            self._idle = False
            self._loop.call_later(0.0, self._begin)

    def _next(self) -> PrefillJob | None:
        """The one to compute now, taken out of the queue; None where all that may start wait for their prefix.

        Cancelled ones are dropped on the way.
        """
        place = 0
        while place < len(self._queue):
            job = self._queue[place]
            if job.cancelled:
                del self._queue[place]
                self._report(PrefillDropped(at_s=self._loop.now_s, attempt=job.attempt, worker=self.name))
            elif not job.fetching:
                del self._queue[place]
                return job
            elif self._overtaking:
                place += 1
            else:
                return None
        return None

    def _begin(self) -> None:
        """Start the next prompt that can start."""
        job = self._next()
        if job is None:
            self._idle = True
            return
        request, now_s = job.request, self._loop.now_s
        self._report(PrefillStarted(at_s=now_s, attempt=job.attempt, worker=self.name))
        found = self._pool.reuse(self.name, request)
        reused = min(found.blocks * request.block_size_tokens, request.input_tokens - 1)
        from_ssd = min(found.from_ssd * request.block_size_tokens, reused)
        free_s = [max(0.0, at_s - now_s) for at_s in self._free_at_s]
        finish_s = self._service.finish_s(request.input_tokens, reused, from_ssd, free_s)
        self._transfer.stream(job, finish_s[-1])  # while the next layers are computed
        self._loop.call_later(finish_s[-1], self._done, job, now_s, reused, from_ssd)
        if len(finish_s) > 1:
            self._free_at_s = [now_s + each_s for each_s in finish_s]
            self._loop.call_later(finish_s[0], self._slot_free)

    def _slot_free(self) -> None:
        """The first node of a group can begin the next prompt."""
        if self.up:
            self._report(PrefillSlotFree(at_s=self._loop.now_s, worker=self.name))
            self._begin()

    def _done(self, job: PrefillJob, start_s: float, reused: int, from_ssd: int) -> None:
        """A prompt is computed, unless its instance failed meanwhile."""
        if not self.up:
            return
        now_s, request = self._loop.now_s, job.request
        if from_ssd:
            size = from_ssd * self._service.model.shape.kv_bytes_per_token
            self._report(TierRead(at_s=now_s, attempt=job.attempt, worker=self.name, start_s=start_s, bytes=size))
        self._pool.keep(self.name, request)
        self._report(
            PrefillDone(
                at_s=now_s,
                attempt=job.attempt,
                worker=self.name,
                start_s=start_s,
                computed_tokens=request.input_tokens - reused,
                reused_tokens=reused,
            )
        )
        if not job.cancelled:
            self._transfer.finish(job)
        if not self._free_at_s:
            self._begin()
