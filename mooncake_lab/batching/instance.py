"""The requests of one instance and what a plan does to them: the iteration lifecycle, written once.

The engine, simulated instances, micro-batches of a pipeline and replays without a clock all use `Instance`. They
differ in what their KVCache blocks are (`BlockSpace`) and in what runs a planned iteration. What a call does to a
request:

    enqueue  it waits
    plan     it runs and is in flight, with blocks for its new tokens; or it is refused; or it is preempted
    apply    it runs, with more tokens cached, and one more generated where its segment emits
    preempt  it waits again, without blocks
    finish   it is gone, and its blocks are free
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from typing import Protocol, final

from msgspec.structs import replace

from mooncake_lab.batching.plan import (
    AllocatingPolicy,
    Allocation,
    BatchingPolicy,
    Limits,
    Plan,
    Progress,
    ReservingPolicy,
    Segment,
    SteadyPolicy,
    check_plan,
    queue_order,
)


class BlockSpace(Protocol):
    """The KVCache blocks of an instance: real block ids in an engine, a count in a simulation."""

    @property
    def free_blocks(self) -> int:
        """Blocks that no running request holds; blocks that are kept only for reuse count as free."""
        ...

    def match(
        self, waiting: Sequence[Progress], running: Sequence[Progress]
    ) -> tuple[Sequence[Progress], Sequence[Progress]]:
        """The requests as a policy should see them; changes nothing.

        A waiting request is shown with the prefix that it would find now, a running one with the number of its
        blocks that other requests share.
        """
        ...

    def acquire(self, requests: Sequence[Progress]) -> None:
        """Give each request as many blocks as its `held_blocks` says.

        A request that held none takes the prefix with which `match` showed it.
        """

    def publish(self, requests: Sequence[Progress]) -> None:
        """Let others find the blocks of the tokens that an iteration computed for these requests."""

    def release(self, request: Progress, *, swap: bool = False) -> None:
        """Take back the blocks of a request; with `swap`, its KVCache is kept elsewhere and comes back with it."""

    def check(self, running: Collection[Progress]) -> None:
        """Verify that these requests, and no others, hold blocks.

        Raises:
            AssertionError: naming what is lost or counted twice.
        """


@final
class CountedBlocks:
    """Blocks that are only counted, and never shared. Mutable: requests take them and give them back."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._held: dict[int, int] = {}
        self.free_blocks = capacity_blocks

    def match(
        self, waiting: Sequence[Progress], running: Sequence[Progress]
    ) -> tuple[Sequence[Progress], Sequence[Progress]]:
        """The requests as they are: no prefix is found and no block is shared."""
        return waiting, running

    def acquire(self, requests: Sequence[Progress]) -> None:
        """Count the blocks that each request holds from now on."""
        held = self._held
        for request in requests:
            self.free_blocks -= request.held_blocks - held.get(request.request_id, 0)
            held[request.request_id] = request.held_blocks

    def publish(self, requests: Sequence[Progress]) -> None:
        """Nothing: no request finds the blocks of another."""

    def release(self, request: Progress, *, swap: bool = False) -> None:  # noqa: ARG002  # a count is not moved
        """Count the blocks as free."""
        self.free_blocks += self._held.pop(request.request_id, 0)

    def check(self, running: Collection[Progress]) -> None:
        """Verify that the running requests hold what is not free.

        Raises:
            AssertionError: when a block is lost or counted twice.
        """
        expected = {request.request_id: request.held_blocks for request in running}
        assert self._held == expected, f"blocks are held as {self._held}; the running hold {expected}"  # noqa: S101  # our own mistake
        used = self._capacity_blocks - self.free_blocks
        assert used == sum(expected.values()), f"{used} blocks are in use, {sum(expected.values())} are held"  # noqa: S101  # likewise


@final
class Instance:
    """Waiting and running requests under one batching policy. Mutable: plans act on it.

    An iteration is `plan`, then the computation, then `apply`, then `finish` for each request that is done.
    Several iterations may be in flight: `plan` leaves out the requests whose iteration was not applied yet, and
    the blocks that the policy reserves for them (`ReservingPolicy`). Output lengths are not known here: who
    computes the tokens decides which requests are done.

    Args:
        policy: what decides.
        limits: of the instance; free blocks and free places are counted here.
        blocks: the KVCache.
        waiting: the queue, where several instances share one; by default an own one.
        checks: whether each plan goes through `check_plan`.
    """

    def __init__(
        self,
        policy: BatchingPolicy,
        limits: Limits,
        blocks: BlockSpace,
        waiting: list[Progress] | None = None,
        *,
        checks: bool = False,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.blocks = blocks
        self.waiting: list[Progress] = [] if waiting is None else waiting
        """In order of arrival, then id."""
        self.running: dict[int, Progress] = {}
        """By request id, in the same order."""
        self.seen: tuple[Sequence[Progress], Sequence[Progress], Limits] = (), (), limits
        """What the policy saw when it made the last plan: waiting and running requests, and limits."""
        self._in_flight: list[Plan] = []
        self._admitted: set[int] = set()  # by the last plan
        self._checks = checks
        self._steady = policy if isinstance(policy, SteadyPolicy) else None
        self._reserving = policy if isinstance(policy, ReservingPolicy) else None
        self._allocating = policy if isinstance(policy, AllocatingPolicy) else None
        self._allocation = blocks if isinstance(blocks, Allocation) else None

    def enqueue(self, request: Progress) -> None:
        """Let a request wait."""
        insort(self.waiting, request, key=queue_order)

    def plan(self) -> Plan:
        """Ask the policy for the next iteration, and act on all of its plan but the computation.

        Refused requests are gone then, preempted ones wait, and the planned ones run, with the blocks for their
        new tokens, in flight until `apply`.
        """
        resting, places, reserved_blocks = tuple(self.running.values()), self.limits.max_requests, 0
        if self._in_flight:
            in_flight = self._ids_in_flight()
            resting = tuple(request for request in resting if request.request_id not in in_flight)
            places -= len(in_flight)
            if not places:
                return Plan(reason="every place is in flight")
            reserved_blocks = self._reserved_blocks(in_flight)
        waiting, running = self.blocks.match(tuple(self.waiting), resting)
        self.seen = waiting, running, self._limits_now(places, reserved_blocks)
        if self._allocating is None or self._allocation is None:
            plan = self.policy.plan(*self.seen)
        else:
            plan = self._allocating.plan_on(self._allocation, *self.seen)
        if self._checks:
            check_plan(plan, *self.seen)
        for refusal in plan.rejected:
            self.finish(refusal.request_id)
        for request_id in plan.preempted:
            self.preempt(request_id)
        for request_id in plan.swapped:
            self.preempt(request_id, swap=True)
        self._admitted = set()
        if plan.segments:
            self._acquire(plan.segments, waiting)
            self._in_flight.append(plan)
        return plan

    def apply(self, plan: Plan, steps: int = 1, *, goes_on: bool = False) -> list[Progress]:
        """Count a planned iteration as computed; the requests of the plan as they are now, in its order.

        Args:
            plan: that `plan` returned.
            steps: how often it was computed; at most `steady_steps`. 0 where the computation failed: the requests
                keep their blocks and are planned again.
            goes_on: whether the plan stays in flight, since it is computed once more.

        Raises:
            ValueError: when the plan is not in flight.
        """
        if plan.segments:
            if plan not in self._in_flight:
                raise ValueError(f"{plan} is not in flight; a plan is applied once, by the instance that made it")
            if not goes_on:
                self._in_flight.remove(plan)
        block, running = self.limits.block_size_tokens, self.running
        advanced: list[Progress] = []
        grown: list[Progress] = []
        for segment in plan.segments:
            request = running[segment.request_id]
            cached = request.cached_tokens + segment.new_tokens * steps
            held = -(-cached // block)
            held = max(held, request.held_blocks)
            generated = request.generated_tokens + steps if segment.emits else request.generated_tokens
            now = replace(request, cached_tokens=cached, generated_tokens=generated, held_blocks=held)
            running[segment.request_id] = now
            advanced.append(now)
            if held > request.held_blocks:
                grown.append(now)
        if grown:
            self.blocks.acquire(grown)
        if steps:
            self.blocks.publish(advanced)
        return advanced

    def steady_steps(self, plan: Plan) -> int:
        """How often the policy would say the same as in its last plan if no request came or went; at least once.

        A policy that does not say so itself (`SteadyPolicy`) is asked before every iteration.
        """
        changes = plan.preempted or plan.swapped or plan.rejected or len(plan.segments) < len(self.running)
        if self._steady is None or changes or not plan.segments:
            return 1
        if self._admitted and any(s.kind == "prefill" and s.request_id in self._admitted for s in plan.segments):
            return 1
        running = [self.running[segment.request_id] for segment in plan.segments]
        return max(1, self._steady.steady_steps(plan, running, self._limits_now(self.limits.max_requests)))

    def preempt(self, request_id: int, *, swap: bool = False) -> None:
        """Put a running request back among the waiting ones, without blocks.

        Args:
            request_id: of a running request that is not in flight.
            swap: keep what is computed of it, outside the instance; else all of it is computed again.
        """
        request = self._leave(request_id)
        self.blocks.release(request, swap=swap)
        cached = request.cached_tokens if swap else 0
        self.enqueue(replace(request, cached_tokens=cached, held_blocks=0))

    def finish(self, request_id: int) -> None:
        """End a request, waiting or running, and release its blocks.

        Raises:
            ValueError: when it is in flight.
            KeyError: when it is not here.
        """
        if request_id in self.running:
            self.blocks.release(self._leave(request_id))
            return
        index = next((i for i, request in enumerate(self.waiting) if request.request_id == request_id), None)
        if index is None:
            raise KeyError(f"request {request_id} neither waits nor runs here")
        self.blocks.release(self.waiting.pop(index))

    def shorten(self, request_id: int, cached_tokens: int) -> None:
        """Part of the KVCache of a running request was lost: only its first `cached_tokens` tokens count."""
        self.running[request_id] = replace(self.running[request_id], cached_tokens=cached_tokens)

    def check(self) -> None:
        """Verify that no request is lost or counted twice, and no block either.

        Raises:
            AssertionError: saying what is wrong.
        """
        waiting, running = self.waiting, list(self.running.values())
        for requests in (waiting, running):
            assert requests == sorted(requests, key=queue_order), f"out of order: {requests}"  # noqa: S101  # our own mistake
        both = self.running.keys() & {request.request_id for request in waiting}
        assert not both, f"requests {sorted(both)} wait and run"  # noqa: S101  # likewise
        in_flight = self._ids_in_flight()
        assert in_flight <= self.running.keys(), f"{in_flight} in flight, not all of them run"  # noqa: S101  # likewise
        assert len(running) <= self.limits.max_requests, f"{len(running)} requests run"  # noqa: S101  # likewise
        self.blocks.check(running)

    def _limits_now(self, places: int, reserved_blocks: int = 0) -> Limits:
        free_blocks = max(0, self.blocks.free_blocks - reserved_blocks)
        return replace(self.limits, max_requests=places, free_blocks=free_blocks)

    def _reserved_blocks(self, in_flight: Collection[int]) -> int:
        """Blocks that the policy counts on for requests that it does not see, beyond those that they hold."""
        if self._reserving is None:
            return 0
        requests = [self.running[request_id] for request_id in in_flight]
        return sum(max(0, self._reserving.reservation(each, self.limits) - each.held_blocks) for each in requests)

    def _acquire(self, segments: Sequence[Segment], waiting: Sequence[Progress]) -> None:
        """Admit the planned requests that waited, and get blocks for the new tokens of all planned ones."""
        block, running = self.limits.block_size_tokens, self.running
        last = next(reversed(running.values()), None)
        in_order = True
        grown: list[Progress] = []
        for segment in segments:
            held = -(-(segment.cached_tokens + segment.new_tokens) // block)
            request = running.get(segment.request_id)
            if request is None:
                # an allocating policy finds the prefix when it admits
                request = replace(self._admit(segment.request_id, waiting), cached_tokens=segment.cached_tokens)
                in_order = in_order and (last is None or queue_order(last) < queue_order(request))
                last = request
            elif held <= request.held_blocks:
                continue
            request = replace(request, held_blocks=held, shared_blocks=0)
            running[segment.request_id] = request
            grown.append(request)
        if not in_order:
            self.running = dict(sorted(running.items(), key=lambda item: queue_order(item[1])))
        if grown:
            self.blocks.acquire(grown)

    def _admit(self, request_id: int, waiting: Sequence[Progress]) -> Progress:
        """Take a request from the queue; it as the policy saw it."""
        request = next(each for each in waiting if each.request_id == request_id)
        del self.waiting[bisect_left(self.waiting, queue_order(request), key=queue_order)]
        self._admitted.add(request_id)
        return request

    def _ids_in_flight(self) -> set[int]:
        return {segment.request_id for plan in self._in_flight for segment in plan.segments}

    def _leave(self, request_id: int) -> Progress:
        if self._in_flight and request_id in self._ids_in_flight():
            raise ValueError(f"request {request_id} is in flight; it can leave when its iteration was applied")
        return self.running.pop(request_id)
