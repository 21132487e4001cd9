"""What the cluster and its workers send each other; every message has a declared type, and nothing is unpickled.

The cluster sends workers orders. Workers send reports: the events of the coordinator (`mooncake_lab.cluster`), and
the tokens that they made. To move KVCache, workers send each other messages, some with bytes behind them, over
authenticated TCP (`net.wire`). All travel as frames (`net.frames`). All times are readings of the machine's
monotonic clock, which its processes share.
"""

import asyncio
from collections.abc import Iterable
from typing import Annotated, BinaryIO, Final, TypeAlias

import msgspec

from mooncake_lab.cluster import events
from mooncake_lab.core import DecodeStretch
from mooncake_lab.net import frames
from mooncake_lab.perf import ModelShape

VERSION: Final = 12
"""The version of this protocol; both sides send theirs before anything else."""
MOST_BODY_BYTES: Final = 16 * 1024**2
"""The largest frame: a prompt of four million tokens."""


class Job(msgspec.Struct, frozen=True, array_like=True):
    """One attempt of a request, in one run of a cluster: request ids begin anew with each run."""

    run: int
    request_id: int
    n: int
    """The number of the attempt, from 1."""

    @property
    def attempt(self) -> events.Attempt:
        """The attempt, as the coordinator names it."""
        return events.Attempt(self.request_id, self.n)


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
    """Leading blocks of a prompt that another prefill worker holds, or the shared store."""

    source: str
    """The name of the worker, or `SHARED_STORE`."""
    port: int | None
    """The port of the worker; None for the shared store, which is also asked for what a peer lacks."""
    blocks: int


class RequestOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker of a request is told about it."""

    job: Job
    prompt: bytes
    """Token ids, int32, little endian."""
    params: SamplingParams


class PrefillOrder(RequestOrder, frozen=True, kw_only=True, tag=1):
    """To a prefill worker: compute this prompt, and send its KVCache. To a coupled worker: serve the request."""

    shown_tokens: int = 0
    """Tokens of the answer that an earlier attempt made; they are part of the prompt here."""
    reused_blocks: int | None = None
    """Leading blocks behind which what is on SSD only is computed, which is faster; None reads all of it."""
    deliver_to: int | None = None
    """The port of the decode worker; None on a coupled worker."""
    fetch: Fetch | None = None


class DecodeOrder(RequestOrder, frozen=True, kw_only=True, tag=2):
    """To a decode worker: KVCache of this prompt will come; decode it then."""

    keep_at: int | None = None
    """The port of the prefill worker that keeps the whole blocks of the answer; None where nobody does."""


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


class UseSharedStore(msgspec.Struct, frozen=True, tag=9):
    """The address of the shared store from now on; None where it is gone."""

    address: str | None


class Shutdown(msgspec.Struct, frozen=True, tag=8):
    """End."""


Order: TypeAlias = (
    PrefillOrder | DecodeOrder | CancelOrder | Ping | DropConnections | ResetPrefixCache | Measure | UseSharedStore
    | Shutdown
)  # fmt: skip
"""What a worker is told."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=30):
    """The first message of a worker."""

    version: int
    name: str
    pid: int
    port: int
    fingerprint: bytes
    max_context_tokens: int
    """Longest context (tokens)."""
    capacity_tokens: int
    """KVCache tokens that its engine holds."""
    shape: ModelShape
    end_tokens: tuple[int, ...]
    device: str


WorkerEvent: TypeAlias = (
    events.PrefixFetched
    | events.TierRead
    | events.PrefillStarted
    | events.PrefillDropped
    | events.PrefillDone
    | events.ChunkDone
    | events.Preempted
    | events.AnswerKept
    | events.KVArrived
    | events.KVLoaded
    | events.DecodeStarted
    | events.RequestDone
    | events.AttemptFailed
    | DecodeStretch
)
"""Events of the coordinator that workers report; the runtime changes their times to those of the run."""

PromptEvent: TypeAlias = events.PrefixFetched | events.TierRead | events.PrefillDone
"""What a prefill worker reports of a prompt and the log records."""


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
    shared_added: tuple[bytes, ...] = ()
    """Blocks in the shared store that the worker learned of since the last update."""
    shared_removed: tuple[bytes, ...] = ()
    """Blocks that are no longer there, as far as the worker knows."""
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


# between workers


class StartTransfer(msgspec.Struct, frozen=True, kw_only=True, tag=61):
    """KVCache of a request follows, in any order of pieces."""

    job: Job
    tokens: int


class RemoteAddress(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a process of this machine, as Transfer Engines name it."""

    segment: Annotated[str, msgspec.Meta(pattern=r"^127\.0\.0\.1:[0-9]{1,5}$")]
    address: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


class RemoteWrite(msgspec.Struct, frozen=True, array_like=True):
    """A Transfer Engine has written the bytes into the memory that was lent."""

    checksum: int
    start_s: float


class AllocBuffer(msgspec.Struct, frozen=True, tag=69):
    """Lend this connection memory that a Transfer Engine may write; answered by `BufferGranted`."""

    bytes: Annotated[int, msgspec.Meta(ge=1, le=2**30)]


class BufferGranted(msgspec.Struct, frozen=True, tag=70):
    """Here, or nowhere: then the connection carries the bytes."""

    where: RemoteAddress | None


class KVChunk(msgspec.Struct, frozen=True, kw_only=True, tag=62):
    """Keys, then values, of some tokens of one layer follow as bytes; or were pushed, which `Ack` answers."""

    job: Job
    layer: int
    start: int
    tokens: int
    pushed: RemoteWrite | None = None


class AnswerBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Whole blocks with tokens of an answer."""

    source: str
    """The decode worker that had them."""
    first: int
    """The place of the first one in the prompt with its answer."""
    keys: tuple[bytes, ...]
    start_s: float
    """When they were ready to leave."""


class EndTransfer(msgspec.Struct, frozen=True, kw_only=True, tag=63):
    """The end of a transfer; answered by `Ack`."""

    job: Job
    first_token: int
    reports: tuple[PromptEvent, ...]
    """What the prefill worker reported of this prompt; the last is its `PrefillDone`.

    The decode worker reports it again, before its own events: the prefill worker may go down first, or be later.
    """
    answer: AnswerBlocks | None = None
    """What the tokens are, where they are of an answer that is to be kept; then nothing is decoded."""


class GetBlocks(msgspec.Struct, frozen=True, tag=64):
    """Send these blocks, as far as you have them; answered by a `Blocks` for each layer, or one of 0 blocks."""

    job: Job
    """The job whose prefix these blocks are."""
    keys: tuple[bytes, ...]
    into: RemoteAddress | None = None
    """Memory that a Transfer Engine may write each layer of them to, one behind the other."""


class Blocks(msgspec.Struct, frozen=True, tag=65):
    """The next layer of this number of leading blocks, never more than before, follows as bytes or was pushed."""

    blocks: int
    pushed: RemoteWrite | None = None


class Probe(msgspec.Struct, frozen=True, tag=66):
    """Bytes follow, which are discarded and answered by `Ack`: a measurement."""

    pushed: RemoteWrite | None = None
    """Or this number of bytes was pushed."""
    pushed_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class Ack(msgspec.Struct, frozen=True, tag=67):
    """What was sent has arrived, or the connection is accepted."""


class TransferRefused(msgspec.Struct, frozen=True, tag=68):
    """What was sent is refused for this reason; the connection ends."""

    reason: str


TransferMessage: TypeAlias = (
    StartTransfer | KVChunk | EndTransfer | CancelOrder | GetBlocks | Blocks
    | Probe | Ack | TransferRefused | AllocBuffer | BufferGranted
)  # fmt: skip
"""What workers send each other."""

TRANSFER_MESSAGES: Final[msgspec.msgpack.Decoder[TransferMessage]] = msgspec.msgpack.Decoder(TransferMessage)


# frames


def pack(messages: Iterable[msgspec.Struct]) -> bytes:
    """Messages as frames.

    Raises:
        ValueError: when one is larger than a frame may be.
    """
    return b"".join(frames.encode(message, max_body_bytes=MOST_BODY_BYTES) for message in messages)


def read_frame(stream: BinaryIO) -> bytes | None:
    """The body of the next frame, `None` at the end of the connection; for its errors see `frames.read_body`."""
    return frames.read_body(stream, max_body_bytes=MOST_BODY_BYTES)


async def receive_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The body of the next frame, `None` at the end of the connection; for its errors see `frames.read_body`."""
    is_begun = False
    try:
        header = await reader.readexactly(frames.HEADER_BYTES)
        is_begun = True
        size, _ = frames.decode_header(header, max_body_bytes=MOST_BODY_BYTES, max_payload_bytes=0)
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        if is_begun or error.partial:
            raise ConnectionResetError(frames.CUT) from error
        return None
