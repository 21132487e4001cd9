"""A prefill and a decode instance in virtual time.

A prefill instance is a queue, a prefix cache, and the computation of prompts; `PrefillOnly` says which prompts
share an iteration. A decode instance batches continuously, with exact token times at few events: between two
changes of the batch, step times follow a formula. A step lasts `constant + per request + per cached token`, and
the cache grows by one token per request and step. So the instance sleeps until the batch changes, and
`SteadyDecodeOnly` says after how many steps. These steps are one `DecodeStretch` event, from which every token's
time follows.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from mooncake_lab.batching import DecodingRequest, PrefillOnly, SteadyDecodeOnly
from mooncake_lab.cluster import Attempt, DecodePool, Event, PrefillPool, events
from mooncake_lab.core import Request
from mooncake_lab.perf import CppGroup, LatencyModel, cpp_finish_s
from mooncake_lab.simulation.clock import EventLoop, Steady, Stretch
from mooncake_lab.simulation.kv_transfer import KVTransfer, PrefillJob
from mooncake_lab.simulation.prefix_caches import PrefixCaches


class PromptPart(msgspec.Struct, frozen=True, gc=False):
    """A prompt in an iteration: its tokens, those of its prefix that are reused, and those of them on SSD."""

    tokens: int
    reused_tokens: int
    ssd_tokens: int


def prefill_finish_s(
    model: LatencyModel, group: CppGroup | None, prompts: Sequence[PromptPart], free_s: Sequence[float] = ()
) -> list[float]:
    """In how many seconds each node is done with the prompts that begin now; the last one ends them.

    A single node computes them in one iteration, whose constant part (reading the weights) they share. The first
    of a group can begin the next prompt when it is done with this one, so that the pipeline stays full (arXiv
    §5.1).

    Args:
        model: of a node.
        group: the nodes that compute a prompt in turns; None is one node that computes it whole.
        prompts: of one iteration; a group computes one.
        free_s: in how many seconds each node of a group is done with the prompt before.
    """
    ssd_tokens = sum([prompt.ssd_tokens for prompt in prompts])
    if group is None:
        compute_s = model.prefill.constant_s * (1 - len(prompts))
        for prompt in prompts:
            compute_s += model.prefill.seconds(prompt.tokens, prompt.reused_tokens)
        return [model.beside_ssd_s(compute_s, ssd_tokens)]
    (prompt,) = prompts
    columns = cpp_finish_s(group, prompt.tokens, prompt.reused_tokens, free_s=free_s)
    done_s = [column[-1] for column in columns]
    waited_s = model.beside_ssd_s(done_s[-1], ssd_tokens) - done_s[-1]
    return [each_s + waited_s for each_s in done_s]


class PrefillInstance:
    """Computes prompts in order of arrival, reusing the prefix its cache holds when it starts.

    A single node computes those that wait in one iteration, up to `pack_tokens`, or one at a time. On a group
    of nodes the next prompt starts when the first node is done with the one before. The instance idles only while
    the prefix of the next prompt is on its way, and with `overtaking` not even then, if another prompt waits (I4).
    """

    def __init__(
        self,
        loop: EventLoop,
        name: str,
        spec: PrefillPool,
        model: LatencyModel,
        group: CppGroup | None,
        caches: PrefixCaches,
        transfer: KVTransfer,
        report: Callable[[Event], None],
    ) -> None:
        self.name = name
        self.up = True
        self._loop = loop
        self._model = model
        self._group = group
        self._caches = caches
        self._transfer = transfer
        self._report = report
        self._policy = PrefillOnly(pack_tokens=spec.pack_tokens)
        self._packs = self._policy.joins(1, 1)  # else prompts are computed alone, and need not be measured before
        self._keeps_prompts = spec.prefix_caching
        self._overtaking = spec.overtaking
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

    def _batch(self) -> list[PrefillJob]:
        """Take the prompts of the next iteration out of the queue, in order of arrival, and drop cancelled ones.

        A prompt whose prefix is on its way holds up those behind it, unless these may overtake it.
        """
        batch, batch_tokens, place = list[PrefillJob](), 0, 0
        while place < len(self._queue) and self._policy.joins(1, batch_tokens):
            job = self._queue[place]
            if job.cancelled:
                del self._queue[place]
                self._report(events.PrefillDropped(at_s=self._loop.now_s, attempt=job.attempt, instance=self.name))
            elif job.fetching:
                if not self._overtaking:
                    break
                place += 1
            else:
                new_tokens = self._new_tokens(job) if self._packs else 1
                if not self._policy.joins(new_tokens, batch_tokens):
                    break
                del self._queue[place]
                batch.append(job)
                batch_tokens += new_tokens
        return batch

    def _new_tokens(self, job: PrefillJob) -> int:
        """Tokens of a prompt that it would compute now."""
        request = job.request
        held = min(self._caches.matched(self.name, request), self._most_blocks(job, ()))
        return request.input_tokens - _part(request, held).reused_tokens

    def _begin(self) -> None:
        """Start the next iteration with the prompts that can start."""
        batch = self._batch()
        if not batch:
            self._idle = True
            return
        now_s = self._loop.now_s
        free_s = [max(0.0, at_s - now_s) for at_s in self._free_at_s]
        parts = list[PromptPart]()
        for job in batch:
            self._report(events.PrefillStarted(at_s=now_s, attempt=job.attempt, instance=self.name))
            found = self._caches.reuse(self.name, job.request, self._most_blocks(job, free_s))
            parts.append(_part(job.request, found.blocks, found.from_ssd))
        finish_s, from_ssd = self._finish_s(parts, free_s), sum([part.ssd_tokens for part in parts])
        if from_ssd:
            self._transfer.read_disk(self.name, from_ssd)
        for job in batch:
            self._transfer.stream(job, finish_s[-1])  # while the next layers are computed
        self._loop.call_later(finish_s[-1], self._done, batch, parts, now_s)
        if self._group is not None:
            self._free_at_s = [now_s + each_s for each_s in finish_s]
            self._loop.call_later(finish_s[0], self._slot_free)

    def _most_blocks(self, job: PrefillJob, free_s: Sequence[float]) -> int:
        """The most blocks to reuse: what is on SSD is computed again where that is faster (FAST'25 Eq. 2)."""
        request, blocks = job.request, job.most_blocks
        in_dram = self._caches.before_ssd(self.name, request) if self._caches.has_ssd else None
        if in_dram is None or in_dram >= blocks:
            return blocks
        held = min(self._caches.matched(self.name, request), blocks)
        read = _part(request, held, self._caches.on_ssd(self.name, request.block_keys[:held]))
        again = _part(request, in_dram)
        return in_dram if self._finish_s([again], free_s)[-1] < self._finish_s([read], free_s)[-1] else blocks

    def _finish_s(self, parts: Sequence[PromptPart], free_s: Sequence[float]) -> list[float]:
        """When each node is done; what is read from SSD waits for what the disk reads for others."""
        finish_s = prefill_finish_s(self._model, self._group, parts, free_s)
        if not sum([part.ssd_tokens for part in parts]):
            return finish_s
        wait_s = self._transfer.disk_wait_s(self.name)
        return [wait_s + each_s for each_s in finish_s]

    def _slot_free(self) -> None:
        """The first node of a group can begin the next prompt."""
        if self.up:
            self._report(events.PrefillSlotFree(at_s=self._loop.now_s, instance=self.name))
            self._begin()

    def _done(self, batch: Sequence[PrefillJob], parts: Sequence[PromptPart], start_s: float) -> None:
        """An iteration is computed, unless its instance failed meanwhile."""
        if not self.up:
            return
        for job, part in zip(batch, parts, strict=True):
            self._end(job, part, start_s)
        self._transfer.finish([job for job in batch if not job.cancelled])
        if self._group is None:
            self._begin()

    def _end(self, job: PrefillJob, part: PromptPart, start_s: float) -> None:
        """A prompt is computed: keep its KVCache, and send the rest of it."""
        now_s, request = self._loop.now_s, job.request
        if part.ssd_tokens:
            size = part.ssd_tokens * self._model.shape.kv_bytes_per_token
            self._report(
                events.TierRead(at_s=now_s, attempt=job.attempt, instance=self.name, start_s=start_s, bytes=size)
            )
        if self._keeps_prompts:
            self._caches.keep(self.name, request)
        self._report(
            events.PrefillDone(
                at_s=now_s,
                attempt=job.attempt,
                instance=self.name,
                start_s=start_s,
                computed_tokens=request.input_tokens - part.reused_tokens,
                reused_tokens=part.reused_tokens,
            )
        )


def _part(request: Request, blocks: int, ssd_blocks: int = 0) -> PromptPart:
    """A prompt that reuses `blocks` leading blocks."""
    size = request.block_size_tokens
    reused = min(blocks * size, request.input_tokens - 1)
    return PromptPart(request.input_tokens, reused, min(ssd_blocks * size, reused))


@dataclass(slots=True, kw_only=True, eq=False)
class _DecodeRequest(DecodingRequest):
    attempt: Attempt
    started: bool = False
    """Whether it was reported as in the batch."""


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
        pool: DecodePool,
        report: Callable[[Event], None],
    ) -> None:
        self.name = name
        self.up = True
        self.capacity_tokens = pool.device_tokens
        self.horizon_s = inf
        """When the run is cut: a stretch ends with the last step before it, so that its tokens are in the log."""
        self._loop = loop
        self._model = model
        self._report = report
        self._decodes = SteadyDecodeOnly[_DecodeRequest](pool.device_tokens, pool.max_requests)
        self._stretch: Stretch | None = None  # that runs
        self._may_shorten = False  # whether joining would cut that stretch short
        self._waits = False  # for the next look
        self._timers = 0  # timers that were set; only the last one counts
        self._leaving: dict[int, str] = {}  # why each client leaves whose request is in the step under way

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
        request = _DecodeRequest(
            request_id=attempt.request_id,
            cached_tokens=context_tokens,
            output_tokens=output_tokens,
            produced_tokens=shown_tokens,
            joining_tokens=int(shows_computed),
            attempt=attempt,
        )
        self._decodes.waiting.append(request)
        self._wake()

    def _wake(self) -> None:
        """Something changed: an idle instance looks at once, a stretch that runs ends with the step under way.

        Where memory is full, a request can only join when another one finishes.
        """
        if self._stretch is None:
            if not self._waits:
                self._wait(0.0)
        elif self._may_shorten or not self.up:
            self._may_shorten = False
            self._shorten(self._stretch)

    def _shorten(self, stretch: Stretch) -> None:
        """The step under way is the last one."""
        shorter = stretch.cut(self._loop.now_s)
        if shorter.steps < stretch.steps:
            self._stretch = shorter
            self._wait(max(shorter.end_s - self._loop.now_s, 0.0))

    def leave(self, request_id: int, reason: str) -> bool:
        """A client leaves: if its request is in the step under way, that ends first, and it is reported then.

        Returns:
            Whether it is in that step.
        """
        if self._stretch is None or request_id not in self._decodes.running:
            return False
        self._leaving[request_id] = reason
        self._shorten(self._stretch)
        return True

    def remove(self, attempt: Attempt) -> None:
        """An attempt that was cancelled is not here any more, if it was; no step is under way that it is in."""
        decodes = self._decodes
        here = (decodes.running.get(attempt.request_id), *decodes.waiting)
        found = next((each for each in here if each is not None and each.attempt == attempt), None)
        if found is None:
            return
        decodes.remove(found)
        if self._stretch is not None:  # behind it, another request may fit
            self._shorten(self._stretch)

    def _report_leaving(self) -> None:
        leaving, self._leaving = self._leaving, {}
        for request_id, reason in leaving.items():
            if request_id in self._decodes.running:  # else the answer is complete
                self._report(events.Cancelled(at_s=self._loop.now_s, request_id=request_id, reason=reason))

    def _wait(self, seconds: float) -> None:
        self._waits = True
        self._timers += 1
        self._loop.call_later(seconds, self._look, self._timers)

    def _look(self, timer: int) -> None:
        """The stretch is over, or a request came to an idle instance: the next stretch begins."""
        if timer != self._timers:
            return  # a stretch that was cut short
        if self._stretch is not None:
            self._close(self._stretch, self._loop.now_s)
        self._stretch, self._waits = None, False
        if self._leaving:
            self._report_leaving()
        if not self.up:
            self._fail_all()
            return
        decodes = self._decodes
        if decodes.waiting:
            self._admit()
        while (outgrown := decodes.make_room()) is not None:
            held = f"its KVCache of {outgrown.cached_tokens} tokens cannot grow"
            self._fail(outgrown, f"{held}: {self.name} holds {self.capacity_tokens}", retriable=False)
            self._admit()
        if decodes.running:
            decode, batch, now_s = self._model.decode, len(decodes.running), self._loop.now_s
            pace = Steady(decode.step_s(batch, decodes.context_tokens), decode.step_growth_s(batch))
            steps = pace.steps_before(decodes.steady_steps(), self.horizon_s, now_s)
            self._stretch = Stretch(now_s, pace, steps)
            self._may_shorten = not decodes.waiting
            self._wait(pace.seconds(steps))

    def cut(self) -> None:
        """Report the steps of the stretch under way that have ended; the others go on as one of their own."""
        if self._stretch is not None and (ended := self._stretch.steps_ended(self._loop.now_s)):
            first, self._stretch = self._stretch.split(ended)
            self._close(first, first.end_s)

    def tokens_shown(self) -> dict[int, int]:
        """How many tokens each request here has received by now, those of the stretch under way included."""
        done = 0 if self._stretch is None else self._stretch.steps_ended(self._loop.now_s)
        return {request_id: tokens for request_id, tokens in self._decodes.produced_tokens(done).items() if tokens}

    def _admit(self) -> None:
        """Let waiting requests join the batch, and report them."""
        for request in self._decodes.admit():
            if not request.started:
                request.started = True
                self._report(events.DecodeStarted(at_s=self._loop.now_s, attempt=request.attempt))
            if request.request_id not in self._decodes.running:
                self._report(events.RequestDone(at_s=self._loop.now_s, attempt=request.attempt))

    def _fail_all(self) -> None:
        """The instance is down: its KVCache is gone."""
        for request in self._decodes.clear():
            self._fail(request, "its decode instance failed", retriable=True)

    def _fail(self, request: _DecodeRequest, reason: str, *, retriable: bool) -> None:
        self._report(
            events.AttemptFailed(
                at_s=self._loop.now_s,
                attempt=request.attempt,
                reason=reason,
                retriable=retriable,
                stage="capacity",
            )
        )

    def _close(self, stretch: Stretch, at_s: float) -> None:
        """Report the stretch, and the requests that are done with it."""
        self._report(stretch.decoded(self.name, at_s, tuple(self._decodes.running)))
        for request in self._decodes.apply(stretch.steps):
            self._report(events.RequestDone(at_s=at_s, attempt=request.attempt))
