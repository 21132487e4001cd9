"""Acts on plans: shows a policy what waits and runs, and moves requests and blocks as it decides."""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from mooncake_lab.batching import BatchingPolicy, Limits, Plan, Progress, Segment
from mooncake_lab.core import block_keys, blocks_for
from mooncake_lab.engine.allocator import BlockAllocator
from mooncake_lab.engine.kvcache import KVSpan
from mooncake_lab.engine.sequence import RunningRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One iteration, ready to run: the plan, what the policy saw, and the requests it is about."""

    plan: Plan
    waiting: tuple[Progress, ...]
    running: tuple[Progress, ...]
    limits: Limits
    work: tuple[tuple[RunningRequest, Segment], ...]
    """Requests with blocks for their new tokens, in the order of the plan."""
    rejected: tuple[tuple[RunningRequest, str], ...]


class Scheduler:
    """The waiting and the running requests of one engine and the blocks they hold. Mutable: it is their keeper.

    Args:
        policy: what decides.
        limits: of the instance; free blocks are counted here.
        allocator: of the engine's KVCache.
        park: copies a request's KVCache out of the engine before its blocks are taken (swapping).
        namespace: names the model in block keys; None reuses no prefixes.
    """

    def __init__(
        self,
        policy: BatchingPolicy,
        limits: Limits,
        allocator: BlockAllocator,
        park: Callable[[RunningRequest], tuple[KVSpan, ...]],
        namespace: bytes | None,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.allocator = allocator
        self._park = park
        self._namespace = namespace
        self.waiting: list[RunningRequest] = []
        self.running: list[RunningRequest] = []
        self._matches: dict[int, list[int]] = {}

    def add(self, request: RunningRequest) -> None:
        """Let a request wait, in order of its id."""
        self._name_blocks(request)
        insort(self.waiting, request, key=_id)

    def schedule(self) -> Schedule:
        """Ask the policy, and do what it says up to running the segments.

        Raises:
            RuntimeError: when the policy does nothing although requests are there.
        """
        self._matches = {}
        waiting = tuple(self._seen_waiting(request) for request in self.waiting)
        wanted = {block for blocks in self._matches.values() for block in blocks}
        running = tuple(self._seen_running(request, wanted) for request in self.running)
        limits = msgspec.structs.replace(self.limits, free_blocks=self.allocator.available)
        plan = self.policy.plan(waiting, running, limits)
        if not (plan.segments or plan.rejected or plan.preempted or plan.swapped):
            ids = [request.id for request in (*self.running, *self.waiting)]
            raise RuntimeError(f"{self.policy} does nothing while requests {ids[:8]} wait or run within {limits}")
        requests = {request.id: request for request in (*self.waiting, *self.running)}
        rejected = tuple((requests[refusal.request_id], refusal.reason) for refusal in plan.rejected)
        for request, _ in rejected:
            self.remove(request)
        self._push_out(plan, requests)
        work = tuple((requests[segment.request_id], segment) for segment in plan.segments)
        self._take_in(work)
        return Schedule(plan=plan, waiting=waiting, running=running, limits=limits, work=work, rejected=rejected)

    def computed(self, request: RunningRequest, new_tokens: int) -> None:
        """Count new tokens as cached, and let others find the blocks they filled."""
        request.cached += new_tokens
        whole = min(request.cached // self.limits.block_size_tokens, len(request.keys))
        for index in range(request.published, whole):
            self.allocator.publish(int(request.table[index]), request.keys[index])
        request.published = max(request.published, whole)

    def shorten(self, schedule: Schedule) -> None:
        """Part of an arriving prefix was lost before its iteration ended: what is left of it counts."""
        for request, _ in schedule.work:
            if request.arriving is not None:
                request.cached = request.reused = request.arriving.tokens
                if not request.cached:
                    request.arriving = None

    def remove(self, request: RunningRequest) -> None:
        """A request leaves the engine; its whole blocks stay findable."""
        (self.running if request in self.running else self.waiting).remove(request)
        self._release(request)

    def check(self) -> None:
        """Verify that blocks and requests agree.

        Raises:
            AssertionError: naming the block that is lost or counted twice.
        """
        self.allocator.check([request.blocks.tolist() for request in (*self.waiting, *self.running)])

    def _seen_waiting(self, request: RunningRequest) -> Progress:
        """A waiting request as the policy sees it: with the prefix that it would find now."""
        size = self.limits.block_size_tokens
        # the last known token is always computed: its logits are what is wanted
        found = self.allocator.match(request.keys[: (request.known - 1) // size])
        if len(found) * size <= request.cached:
            found = []
        self._matches[request.id] = found
        used = sum(self.allocator.in_use(block) for block in found)
        return _progress(request, max(request.cached, len(found) * size), used, used)

    def _seen_running(self, request: RunningRequest, wanted: set[int]) -> Progress:
        """A running request as the policy sees it; a block that a waiting one counts on will not become free."""
        holders = self.allocator.holders
        shared = sum(
            block in wanted or holders(block) > 1 for block in request.blocks[: request.published].tolist()
        )
        return _progress(request, request.cached, request.held, shared)

    def _push_out(self, plan: Plan, requests: dict[int, RunningRequest]) -> None:
        for request_id in (*plan.preempted, *plan.swapped):
            request = requests[request_id]
            if request_id in plan.swapped:
                request.parked = self._park(request)
            self.running.remove(request)
            self._release(request)
            request.preemptions += 1
            request.cached = request.cached if request.parked else 0
            self.add(request)

    def _take_in(self, work: Sequence[tuple[RunningRequest, Segment]]) -> None:
        """Give each segment its blocks: first the found ones, so that none is evicted for another request."""
        entering = {request.id for request in self.waiting}
        for request, _ in work:
            if request.id in entering:
                self._admit(request)
        for request, segment in work:
            needed = blocks_for(segment.cached_tokens + segment.new_tokens, self.limits.block_size_tokens)
            if needed > request.held:
                request.table[request.held : needed] = self.allocator.allocate(needed - request.held)
                request.held = needed

    def _admit(self, request: RunningRequest) -> None:
        """Move a waiting request among the running, with the blocks of the prefix it found."""
        self.waiting.remove(request)
        insort(self.running, request, key=_id)
        found = self._matches[request.id]
        if found:
            self.allocator.acquire(found)
            request.table[: len(found)] = found
            request.held = request.published = len(found)
            request.cached = len(found) * self.limits.block_size_tokens
            request.parked, request.arriving = (), None
        if request.reused is None:
            request.reused = request.cached

    def _release(self, request: RunningRequest) -> None:
        """Let go of a request's blocks; those that generation filled get keys first."""
        if request.held and request.cached // self.limits.block_size_tokens > len(request.keys):
            self._name_blocks(request)
            self.computed(request, 0)
        if request.arriving is not None:  # its blocks go to others: nothing may be written into them any more
            request.arriving.stop()
            request.arriving = None
        self.allocator.release(request.blocks.tolist())
        request.held = request.published = 0

    def _name_blocks(self, request: RunningRequest) -> None:
        if self._namespace is not None:
            size = self.limits.block_size_tokens
            request.keys = list(
                block_keys(request.tokens[: request.known], size, namespace=self._namespace, partial=False)
            )


def _id(request: RunningRequest) -> int:
    return request.id


def _progress(request: RunningRequest, cached: int, held: int, shared: int) -> Progress:
    return Progress(
        request_id=request.id,
        arrival=request.id,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=cached,
        generated_tokens=request.generated,
        held_blocks=held,
        shared_blocks=shared,
        max_new_tokens=request.request.max_new_tokens,
    )
