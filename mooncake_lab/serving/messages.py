"""What the cluster and its workers send each other; every message has a declared type, and nothing is unpickled.

The cluster sends workers orders. Workers send reports: the events of the coordinator (`mooncake_lab.cluster`), and
the tokens that they made. What workers send each other is in `kv_transfer`. All times are readings of
the machine's monotonic clock, which its processes share.
"""

from typing import Final, TypeAlias

import msgspec

from mooncake_lab.cluster import (
    Attempt,
    AttemptFailed,
    ChunkDone,
    DecodeStarted,
    KVArrived,
    KVLoaded,
    KVPartArrived,
    PrefillDone,
    PrefillDropped,
    PrefillStarted,
    PrefixFetched,
    RequestDone,
    TierRead,
)
from mooncake_lab.core import DecodeStretch
from mooncake_lab.perf import ModelShape

VERSION: Final = 8
"""The version of this protocol; both sides send theirs before anything else."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One attempt of a request, in one run of a cluster: request ids begin anew with each run."""

    run: int
    request_id: int
    n: int
    """The number of the attempt, from 1."""

    @property
    def attempt(self) -> Attempt:
        """It as the coordinator names it."""
        return Attempt(self.request_id, self.n)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is generated, and how long it may be."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    end_tokens: tuple[int, ...] | None = None
    """None takes the model's."""
    min_new_tokens: int = 0
    """No end token is chosen before this number of tokens."""


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Leading blocks of a prompt that another prefill worker holds, or the pool."""

    source: str
    """The name of the worker, or `POOL`."""
    port: int | None
    """Of the worker; None for the pool, which a worker asks for what its peer lacks, too."""
    blocks: int


class PrefillOrder(msgspec.Struct, frozen=True, kw_only=True, tag=1):
    """To a prefill worker: compute this prompt, and send its KVCache. To a coupled worker: serve the request."""

    job: Job
    prompt: bytes
    """Token ids, int32, little endian."""
    params: SamplingParams
    shown_tokens: int = 0
    """Tokens of the answer that an earlier attempt made; they are part of the prompt here."""
    reused_blocks: int | None = None
    """Leading blocks behind which what is on SSD only is computed, which is faster; None reads all of it."""
    deliver_to: int | None = None
    """The port of the decode worker; None on a coupled worker."""
    fetch: Fetch | None = None


class DecodeOrder(msgspec.Struct, frozen=True, kw_only=True, tag=2):
    """To a decode worker: KVCache of this prompt will come; decode it then."""

    job: Job
    prompt: bytes
    params: SamplingParams


class CancelOrder(msgspec.Struct, frozen=True, tag=3):
    """Drop what is here of this attempt."""

    job: Job


class Ping(msgspec.Struct, frozen=True, tag=4):
    """Answer with a `Pong`, after everything that was reported before."""

    number: int


class DropConnections(msgspec.Struct, frozen=True, tag=5):
    """Break every connection to other workers now: an injected fault."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=6):
    """Empty the caches, so that the next run starts cold; answered by a `Pong` when they are empty."""

    number: int


class Measure(msgspec.Struct, frozen=True, tag=7):
    """Time your engine, and a transfer to this port if there is one; answered by `Measured`."""

    port: int | None


class UsePool(msgspec.Struct, frozen=True, tag=9):
    """The pool is at this address now; None where it is gone."""

    address: str | None


class Shutdown(msgspec.Struct, frozen=True, tag=8):
    """End."""


Order: TypeAlias = (
    PrefillOrder
    | DecodeOrder
    | CancelOrder
    | Ping
    | DropConnections
    | ResetPrefixCache
    | Measure
    | UsePool
    | Shutdown
)
"""What a worker is told."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=30):
    """The first message of a worker."""

    version: int
    name: str
    pid: int
    port: int
    fingerprint: bytes
    window: int
    """Longest context (tokens)."""
    capacity_tokens: int
    """KVCache tokens that its engine holds."""
    shape: ModelShape
    end_tokens: tuple[int, ...]
    device: str


WorkerEvent: TypeAlias = (
    PrefixFetched
    | TierRead
    | PrefillStarted
    | PrefillDropped
    | PrefillDone
    | ChunkDone
    | KVPartArrived
    | KVArrived
    | KVLoaded
    | DecodeStarted
    | DecodeStretch
    | RequestDone
    | AttemptFailed
)
"""Events of the coordinator that workers report; the runtime changes their times to those of the run."""


class Report(msgspec.Struct, frozen=True, tag=31):
    """What happened at a worker, in order."""

    run: int
    events: tuple[WorkerEvent, ...]
    tokens: tuple[tuple[int, int], ...] = ()
    """Request ids, each with its next token; a token that its client has already is ignored."""


class CacheUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=37):
    """Blocks that came into a worker's cache, and blocks that left it."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    promoted: tuple[bytes, ...] = ()
    """Blocks of it that are in DRAM again."""
    demoted: tuple[bytes, ...] = ()
    """Blocks of it that are on the SSD only."""
    pooled: tuple[bytes, ...] = ()
    """Blocks that it knows to be in the pool since the last update."""
    unpooled: tuple[bytes, ...] = ()
    """Blocks that it knows to be no longer there."""
    damaged_blocks: int = 0
    """Blocks whose checksum did not match when they were read, since the last update; they are not used."""


class Pong(msgspec.Struct, frozen=True, tag=38):
    """The worker is up, and everything before this is reported."""

    number: int
    busy_s: float
    """How long its engine has been in the iteration under way."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag=39):
    """What was timed: rows of (prompt tokens, reused tokens, s), (batch, context tokens, s), (bytes, s)."""

    prefill: tuple[tuple[int, int, float], ...] = ()
    decode: tuple[tuple[int, int, float], ...] = ()
    transfer: tuple[tuple[int, float], ...] = ()
    load: tuple[tuple[int, float], ...] = ()
    """Bytes that a decode engine loaded, and the seconds by which its iteration was longer."""
    ssd: tuple[tuple[int, float], ...] = ()
    """Bytes that a prefill worker read from its SSD, and the seconds of each read."""


WorkerMessage: TypeAlias = Ready | Report | CacheUpdate | Pong | Measured
"""What a worker sends."""

ORDERS: Final[msgspec.msgpack.Decoder[Order]] = msgspec.msgpack.Decoder(Order)
WORKER_MESSAGES: Final[msgspec.msgpack.Decoder[WorkerMessage]] = msgspec.msgpack.Decoder(WorkerMessage)
