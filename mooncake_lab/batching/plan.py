"""What an instance knows before an iteration, what it may spend, and what it decides to run.

One rule covers prefill, decode and recomputation. A request *knows* its prompt and the tokens it has
generated; the keys and values of its first `cached_tokens` tokens are in the KVCache; the rest is pending.
An iteration computes some pending tokens, and where it computes the last of them, the next token appears.
A decode is the case of one pending token, the one generated last. A preempted request starts again with
nothing cached and its generated tokens kept.

All of these are msgspec structs, frozen like the dataclasses elsewhere: they are built per request and iteration,
where the cost of building a frozen dataclass would show.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

SegmentKind = Literal["prefill", "decode"]
"""A piece of a prompt (or of a recomputation), or one step of generation."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How far one request has come. Its output length is unknown here, by type."""

    request_id: int
    arrival: int
    """Rank in the order of arrival; the lists a policy gets are sorted by it, then by id."""
    prompt_tokens: int
    cached_tokens: int = 0
    """Leading tokens whose keys and values are in the KVCache, whether computed here or reused."""
    generated_tokens: int = 0
    held_blocks: int = 0
    """Blocks it needs no more of, as `Limits.free_blocks` does not count them: its own, and for a waiting request
    those of its reused prefix that running requests hold."""
    shared_blocks: int = 0
    """Held blocks that other requests hold too: preempting this one does not free them."""
    max_new_tokens: int | None = None
    """The most tokens its client allows: a limit stated on arrival, not what it will generate."""

    @property
    def num_tokens(self) -> int:
        """Tokens that exist so far: the prompt and what was generated."""
        return self.prompt_tokens + self.generated_tokens

    @property
    def pending_tokens(self) -> int:
        """Known tokens that are not in the KVCache: what has to be computed for the next token to appear."""
        return self.prompt_tokens + self.generated_tokens - self.cached_tokens

    @property
    def decoding(self) -> bool:
        """Whether its next step is a decode: the token generated last is all that is pending."""
        return self.generated_tokens > 0 and self.pending_tokens == 1


class Limits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one instance may spend in an iteration.

    Raises:
        ValueError: when a limit is out of range, or fewer tokens than requests fit into an iteration (a decode
            would have to wait for no reason a policy could give).
    """

    max_batch_tokens: int
    """Most tokens per iteration, prefill and decode together."""
    max_requests: int
    """Most requests that may run at once."""
    block_size_tokens: int
    capacity_blocks: int
    """KVCache blocks that the requests given to the policy can have between them; none that others pin."""
    free_blocks: int
    """Blocks that no running request holds; those kept only for reuse count as free."""
    max_request_tokens: int | None = None
    """The model's context length; None where only the KVCache limits a request."""

    def __post_init__(self) -> None:
        if min(self.max_batch_tokens, self.max_requests, self.block_size_tokens, self.capacity_blocks) < 1:
            names = ("max_batch_tokens", "max_requests", "block_size_tokens", "capacity_blocks")
            least, name = min((getattr(self, name), name) for name in names)
            raise ValueError(f"Limits.{name} is {least}; at least 1 is needed")
        if not 0 <= self.free_blocks <= self.capacity_blocks:
            raise ValueError(f"Limits.free_blocks is {self.free_blocks}; allowed are 0 to {self.capacity_blocks}")
        if self.max_requests > self.max_batch_tokens:
            raise ValueError(
                f"Limits.max_requests is {self.max_requests}, but an iteration computes at most"
                f" {self.max_batch_tokens} tokens; every running request needs one"
            )


def queue_order(request: Progress) -> tuple[int, int]:
    """The key by which requests are sorted wherever they wait or run."""
    return request.arrival, request.request_id


class Segment(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one request in an iteration: rows `cached_tokens` to `cached_tokens + new_tokens` of it."""

    request_id: int
    kind: SegmentKind
    new_tokens: int
    cached_tokens: int
    """Tokens before them, which they attend to."""
    emits: bool
    """Whether the request's next token is sampled at the last of them."""


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """A request that no iteration of this instance can ever serve, and why."""

    request_id: int
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration, complete enough to act on.

    The instance acts in this order: it ends the `rejected`; takes the blocks of the `preempted` and the
    `swapped` and puts them back among the waiting; then runs the `segments` as one packed batch. A waiting
    request that has a segment runs from then on.
    """

    segments: tuple[Segment, ...] = ()
    """In the order in which the tokens are packed; at most one per request."""
    preempted: tuple[int, ...] = ()
    """Running requests that lose their blocks; their known tokens are computed again later."""
    swapped: tuple[int, ...] = ()
    """Running requests whose blocks move elsewhere and come back with them; nothing is computed again."""
    rejected: tuple[Refusal, ...] = ()
    """Requests, waiting or running, that can never be served within the limits."""
    reason: str = ""
    """Why this and not something else, for logs and charts."""

    @property
    def is_empty(self) -> bool:
        """Whether acting on it changes nothing."""
        return not (self.segments or self.preempted or self.swapped or self.rejected)

    @property
    def new_tokens(self) -> int:
        """Tokens the iteration computes."""
        return sum(segment.new_tokens for segment in self.segments)

    @property
    def work(self) -> tuple[list[tuple[int, int]], int, int]:
        """New and cached tokens of each piece of a prompt; the number of decodes, and their cached tokens."""
        pieces = list[tuple[int, int]]()
        decodes = context_tokens = 0
        for segment in self.segments:
            if segment.kind == "decode":
                decodes += 1
                context_tokens += segment.cached_tokens
            else:
                pieces.append((segment.new_tokens, segment.cached_tokens))
        return pieces, decodes, context_tokens

    @property
    def prefills(self) -> tuple[Segment, ...]:
        """The segments that are pieces of prompts."""
        return tuple(segment for segment in self.segments if segment.kind == "prefill")

    @property
    def decodes(self) -> tuple[Segment, ...]:
        """The segments that are steps of generation."""
        return tuple(segment for segment in self.segments if segment.kind == "decode")


class BatchingPolicy(Protocol):
    """Chooses what an instance runs next. Implementations are frozen dataclasses of their knobs."""

    def plan(self, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> Plan:
        """The next iteration.

        Args:
            waiting: requests without a place, in order of service (arrival, then id).
            running: requests with a place, in the same order; each has at least one pending token.
            limits: what the instance may spend now.

        Raises:
            ValueError: when a running request has nothing to compute.
        """
        ...


@runtime_checkable
class SteadyPolicy(BatchingPolicy, Protocol):
    """A batching policy that states how often it repeats a plan, so that a simulator can take many at once."""

    def steady_steps(self, plan: Plan, running: Sequence[Progress], limits: Limits) -> int:
        """How many iterations in a row it would plan the same while no request comes or goes.

        Args:
            plan: that it made; every running request has a segment and none was admitted to be prefilled.
            running: the requests of the plan, in its order, with the blocks for this iteration.
            limits: what is left of the instance beside them.
        """
        ...


@runtime_checkable
class ReservingPolicy(BatchingPolicy, Protocol):
    """A batching policy that gives no request the blocks that it reserves for another one.

    While an iteration is in flight, its requests are not shown to the policy; the instance then takes their
    reservations off the free blocks.
    """

    def reservation(self, request: Progress, limits: Limits, /) -> int:
        """Blocks that a running request may count on, those that it holds included."""
        ...


@runtime_checkable
class Allocation(Protocol):
    """Blocks that a policy gives and takes back while it plans, where each decision depends on those before it."""

    def found_tokens(self, request: Progress) -> int:
        """Leading tokens of a waiting request that it would find computed now."""
        ...

    def fits(self, request: Progress, kept_free_blocks: int = 0) -> bool:
        """Whether the free blocks hold all known tokens of a waiting request, and so many blocks stay free."""
        ...

    def allocate(self, request: Progress, tokens: int) -> bool:
        """Give a request blocks for so many leading tokens; whether there were enough.

        A request without blocks shares those of its `cached_tokens`. The complete blocks are found from now on,
        as the tokens are computed before anybody reads them.
        """
        ...

    def free(self, request: Progress) -> None:
        """Take back the blocks of a request."""
        ...


@runtime_checkable
class AllocatingPolicy(BatchingPolicy, Protocol):
    """A batching policy that can allocate blocks while it plans, so that a request finds what others left."""

    def plan_on(
        self, blocks: Allocation | None, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits
    ) -> Plan:
        """The next iteration, its blocks allocated and those of its preempted requests freed; see `plan`."""
        ...


def check_plan(plan: Plan, waiting: Sequence[Progress], running: Sequence[Progress], limits: Limits) -> None:
    """Check that an instance could act on a plan.

    Raises:
        ValueError: saying which request, and what is allowed, when a segment does not continue its request; a
            request is decided twice; or tokens, places or KVCache blocks are overspent.
    """
    inside = {request.request_id: request for request in running}
    known = {request.request_id: request for request in waiting} | inside
    pushed_out = (*plan.preempted, *plan.swapped)
    gone = (*pushed_out, *(refusal.request_id for refusal in plan.rejected))
    decided = (*(segment.request_id for segment in plan.segments), *gone)
    for place, request_id in enumerate(decided):
        if request_id not in known:
            raise ValueError(f"the plan names request {request_id}, which is neither waiting nor running")
        if request_id in decided[:place]:
            raise ValueError(f"the plan decides twice about request {request_id}; once is allowed")
        if request_id in pushed_out and request_id not in inside:
            raise ValueError(f"the plan preempts request {request_id}, which does not run")
    needed = sum(_blocks_needed(segment, known[segment.request_id], limits) for segment in plan.segments)
    left = inside.keys() - gone
    free = sum(inside[each].held_blocks - inside[each].shared_blocks for each in inside.keys() - left)
    for what, value, most in (
        ("computes {} tokens", plan.new_tokens, limits.max_batch_tokens),
        ("leaves {} requests running", len(left | set(decided[: len(plan.segments)])), limits.max_requests),
        ("needs {} more KVCache blocks", needed, limits.free_blocks + free),
    ):
        if value > most:
            raise ValueError(f"the plan {what.format(value)}; allowed are {most}")


def _blocks_needed(segment: Segment, request: Progress, limits: Limits) -> int:
    """The blocks that a segment takes, which must start where its request stands and stay within what is known."""
    new, pending = segment.new_tokens, request.pending_tokens
    if not 1 <= new <= pending:
        raise ValueError(
            f"the plan computes {new} tokens of request {request.request_id}; allowed are 1 to {pending}"
        )
    kind = "decode" if request.decoding else "prefill"
    expected = Segment(request.request_id, kind, new, request.cached_tokens, new == pending)
    if segment != expected:
        raise ValueError(f"the plan holds {segment} for request {request.request_id}; allowed is {expected}")
    return max(-(-(request.cached_tokens + new) // limits.block_size_tokens) - request.held_blocks, 0)
