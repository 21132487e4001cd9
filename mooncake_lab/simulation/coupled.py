"""A coupled instance in virtual time: prefill and decode on the same GPUs, under any batching policy.

It asks its policy for a plan and runs it as one iteration. Where the policy would plan the same again (the same
decodes, the same piece of a prompt), the iterations up to the next change are one formula and one event, so that
an hour of traffic takes seconds and no token is lost.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias, final

from msgspec.structs import replace

from mooncake_lab.batching import CountedBlocks, Instance, Plan, Progress, Segment
from mooncake_lab.cluster import Attempt, CoupledPool, Event, events
from mooncake_lab.cluster.iteration import CoupledRequest, iteration_events, preemptions
from mooncake_lab.core import BlockKey, CacheChanged, Request, TracedRequest
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.clock import EventLoop, Stretch, pace_of
from mooncake_lab.store import BlockStore, Stored
from mooncake_lab.store.eviction import make_policy


@final
class CachedBlocks:
    """The GPU memory of an instance with prefix caching, a `BlockSpace`. Mutable: requests take and give blocks.

    Computed prompts stay until their room is needed (vLLM's automatic prefix caching). Policies count blocks of
    the memory, the cache those of the trace, each a whole number of memory blocks. A request shares a whole trace
    block of its prompt once it is computed, as in vLLM and in the engine; a partial one is never shared. A block
    is pinned as often as running requests use it.

    Args:
        pool: of the instance: its memory and how it is evicted.
        block_size_tokens: tokens per block of the trace.
        request_of: gives a request by its id.
    """

    def __init__(self, pool: CoupledPool, block_size_tokens: int, request_of: Callable[[int], Request]) -> None:
        self._capacity_blocks = pool.device_tokens // pool.memory_block_tokens
        self._block = pool.memory_block_tokens
        self._trace_block = block_size_tokens
        capacity_tokens = self._capacity_blocks * self._block
        policy = make_policy(pool.eviction, max(1, capacity_tokens // block_size_tokens))
        self._store = BlockStore[None](capacity_tokens, policy)
        self._request_of = request_of
        self._found: dict[int, int] = {}  # trace blocks that each waiting request was shown with
        self._held: dict[int, int] = {}  # memory blocks of each running request
        self._shared: dict[int, tuple[BlockKey, ...]] = {}  # trace blocks, of those, that the cache knows
        self._complete: set[int] = set()  # running requests that share all of their prompt
        self._private_blocks = 0
        self._changes: dict[BlockKey, bool] = {}  # since they were taken: whether a block came, or else left

    @property
    def free_blocks(self) -> int:
        """Blocks that no running request holds; what is kept only for reuse counts as free."""
        pinned = self._store.pinned_bytes // self._block
        return max(0, self._capacity_blocks - pinned - self._private_blocks)

    def match(
        self, waiting: Sequence[Progress], running: Sequence[Progress]
    ) -> tuple[Sequence[Progress], Sequence[Progress]]:
        """Waiting requests with the prefix that they would find, running ones with the blocks that they share."""
        self._found.clear()
        return [self._with_prefix(request) for request in waiting], [self._with_shared(r) for r in running]

    def acquire(self, requests: Sequence[Progress]) -> None:
        """Count new blocks; a request that held none uses its prefix from the cache."""
        for progress in requests:
            request_id = progress.request_id
            if request_id not in self._held:
                keys = self._request_of(request_id).block_keys[: self._found.get(request_id, 0)]
                for key in keys:
                    self._store.touch(key)
                    self._store.pin(key)
                self._shared[request_id] = keys
                self._private_blocks -= self._in_memory_blocks(request_id)
            self._private_blocks += progress.held_blocks - self._held.get(request_id, 0)
            self._held[request_id] = progress.held_blocks

    def publish(self, requests: Sequence[Progress]) -> None:
        """Evict what is in the way of the new tokens, and share the whole blocks of prompts that are computed."""
        room = self._store.capacity_bytes - self._private_blocks * self._block
        while self._store.used_bytes > room and (gone := self._store.evict()) is not None:
            self._left(gone[0])
        for progress in requests:
            request_id = progress.request_id
            if request_id in self._complete:
                continue
            if progress.decoding:
                self._complete.add(request_id)
            request = self._request_of(request_id)
            computed = min(progress.cached_tokens, request.input_tokens) // self._trace_block
            if computed > len(self._shared[request_id]):
                self._private_blocks += self._in_memory_blocks(request_id)
                self._shared[request_id] = self._share(request, len(self._shared[request_id]), computed)
                self._private_blocks -= self._in_memory_blocks(request_id)

    def _share(self, request: Request, held: int, computed: int) -> tuple[BlockKey, ...]:
        """Share the computed blocks of a prompt beyond those held; all that the request holds now."""
        keys, changes = request.block_keys[:computed], self._changes
        for position in range(held, len(keys)):
            key = keys[position]
            put = self._store.put(key, None, size_bytes=self._trace_block, position=position)
            if isinstance(put, Stored) and not put.was_held:
                for gone, _ in put.evicted:
                    self._left(gone)
                if changes.pop(key, True):
                    changes[key] = True  # else it left and is back
            self._store.pin(key)
        return keys

    def found_tokens(self, request: Progress) -> int:
        """Tokens of the trace blocks that a waiting request would find now."""
        return self._found_now(request).cached_tokens

    def fits(self, request: Progress, kept_free_blocks: int = 0) -> bool:
        """Whether the free blocks hold the known tokens of a waiting request, beside those that others use."""
        used = self._found_now(request).held_blocks
        return -(-request.num_tokens // self._block) - used + kept_free_blocks <= self.free_blocks

    def allocate(self, request: Progress, tokens: int) -> bool:
        """Count the blocks of the first `tokens` tokens, and share the whole trace blocks among them."""
        request_id, blocks = request.request_id, -(-tokens // self._block)
        held = self._held.get(request_id)
        if held is None:
            held = self._found_now(request).held_blocks
        if blocks - held > self.free_blocks:
            return False
        self.acquire([replace(request, held_blocks=max(blocks, held))])
        self.publish([replace(request, cached_tokens=tokens)])
        return True

    def free(self, request: Progress) -> None:
        """Free all blocks of a request, as `release` does."""
        self.release(request)

    def release(self, request: Progress, *, swap: bool = False) -> None:  # noqa: ARG002  # host memory is not modelled
        """Free the blocks; shared ones stay in the cache while there is room."""
        request_id = request.request_id
        if request_id not in self._held:
            return
        self._private_blocks -= self._held.pop(request_id) - self._in_memory_blocks(request_id)
        for key in self._shared.pop(request_id):
            self._store.unpin(key)
        self._complete.discard(request_id)

    def take_changes(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Trace blocks that came and those that left since this was asked last."""
        if not self._changes:
            return (), ()
        changes, self._changes = self._changes.items(), {}
        return tuple([key for key, came in changes if came]), tuple([key for key, came in changes if not came])

    def check(self, running: Collection[Progress]) -> None:
        """Verify the cache, and that the running requests hold what is not free.

        Raises:
            AssertionError: naming what is lost or counted twice.
        """
        self._store.check()
        expected = {request.request_id: request.held_blocks for request in running}
        assert self._held == expected, f"blocks are held as {self._held}; the running hold {expected}"  # noqa: S101  # our own mistake
        private = sum(held - self._in_memory_blocks(request_id) for request_id, held in expected.items())
        assert self._private_blocks == private, f"{self._private_blocks} private blocks, counted {private}"  # noqa: S101  # likewise

    def _with_prefix(self, progress: Progress) -> Progress:
        request = self._request_of(progress.request_id)
        keys = request.block_keys[: (request.input_tokens - 1) // self._trace_block]  # a token is left to compute
        found = self._store.match_prefix(keys)
        tokens = found * self._trace_block
        if tokens <= progress.cached_tokens:
            return progress
        self._found[progress.request_id] = found
        return replace(progress, cached_tokens=tokens, held_blocks=self._in_use(keys[:found], 1))

    def _found_now(self, shown: Progress) -> Progress:
        """A waiting request with the prefix that is left of the one with which it was shown."""
        self._found.pop(shown.request_id, None)
        return self._with_prefix(replace(shown, cached_tokens=0, held_blocks=0))

    def _with_shared(self, progress: Progress) -> Progress:
        keys = self._shared.get(progress.request_id)
        shared = self._in_use(keys, 2) if keys else 0
        return replace(progress, shared_blocks=shared) if shared else progress

    def _in_use(self, keys: Sequence[BlockKey], requests: int) -> int:
        """Memory blocks of the trace blocks that at least `requests` running requests use.

        A request that uses a block uses all before it, so these are the leading ones.
        """
        pins, used = self._store.pins, 0
        for key in keys:
            if pins.get(key, 0) < requests:
                break
            used += 1
        return used * (self._trace_block // self._block)

    def _in_memory_blocks(self, request_id: int) -> int:
        """Memory blocks of what a request shares."""
        return len(self._shared[request_id]) * (self._trace_block // self._block)

    def _left(self, key: BlockKey) -> None:
        if not self._changes.pop(key, False):
            self._changes[key] = False  # else it came and is gone again


@dataclass(slots=True, kw_only=True, eq=False)
class _Request(CoupledRequest):
    request: Request
    """The request as it arrived."""


Parts: TypeAlias = Sequence[tuple[_Request, Segment]]
"""The requests of a plan beside their segments."""


class CoupledInstance:
    """Serves whole requests with one batching policy.

    Args:
        loop: the virtual time.
        name: of the instance.
        model: how long iterations take (its hybrid step), and what beginning a prompt costs.
        pool: its policy, and the limits of its iterations and its memory.
        block_size_tokens: tokens per block of the trace, the unit of prefix caching.
        max_tokens_of: the most tokens that the answer to a request may have.
        report: told what happened.
    """

    def __init__(
        self,
        loop: EventLoop,
        name: str,
        model: LatencyModel,
        pool: CoupledPool,
        block_size_tokens: int,
        max_tokens_of: Callable[[TracedRequest], int],
        report: Callable[[Event], None],
    ) -> None:
        self.name = name
        self.up = True
        limits = pool.limits
        self.capacity_tokens = limits.capacity_blocks * limits.block_size_tokens
        """KVCache tokens that fit."""
        self.horizon_s = inf
        """When the run is cut: iterations that repeat end with the last one before it, as in `DecodeInstance`."""
        self._loop = loop
        self._model = model
        self._report = report
        self._max_tokens_of = max_tokens_of
        self._assigned_requests = 0
        self._requests: dict[int, _Request] = {}  # in the order in which they came
        self._cache = CachedBlocks(pool, block_size_tokens, self._request_of) if pool.prefix_caching else None
        blocks = CountedBlocks(limits.capacity_blocks) if self._cache is None else self._cache
        self.instance = Instance(pool.batching, limits, blocks)
        self._stretch: Stretch | None = None  # that runs
        self._plan = Plan()  # of its iterations
        self._parts: Parts = ()
        self._looks = False  # whether it is about to see that a request came
        self._leaving: dict[int, str] = {}  # why each client leaves whose request is in the iteration under way
        self._timers = 0  # ends of stretches that were set; only the last one counts

    def _request_of(self, request_id: int) -> Request:
        return self._requests[request_id].request

    def cut(self) -> None:
        """Report the iterations of the stretch under way that have ended, as `DecodeInstance` does."""
        if self._stretch is not None and (ended := self._stretch.steps_ended(self._loop.now_s)):
            first, others = self._stretch.split(ended)
            self._close(first, first.end_s, goes_on=True)
            self._stretch = others
            self._parts = [
                (request, replace(segment, cached_tokens=segment.cached_tokens + ended * segment.new_tokens))
                for request, segment in self._parts
            ]

    def tokens_shown(self) -> dict[int, int]:
        """How many tokens each request here has received by now, those of the iterations under way included."""
        here = (*(each.request_id for each in self.instance.waiting), *self.instance.running)
        shown = {request_id: self._requests[request_id].generated_tokens for request_id in here}
        if self._stretch is not None:
            done = self._stretch.steps_ended(self._loop.now_s)
            for segment in self._plan.segments:
                shown[segment.request_id] += done * segment.emits
        return {request_id: tokens for request_id, tokens in shown.items() if tokens}

    def submit(self, attempt: Attempt, traced: TracedRequest, *, shown_tokens: int = 0) -> None:
        """Queue a placed request; the iteration under way ends first.

        Args:
            attempt: of the request.
            traced: the request as it arrived.
            shown_tokens: tokens that its client has from an instance that failed; they are computed like its
                prompt.
        """
        request = traced.request
        self._requests[request.id] = _Request(
            attempt=attempt,
            request=request,
            output_tokens=traced.output_tokens,
            generated_tokens=shown_tokens,
            shown_tokens=shown_tokens,
        )
        self.instance.enqueue(
            Progress(
                request_id=request.id,
                arrival=self._assigned_requests,
                prompt_tokens=request.input_tokens,
                generated_tokens=shown_tokens,
                max_new_tokens=self._max_tokens_of(traced),
            )
        )
        self._assigned_requests += 1
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._looks and (self._stretch is None or self._stretch.steps > 1):
            self._looks = True
            self._loop.call_later(0.0, self._look)  # after all that arrives at this moment

    def leave(self, request_id: int, reason: str) -> bool:
        """A client leaves, as at a `DecodeInstance`: an iteration under way that its request is in ends first."""
        if self._stretch is None or all(segment.request_id != request_id for segment in self._plan.segments):
            return False
        self._leaving[request_id] = reason
        self._shorten(self._stretch)
        return True

    def remove(self, attempt: Attempt) -> None:
        """An attempt that was cancelled is not here any more, if it was; no iteration under way has it."""
        request = self._requests.get(attempt.request_id)
        if request is None or request.attempt != attempt:
            return
        del self._requests[attempt.request_id]
        self.instance.finish(attempt.request_id)
        if request.generated_tokens == request.shown_tokens:
            self._report(events.PrefillDropped(at_s=self._loop.now_s, attempt=attempt, instance=self.name))
        self._look_soon()  # another request may have its place

    def _report_leaving(self) -> None:
        leaving, self._leaving = self._leaving, {}
        for request_id, reason in leaving.items():
            if request_id in self._requests:  # else the answer is complete
                self._report(events.Cancelled(at_s=self._loop.now_s, request_id=request_id, reason=reason))

    def stop(self) -> None:
        """Stop: a step that decodes ends, as in `DecodeInstance`; one of prompts alone is lost at once.

        The requests here are lost then, the tokens that were shown are not.
        """
        self.up = False
        if self._stretch is not None and any(segment.kind == "decode" for segment in self._plan.segments):
            self._shorten(self._stretch)
        else:
            self._fail_all()

    def _fail_all(self) -> None:
        if self._leaving:
            self._report_leaving()
        lost, self._requests, self._stretch = self._requests, {}, None
        self._timers += 1
        self.instance.waiting.clear()
        self.instance.running.clear()
        for request in lost.values():
            self._fail(request, "its instance failed", retriable=True)

    def _look(self) -> None:
        """A request came: an idle instance begins, and the iteration under way is the last of its stretch."""
        if not self._looks:
            return  # the plan that was made meanwhile knows of it
        self._looks = False
        if self._stretch is not None:
            self._shorten(self._stretch)
        elif self.up:
            self._begin()

    def _begin(self) -> None:
        """Run a plan once, or as often as it stays the plan.

        Raises:
            ValueError: when the policy plans nothing for requests that run.
        """
        self._looks = False
        while not (plan := self._planned()).segments:
            if plan.is_empty:
                if self.instance.running:
                    running = len(self.instance.running)
                    raise ValueError(f"{self.instance.policy} plans nothing for {running} requests that run")
                return
        parts = [(self._requests[segment.request_id], segment) for segment in plan.segments]
        begun = sum([not request.begun for request, segment in parts if segment.kind == "prefill"])
        pace, start_s = pace_of(self._model, plan, begun), self._loop.now_s
        steps = pace.steps_before(self._steady_steps(plan, parts), self.horizon_s, start_s)
        self._plan, self._parts = plan, parts
        self._run(Stretch(start_s, pace, steps), pace.seconds(steps))

    def _run(self, stretch: Stretch, seconds: float) -> None:
        """Let a stretch end after these seconds."""
        self._stretch = stretch
        self._timers += 1
        self._loop.call_later(seconds, self._end, self._timers)

    def _shorten(self, stretch: Stretch) -> None:
        """The iteration under way is the last one."""
        shorter = stretch.cut(self._loop.now_s)
        if shorter.steps < stretch.steps:
            self._run(shorter, max(0.0, shorter.end_s - self._loop.now_s))

    def _end(self, timer: int) -> None:
        """A stretch is over, unless it was cut short."""
        if timer != self._timers or self._stretch is None:
            return
        self._close(self._stretch, self._loop.now_s)
        if self._leaving:
            self._report_leaving()
        if self.up:
            self._begin()
        else:
            self._fail_all()

    def _steady_steps(self, plan: Plan, parts: Parts) -> int:
        """How often the plan repeats if no request comes: until the policy changes it, or a request is done.

        With a cache, each iteration of a prompt is reported, since others may find its blocks then.
        """
        steps = self.instance.steady_steps(plan)
        if steps == 1 or (self._cache is not None and any(segment.kind == "prefill" for segment in plan.segments)):
            return 1
        left = [request.output_tokens - request.generated_tokens for request, segment in parts if segment.emits]
        return max(1, min(steps, min(left, default=steps)))

    def _close(self, stretch: Stretch, at_s: float, *, goes_on: bool = False) -> None:
        """Report what was computed, and let finished requests go; the plan may be computed once more."""
        self._stretch = None
        self.instance.apply(self._plan, stretch.steps, goes_on=goes_on)
        if self._cache is not None:
            added, removed = self._cache.take_changes()
            if added or removed:
                self._report(CacheChanged(at_s=at_s, instance=self.name, added=added, removed=removed))
        for event in iteration_events(stretch.decoded(self.name, at_s, ()), self._parts):
            self._report(event)
            if isinstance(event, events.RequestDone):
                self.instance.finish(event.attempt.request_id)
                del self._requests[event.attempt.request_id]

    def _planned(self) -> Plan:
        """The next plan; requests that it refuses for ever or preempts are reported."""
        plan = self.instance.plan()
        # first those that waited
        for refusal in sorted(plan.rejected, key=lambda refusal: self._requests[refusal.request_id].begun):
            request = self._requests.pop(refusal.request_id)
            known_tokens = request.request.input_tokens + request.generated_tokens
            stage = "capacity" if known_tokens > self.capacity_tokens else "batching"
            if request.generated_tokens == request.shown_tokens:
                self._report(
                    events.PrefillDropped(at_s=self._loop.now_s, attempt=request.attempt, instance=self.name)
                )
            self._fail(request, refusal.reason, retriable=False, stage=stage)
        for event in preemptions(plan, self.instance.waiting, self._requests, self.name, self._loop.now_s):
            self._report(event)
        return plan

    def _fail(self, request: _Request, reason: str, *, retriable: bool, stage: str = "failed") -> None:
        self._report(
            events.AttemptFailed(
                at_s=self._loop.now_s, attempt=request.attempt, reason=reason, retriable=retriable, stage=stage
            )
        )
