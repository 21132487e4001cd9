"""What a runtime and the coordinator tell each other: events, which are facts, and commands.

`at_s` of an event is cluster time, in seconds since the run began. Three records of the run log are events as they
are: `DecodeStretch`, `CacheChanged` and `RunEnded`. Events of one instance are reported in order; between
instances there is no order. Every event can be sent between processes: its name is in the field `event`. Commands
are carried out first in, first out, before the next event.

An instance is the unit that policies see and that runs requests. In the live cluster it is a worker process. In
the simulated cluster it is a node, or a group of nodes.
"""

from typing import Final, Literal, TypeAlias

import msgspec

from mooncake_lab.conductor import Placement
from mooncake_lab.core import CacheChanged, DecodeStretch, Request, RunEnded

Role: TypeAlias = Literal["prefill", "decode", "coupled"]
"""What an instance does: one stage, the other, or both."""
SHARED_STORE: Final = "pool"
"""The name, in `CacheChanged` and `PrefixFetched`, of the cache that all prefill instances share."""


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """One placement of a request; after a failure the request is placed again, with the next number."""

    request_id: int
    n: int
    """From 1."""


class ClusterEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True, tag_field="event"):
    """What happened in a cluster, and when."""

    at_s: float


class OfRequest(ClusterEvent, frozen=True, kw_only=True, gc=False):
    """What happened to a request in flight, whichever its attempt."""

    request_id: int


class OfAttempt(ClusterEvent, frozen=True, kw_only=True, gc=False):
    """What happened to an attempt; once the attempt is over, the coordinator ignores the event."""

    attempt: Attempt


class OfWork(OfAttempt, frozen=True, kw_only=True, gc=False):
    """What an instance did for an attempt; it changes the load of the instance even if the attempt is over."""

    instance: str


# requests


class RequestArrived(ClusterEvent, frozen=True, kw_only=True, gc=False):
    """A client sent a request."""

    request: Request
    refusal: str = ""
    """Why the runtime has no room for it; empty where it has."""
    completion_id: str | None = None
    wall_s: float | None = None
    """The time of arrival on the wall clock, where the request came over HTTP."""


class TimerFired(OfRequest, frozen=True, kw_only=True, gc=False):
    """The time of a `SetTimer` is over: a request is to be decided, or has waited for an instance long enough."""


class Cancelled(OfRequest, frozen=True, kw_only=True, gc=False):
    """A client does not want its answer any more."""

    reason: str = "the client went away"


class ClientStopped(OfRequest, frozen=True, kw_only=True, gc=False):
    """A client has all that it wants of its answer."""


# prefill


class FetchStarted(OfWork, frozen=True, kw_only=True, gc=False):
    """An instance began to fetch prefix blocks from another one (`source`) that its placement does not name.

    In a shared store each block lies on one instance. A `PrefixFetched` follows.
    """

    source: str
    from_ssd: bool = False
    """Whether the source reads some of them from SSD first; a `TierRead` follows then."""


class PrefixFetched(OfWork, frozen=True, kw_only=True, gc=False):
    """Prefix blocks that an instance asked another one (`source`) for have arrived, or will not (0 bytes)."""

    source: str
    start_s: float
    bytes: int


class TierRead(OfWork, frozen=True, kw_only=True, gc=False):
    """An instance has read blocks of a prefix from its SSD into DRAM."""

    start_s: float
    bytes: int


class PrefillStarted(OfWork, frozen=True, kw_only=True, gc=False):
    """An instance began to compute a prompt."""


class PrefillSlotFree(ClusterEvent, frozen=True, kw_only=True, gc=False):
    """A pipelined group can begin the next prompt, while its later nodes still compute the one before."""

    instance: str


class PrefillDropped(OfWork, frozen=True, kw_only=True, gc=False):
    """An instance took a cancelled prompt out of its queue."""


class PrefillDone(OfWork, frozen=True, kw_only=True, gc=False):
    """An instance has computed a prompt."""

    start_s: float
    computed_tokens: int
    reused_tokens: int


class ChunkDone(OfWork, frozen=True, kw_only=True, gc=False):
    """A coupled instance has computed a piece of a prompt, or of what it computes again after a preemption.

    Where its decodes of the same iteration are reported as well, `DecodeStretch` comes first.
    """

    start_s: float
    computed_tokens: int
    reused_tokens: int
    context_tokens: int
    """KVCache tokens of the request in GPU memory now."""


class Preempted(OfWork, frozen=True, kw_only=True, gc=False):
    """A coupled instance took a request out of its batch, to have room for others; it goes on with it later."""

    context_tokens: int
    """KVCache tokens that it kept outside GPU memory; 0 where all are computed again."""


class AnswerKept(ClusterEvent, frozen=True, kw_only=True, gc=False):
    """The whole blocks of an answer have arrived at the prefill instance of its prompt."""

    attempt: Attempt
    """That gave the answer; the request has ended."""
    instance: str
    source: str
    start_s: float
    bytes: int


# from prefill to decode


class KVSent(OfWork, frozen=True, kw_only=True, gc=False):
    """The last byte of a prefix or of a prompt's KVCache has left an instance; not reported where latency is 0."""


class KVArrived(OfAttempt, frozen=True, kw_only=True, gc=False):
    """The KVCache of a prompt, or a part of it, is in the host memory of its decode instance."""

    start_s: float
    """Since when the transfer was all that it waited for."""
    bytes: int
    is_last: bool = True
    """Whether the whole is there."""


class KVLoaded(OfAttempt, frozen=True, kw_only=True, gc=False):
    """The KVCache is in GPU memory; the request joins the batch at a step boundary."""


# decode


class DecodeStarted(OfAttempt, frozen=True, kw_only=True, gc=False):
    """A request joined the batch of its decode instance; the token that its prefill computed is shown.

    At a coupled instance its prompt is computed. Where tokens were shown before, the token is one of the
    `DecodeStretch` that follows.
    """


class RequestDone(OfAttempt, frozen=True, kw_only=True, gc=False):
    """A request has its last token."""


class AttemptFailed(OfAttempt, frozen=True, kw_only=True, gc=False):
    """An instance cannot go on with an attempt."""

    reason: str
    retriable: bool
    """Whether the request may be served elsewhere, or later."""
    stage: str = "failed"
    """The stage of the rejection where it may not."""
    suspects: tuple[str, ...] = ()
    """Instances that may be down: nothing is placed again before each has answered, or is known to be down."""


# instances and their caches


class InstanceUp(ClusterEvent, frozen=True, kw_only=True, gc=False):
    """An instance can be given requests."""

    instance: str
    role: Role
    capacity_tokens: int = 0
    """KVCache that fits into its GPU memory, where it decodes."""
    cache: str | None = None
    """The cache that it finds prefixes in, by the name of `CacheChanged`; None where it keeps none."""


class InstanceDown(ClusterEvent, frozen=True, kw_only=True, gc=False):
    """An instance is gone, with all KVCache that it held."""

    instance: str
    finishes_step: bool = False
    """Whether a step under way ends: the requests that decode there are reported as failed after it, and at a
    coupled instance all others that are there with them."""


class InstanceConfirmed(ClusterEvent, frozen=True, kw_only=True, gc=False):
    """An instance that was suspected to be down has answered."""

    instance: str


RequestEvent: TypeAlias = TimerFired | Cancelled | ClientStopped
"""Each event of a request in flight."""
AttemptEvent: TypeAlias = KVArrived | KVLoaded | DecodeStarted | RequestDone | AttemptFailed
"""Each event of an attempt."""
WorkEvent: TypeAlias = (
    FetchStarted
    | PrefixFetched
    | TierRead
    | PrefillStarted
    | PrefillDropped
    | PrefillDone
    | ChunkDone
    | Preempted
    | KVSent
)
"""Each event of the work of an instance for an attempt."""
GeneralEvent: TypeAlias = (
    RequestArrived
    | CacheChanged
    | AnswerKept
    | PrefillSlotFree
    | InstanceUp
    | InstanceDown
    | InstanceConfirmed
    | RunEnded
)
"""Each event that is about no attempt and no request in flight, but for `DecodeStretch`."""
Event: TypeAlias = DecodeStretch | GeneralEvent | RequestEvent | AttemptEvent | WorkEvent
"""Anything that a runtime reports."""


# commands


class SetTimer(msgspec.Struct, frozen=True, gc=False):
    """Report `TimerFired` of a request after `delay_s` seconds."""

    request_id: int
    delay_s: float


class RunPrefill(msgspec.Struct, frozen=True, gc=False):
    """Fetch the prefix, compute the prompt, and send its KVCache to the decode instance, as the placement says.

    A coupled instance decodes the request itself.
    """

    attempt: Attempt
    request: Request
    placement: Placement


class PrepareDecode(msgspec.Struct, frozen=True, gc=False):
    """A request's KVCache will come to a decode instance."""

    attempt: Attempt
    instance: str
    request: Request


class StartDecode(msgspec.Struct, frozen=True, gc=False):
    """Load a request's KVCache into GPU memory and decode it."""

    attempt: Attempt
    instance: str
    shown_tokens: int
    """Tokens that its client has."""
    shows_computed: bool
    """Whether the token that its prefill computed is still to be shown."""


class CancelAttempt(msgspec.Struct, frozen=True, gc=False):
    """Stop an attempt at the next iteration boundary, and release what it reserved; twice is as once."""

    attempt: Attempt
    instance: str


class ConfirmInstances(msgspec.Struct, frozen=True, gc=False):
    """Report `InstanceConfirmed` or `InstanceDown` of each of these instances."""

    instances: tuple[str, ...]


class Reject(msgspec.Struct, frozen=True, gc=False):
    """Tell a client that its request is not served, or no longer."""

    request_id: int
    stage: str
    reason: str


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Tell a client that it has all tokens of its answer."""

    request_id: int


Command: TypeAlias = (
    SetTimer | RunPrefill | PrepareDecode | StartDecode | CancelAttempt | ConfirmInstances | Reject | Finish
)
"""Anything that the coordinator asks."""
