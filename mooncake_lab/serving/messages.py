"""What the cluster and its workers say to each other; every message has a declared type, and nothing is unpickled.

The cluster tells workers what to do (`Order`), and workers say what happened (`Event`). What workers say to each
other is in `parcels`. All times are readings of the machine's monotonic clock, which its processes share.
"""

from typing import Final, TypeAlias

import msgspec

from mooncake_lab.perf import ModelShape

VERSION: Final = 4
"""Of this protocol; both sides name theirs before anything else."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One attempt at serving one request. A request that is placed again has the next attempt."""

    ticket: int
    attempt: int


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked for."""

    prompt: bytes
    """Token ids, int32, little endian."""
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    end_tokens: tuple[int, ...] | None = None
    """None takes the model's."""
    min_new_tokens: int = 0
    """No end token is chosen before so many."""


class Compute(msgspec.Struct, frozen=True, kw_only=True, tag=1):
    """To a prefill worker: compute this prompt and send its KVCache there. To a coupled one: serve it."""

    job: Job
    asked: Generation
    deliver_to: int | None = None
    """The decode worker's port; None on a coupled worker."""
    fetch_from: int | None = None
    """The port of another prefill worker that holds more of the prefix."""
    fetch_blocks: int = 0
    """How many leading blocks that one holds."""


class Expect(msgspec.Struct, frozen=True, kw_only=True, tag=2):
    """To a decode worker: KVCache for this request will come; decode it then."""

    job: Job
    asked: Generation


class Cancel(msgspec.Struct, frozen=True, tag=3):
    """Drop whatever is here of this attempt."""

    job: Job


class Ping(msgspec.Struct, frozen=True, tag=4):
    """Are you there, and is everything said before this said?"""

    number: int


class Sever(msgspec.Struct, frozen=True, tag=5):
    """Break every connection to other workers now: a fault, injected."""


class Forget(msgspec.Struct, frozen=True, tag=6):
    """Empty the caches, so that the next run starts cold; answered by a `Pong` when they are empty."""

    number: int


class Measure(msgspec.Struct, frozen=True, tag=7):
    """Time your engine, and a transfer to this port if there is one; answered by `Measured`."""

    port: int | None


class Stop(msgspec.Struct, frozen=True, tag=8):
    """End."""


Order: TypeAlias = Compute | Expect | Cancel | Ping | Sever | Forget | Measure | Stop
"""What a worker is told."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=30):
    """A worker was born; its first words."""

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


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A prefill, or a piece of one."""

    job: Job
    start_s: float
    end_s: float
    computed_tokens: int
    reused_tokens: int


class Prefilled(msgspec.Struct, frozen=True, tag=31):
    """A prompt is computed, and this is its first token."""

    span: Span
    first_token: int


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag=32):
    """Prefix blocks came from another worker."""

    job: Job
    start_s: float
    end_s: float
    bytes: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=40):
    """Prefix blocks came from the worker's own SSD."""

    job: Job
    start_s: float
    end_s: float
    bytes: int


class Move(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that arrived, from the first of them to the last."""

    start_s: float
    end_s: float
    bytes: int


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag=33):
    """A request's KVCache is complete on its decode worker, which shows the first token."""

    job: Job
    at_s: float
    first_token: int
    moves: tuple[Move, ...]
    span: Span
    """How its prefill was, in case who computed it died before it could say so."""


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=34):
    """One iteration: pieces of prompts it computed, and the tokens it made."""

    start_s: float
    end_s: float
    tokens: tuple[tuple[Job, int], ...]
    spans: tuple[Span, ...] = ()


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=35):
    """A request has all its tokens."""

    job: Job
    at_s: float
    reason: str


class Trouble(msgspec.Struct, frozen=True, kw_only=True, tag=36):
    """An attempt came to nothing here; the request is to be placed again, or refused if that cannot help."""

    job: Job
    reason: str
    is_hopeless: bool = False


class Holds(msgspec.Struct, frozen=True, kw_only=True, tag=37):
    """Blocks that came into a worker's cache and blocks that left it."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    damaged_blocks: int = 0
    """Blocks whose checksum did not match when they were read, since this was last told; they are not used."""


class Pong(msgspec.Struct, frozen=True, tag=38):
    """Here, and everything before this is said."""

    number: int
    busy_s: float
    """How long its engine has been in the iteration under way."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag=39):
    """What was timed: rows of (prompt tokens, reused tokens, s), (batch, context tokens, s), (bytes, s)."""

    prefill: tuple[tuple[int, int, float], ...] = ()
    decode: tuple[tuple[int, int, float], ...] = ()
    transfer: tuple[tuple[int, float], ...] = ()
    load: tuple[tuple[int, float], ...] = ()
    """Bytes that a decode engine took in, and the seconds by which its iteration was longer."""


Event: TypeAlias = (
    Ready | Prefilled | Fetched | Loaded | Joined | Stepped | Ended | Trouble | Holds | Pong | Measured
)
"""What a worker says."""

ORDERS: Final[msgspec.msgpack.Decoder[Order]] = msgspec.msgpack.Decoder(Order)
EVENTS: Final[msgspec.msgpack.Decoder[Event]] = msgspec.msgpack.Decoder(Event)
