"""What a runtime reports to the coordinator: facts, with the time at which each happened.

`at_s` is cluster time, in seconds since the run began. Two records of the run log are events as they are:
`CacheChanged` and `RunEnded`. Events of one worker are reported in order; there is no order between workers. Every
event can be sent between processes: its name is in the field `event`.
"""

from typing import Literal, TypeAlias

import msgspec

from mooncake_lab.core import BlockKey, CacheChanged, Request, RunEnded

Role: TypeAlias = Literal["prefill", "decode", "coupled"]
"""What a worker does: one stage, the other, or both."""


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """One placement of a request; after a failure the request is placed again, with the next number."""

    request_id: int
    n: int
    """From 1."""


class _Fact(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True, tag_field="event"):
    """The field that every event has."""

    at_s: float


class RequestArrived(_Fact, frozen=True, kw_only=True, gc=False):
    """A client sent a request."""

    request: Request
    refusal: str = ""
    """Why the runtime has no room for it; empty where it has."""
    completion_id: str | None = None
    wall_s: float | None = None
    """The same moment on the wall clock, where the client sent it over HTTP."""


class TimerFired(_Fact, frozen=True, kw_only=True, gc=False):
    """The time of a `SetTimer` is over: a request is to be decided."""

    request_id: int


class PrefixFetched(_Fact, frozen=True, kw_only=True, gc=False):
    """Prefix blocks that a prefill worker asked another one for have arrived, or will not."""

    attempt: Attempt
    source: str
    worker: str
    """The prefill worker that asked."""
    start_s: float
    bytes: int
    """0 where nothing came."""


class TierRead(_Fact, frozen=True, kw_only=True, gc=False):
    """A worker has read blocks of a prefix from its SSD into DRAM."""

    attempt: Attempt
    worker: str
    start_s: float
    bytes: int


class PrefillStarted(_Fact, frozen=True, kw_only=True, gc=False):
    """A worker began to compute a prompt."""

    attempt: Attempt
    worker: str


class PrefillSlotFree(_Fact, frozen=True, kw_only=True, gc=False):
    """A pipelined group can begin the next prompt, while its later nodes still compute the one before."""

    worker: str


class PrefillDropped(_Fact, frozen=True, kw_only=True, gc=False):
    """A worker took a cancelled prompt out of its queue."""

    attempt: Attempt
    worker: str


class PrefillDone(_Fact, frozen=True, kw_only=True, gc=False):
    """A worker has computed a prompt."""

    attempt: Attempt
    worker: str
    start_s: float
    computed_tokens: int
    reused_tokens: int


class ChunkDone(_Fact, frozen=True, kw_only=True, gc=False):
    """A coupled worker has computed a piece of a prompt, or of what it computes again after a preemption.

    Where its decodes of the same iteration are reported as well, `StepDone` comes first.
    """

    attempt: Attempt
    worker: str
    start_s: float
    computed_tokens: int
    reused_tokens: int
    context_tokens: int
    """KVCache tokens of the request in GPU memory now."""


class Preempted(_Fact, frozen=True, kw_only=True, gc=False):
    """A coupled worker took a request out of its batch, to have room for others; it goes on with it later."""

    attempt: Attempt
    worker: str
    context_tokens: int
    """KVCache tokens that it kept outside GPU memory; 0 where all are computed again."""


class KVSent(_Fact, frozen=True, kw_only=True, gc=False):
    """The last byte of a prefix or of a prompt's KVCache has left a worker; not reported where latency is 0."""

    attempt: Attempt
    worker: str


class KVPartArrived(_Fact, frozen=True, kw_only=True, gc=False):
    """A part of a prompt's KVCache is in the host memory of its decode worker; the last part is a `KVArrived`."""

    attempt: Attempt
    start_s: float
    bytes: int


class KVArrived(_Fact, frozen=True, kw_only=True, gc=False):
    """The KVCache of a prompt is in the host memory of its decode worker."""

    attempt: Attempt
    start_s: float
    """Since when the transfer was all that it waited for."""
    bytes: int


class KVLoaded(_Fact, frozen=True, kw_only=True, gc=False):
    """The KVCache is in GPU memory; the request joins the batch at a step boundary."""

    attempt: Attempt


class DecodeStarted(_Fact, frozen=True, kw_only=True, gc=False):
    """A request joined the batch of its decode worker; the token that its prefill computed is shown.

    At a coupled worker its prompt is computed. Where tokens were shown before, the token is one of the `StepDone`
    that follows.
    """

    attempt: Attempt


class StepDone(_Fact, frozen=True, kw_only=True, gc=False):
    """Decode steps of one unchanged batch ended; step `k` from 0 lasted `first_step_s + k * step_growth_s`."""

    worker: str
    start_s: float
    steps: int
    first_step_s: float
    step_growth_s: float
    request_ids: tuple[int, ...]


class RequestDone(_Fact, frozen=True, kw_only=True, gc=False):
    """A request has its last token."""

    attempt: Attempt


class AttemptFailed(_Fact, frozen=True, kw_only=True, gc=False):
    """A worker cannot go on with an attempt."""

    attempt: Attempt
    reason: str
    retriable: bool
    """Whether the request may be served elsewhere, or later."""
    stage: str = "failed"
    """The stage of the rejection where it may not."""
    suspects: tuple[str, ...] = ()
    """Workers that may be down: nothing is placed again before each has answered, or is known to be down."""


class Cancelled(_Fact, frozen=True, kw_only=True, gc=False):
    """A client does not want its answer any more."""

    request_id: int
    reason: str = "the client went away"


class ClientStopped(_Fact, frozen=True, kw_only=True, gc=False):
    """A client has all that it wants of its answer."""

    request_id: int


class TierChanged(_Fact, frozen=True, kw_only=True, gc=False):
    """Blocks moved between the tiers of a cache."""

    cache: str
    promoted: tuple[BlockKey, ...] = ()
    """Those that are in DRAM now."""
    demoted: tuple[BlockKey, ...] = ()
    """Those that are on SSD only."""


class WorkerUp(_Fact, frozen=True, kw_only=True, gc=False):
    """A worker can be given requests."""

    worker: str
    role: Role
    capacity_tokens: int = 0
    """KVCache that fits into its GPU memory, where it decodes."""
    cache: str | None = None
    """The cache that it finds prefixes in, by the name of `CacheChanged`; None where it keeps none."""


class WorkerDown(_Fact, frozen=True, kw_only=True, gc=False):
    """A worker is gone, with all KVCache that it held."""

    worker: str
    finishes_step: bool = False
    """Whether a step under way ends: the requests that decode there are reported as failed after it, and at a
    coupled worker all others that are there with them."""


class WorkerConfirmed(_Fact, frozen=True, kw_only=True, gc=False):
    """A worker that was suspected to be down has answered."""

    worker: str


Event: TypeAlias = (
    RequestArrived
    | TimerFired
    | PrefixFetched
    | TierRead
    | PrefillStarted
    | PrefillSlotFree
    | PrefillDropped
    | PrefillDone
    | ChunkDone
    | Preempted
    | KVSent
    | KVPartArrived
    | KVArrived
    | KVLoaded
    | DecodeStarted
    | StepDone
    | RequestDone
    | AttemptFailed
    | Cancelled
    | ClientStopped
    | CacheChanged
    | TierChanged
    | WorkerUp
    | WorkerDown
    | WorkerConfirmed
    | RunEnded
)
"""Anything that a runtime reports."""
