"""What workers do: prefill, decode, or both. Each role takes orders and KVCache, and steps while it has work."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, final

import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.batching.policies import CHUNKED_POLICIES, named_policy
from mooncake_lab.cluster import (
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
    StepDone,
    TierRead,
)
from mooncake_lab.core import block_keys
from mooncake_lab.engine import (
    CoupledEngine,
    DecodeEngine,
    EngineSettings,
    GenerationRequest,
    KVSpan,
    LlamaModel,
    Output,
    PrefillEngine,
    PrefillResult,
    Sampling,
)
from mooncake_lab.engine.kv_layout import KVLayout, bytes_of
from mooncake_lab.engine.sequence import TokenCallback
from mooncake_lab.serving.kv_transfer.fetch import fetch
from mooncake_lab.serving.kv_transfer.protocol import EndTransfer, KVChunk, StartTransfer
from mooncake_lab.serving.kv_transfer.receiver import ReceivedKV
from mooncake_lab.serving.kv_transfer.sender import Identity, KVSenders
from mooncake_lab.serving.kv_transfer.transfer_engine import TransferEngineChannel
from mooncake_lab.serving.measure import measure_coupled, measure_decode, measure_prefill, measure_transfer
from mooncake_lab.serving.messages import (
    CacheUpdate,
    CancelOrder,
    DecodeOrder,
    Fetch,
    Generation,
    Job,
    Measure,
    Measured,
    Pong,
    PrefillOrder,
    Report,
    ResetPrefixCache,
    WorkerEvent,
    WorkerMessage,
)
from mooncake_lab.serving.prefix_cache import PrefixCache
from mooncake_lab.serving.spec import WorkerSpec

_REMEMBERED: Final = 4096
"""Cancelled attempts whose KVCache a decode worker still refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What workers of every role have."""

    spec: WorkerSpec
    model: LlamaModel
    shape: KVLayout
    identity: Identity
    senders: KVSenders
    channel: TransferEngineChannel | None
    """What KVCache travels by; None is the connections between workers."""
    send: Callable[[WorkerMessage], None]
    """Sends a message to the cluster."""
    enqueue: Callable[[object], None]
    """Puts something into the worker's own inbox, from any thread."""

    def report(self, job: Job, *events: WorkerEvent, tokens: Sequence[tuple[int, int]] = ()) -> None:
        """Report events of the run of this attempt, and tokens of its requests."""
        self.send(Report(job.run, events, tuple(tokens)))

    def settings(self, tokens: int, *, prefix_reuse: bool = False) -> EngineSettings:
        """The settings of an engine with KVCache for this number of tokens."""
        spec = self.spec
        cuts_prompts = spec.role != "coupled" or spec.batching in CHUNKED_POLICIES
        widest = spec.chunk_tokens if cuts_prompts else spec.max_request_tokens
        return EngineSettings(
            block_size_tokens=spec.block_size_tokens,
            cache_blocks=max(1, tokens // spec.block_size_tokens),
            max_batch_tokens=max(widest, spec.max_requests),
            max_requests=spec.max_requests,
            max_request_tokens=spec.max_request_tokens,
            prefix_reuse=prefix_reuse,
            keep_log=spec.role == "coupled" or (spec.role == "decode" and spec.metronome is not None),
        )

    def keys(self, prompt: npt.NDArray[np.int32]) -> list[bytes]:
        """The keys of a prompt's whole blocks."""
        size, name = self.spec.block_size_tokens, self.shape.fingerprint
        return block_keys(prompt, size, namespace=name, partial=False)


class WorkerRole(Protocol):
    """What a worker does with orders and with KVCache that arrives."""

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        ...

    @property
    def capacity_tokens(self) -> int:
        """KVCache tokens that its engine holds."""
        ...

    def take(self, item: object) -> None:
        """Take an order, KVCache that arrived, or what the role itself put into the inbox."""
        ...

    def step(self) -> None:
        """Run one iteration."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """A request at a prefill worker. Mutable: it waits, and then it runs."""

    order: PrefillOrder
    keys: list[bytes]
    is_ready: bool
    """Whether the prefix that comes from elsewhere is here, or given up."""
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _FetchEnded:
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class _CameUp:
    """The cluster knows this worker now."""


@final
class PrefillRole:
    """Computes prompts one after the other, in order of arrival. Mutable: it owns an engine and a store.

    It reuses a prefix, computes the rest, and sends every layer as it is computed. A prompt whose prefix is still
    on its way holds up those behind it; that is short, and the other way is worse in the simulation of chapter 09.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        tokens = context.spec.max_request_tokens + context.spec.block_size_tokens
        self.capacity_tokens = tokens
        self._engine = PrefillEngine(
            context.model,
            context.settings(tokens),
            chunk_tokens=context.spec.chunk_tokens,
            clock=time.monotonic,
        )
        self._waiting: deque[Prompt] = deque()
        self._running: dict[int, Prompt] = {}
        self._fetcher = ThreadPoolExecutor(2, thread_name_prefix="fetch")
        self._cache = PrefixCache(context.spec, context.shape)
        context.enqueue(_CameUp())

    @property
    def busy(self) -> bool:
        """Whether a prompt runs or could begin."""
        return bool(self._running or (self._waiting and self._waiting[0].is_ready))

    def take(self, item: object) -> None:
        """Take an order, or the end of a fetch."""
        match item:
            case PrefillOrder():
                self._accept(item)
            case _FetchEnded():
                item.prompt.is_ready = True
                self._update(self._cache.news(item.prompt.keys))
            case _CameUp():
                self._update(self._cache.found_at_birth())
            case CancelOrder():
                self._cancel(item.job)
            case ResetPrefixCache():
                self._update(self._cache.forget())
                self._context.send(Pong(item.number, 0.0))
            case Measure():
                self._measure(item.port)
            case _:
                raise TypeError(f"a prefill worker cannot take {type(item).__name__}")

    def step(self) -> None:
        """Begin the next prompt if none runs, and compute one chunk."""
        if not self._running:
            self._begin(self._waiting.popleft())
        for result in self._engine.step():
            self._finish(self._running.pop(result.request_id), result)

    def close(self) -> None:
        """Save what its store holds where that outlives the worker."""
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        self._cache.close()

    def lookup(self, keys: Sequence[bytes]) -> list[tuple[torch.Tensor, ...]]:
        """The leading blocks of these keys that are here, for another worker; runs on its connection's thread."""
        return self._cache.blocks(keys)

    def _accept(self, order: PrefillOrder) -> None:
        keys = self._context.keys(_tokens(order.asked))
        prompt = Prompt(order=order, keys=keys, is_ready=order.fetch is None)
        self._waiting.append(prompt)
        if order.fetch is not None:
            self._fetcher.submit(self._fetch, prompt, order.fetch)

    def _fetch(self, prompt: Prompt, wanted: Fetch) -> None:
        """Copy missing blocks from their holder; they stay, which is how hot blocks spread (FAST'25 §4.2)."""
        context, start_s, size = self._context, time.monotonic(), 0
        try:
            size = self._copy_blocks(prompt.keys[: wanted.blocks], wanted.port)
        finally:  # a prompt that waited forever would hold up all behind it
            fetched = PrefixFetched(
                at_s=time.monotonic(),
                attempt=prompt.order.job.attempt,
                source=wanted.source,
                worker=context.spec.name,
                start_s=start_s,
                bytes=size,
            )
            context.report(prompt.order.job, fetched)
            context.enqueue(_FetchEnded(prompt))

    def _copy_blocks(self, keys: Sequence[bytes], port: int) -> int:
        """Fetch the blocks that are not here; how many bytes came."""
        context, have = self._context, self._cache.match(keys)
        size = context.spec.block_size_tokens
        blocks = fetch(port, context.identity, context.shape, keys[have:], size, context.channel)
        self._cache.adopt(keys[have : have + len(blocks)], blocks, first=have)
        return len(blocks) * size * context.shape.bytes_per_token

    def _begin(self, prompt: Prompt) -> None:
        prompt.start_s = time.monotonic()
        context, order, asked = self._context, prompt.order, prompt.order.asked
        attempt, name = order.job.attempt, context.spec.name
        context.report(order.job, PrefillStarted(at_s=prompt.start_s, attempt=attempt, worker=name))
        tokens = _tokens(asked)
        prefix = self._reuse(prompt) if context.spec.prefix_reuse else None
        assert order.deliver_to is not None  # noqa: S101  # the cluster names a decode worker with each prompt
        sender = context.senders.to(order.deliver_to)
        sender.send(StartTransfer(job=order.job, tokens=len(tokens)))

        def stream(layer: int, start: int, span: torch.Tensor) -> None:
            host = span.cpu().contiguous()
            sender.send(KVChunk(job=order.job, layer=layer, start=start, tokens=host.shape[1]), [bytes_of(host)])

        if prefix is not None:
            for layer, tensor in enumerate(prefix.layers):
                stream(layer, 0, tensor)
        try:
            request_id = self._engine.submit(
                tokens,
                prefix=() if prefix is None else (prefix,),
                sampling=_sampling(asked),
                end_tokens=asked.end_tokens,
                min_new_tokens=asked.min_new_tokens,
                on_kv=stream if context.spec.layerwise else None,
            )
        except ValueError as error:
            sender.send(CancelOrder(order.job))
            now_s = time.monotonic()
            dropped = PrefillDropped(at_s=now_s, attempt=attempt, worker=name)
            context.report(order.job, dropped, _hopeless(order.job, str(error)))
            return
        self._running[request_id] = prompt

    def _finish(self, prompt: Prompt, result: PrefillResult) -> None:
        context, order, reused = self._context, prompt.order, result.reused_tokens
        tokens, job = len(order.asked.prompt) // 4, order.job
        if context.spec.metronome is not None:
            context.spec.metronome.hold_prefill(prompt.start_s, tokens, reused)
        prefilled = PrefillDone(
            at_s=time.monotonic(),
            attempt=job.attempt,
            worker=context.spec.name,
            start_s=prompt.start_s,
            computed_tokens=tokens - reused,
            reused_tokens=reused,
        )
        context.report(job, prefilled, tokens=[(job.request_id, result.first_token)])
        assert order.deliver_to is not None  # noqa: S101  # as above
        sender = context.senders.to(order.deliver_to)
        if not context.spec.layerwise and result.kv.tokens:
            for layer, tensor in enumerate(result.kv.layers):
                host = tensor.cpu().contiguous()
                piece = KVChunk(job=job, layer=layer, start=result.kv.start, tokens=result.kv.tokens)
                sender.send(piece, [bytes_of(host)])
        sender.send(EndTransfer(job=job, first_token=result.first_token, prefilled=prefilled))
        if context.spec.prefix_reuse:
            self._cache.keep(prompt.keys, result.kv)
            self._update(self._cache.news(prompt.keys))

    def _reuse(self, prompt: Prompt) -> KVSpan | None:
        """The prefix that is here now."""
        found = self._cache.read(prompt.keys)
        if found is None:
            return None
        if found.ssd_bytes:
            job = prompt.order.job
            self._context.report(
                job,
                TierRead(
                    at_s=found.end_s,
                    attempt=job.attempt,
                    worker=self._context.spec.name,
                    start_s=found.start_s,
                    bytes=found.ssd_bytes,
                ),
            )
        return found.span

    def _update(self, update: CacheUpdate | None) -> None:
        """Tell the cluster what came into the cache and what left it."""
        if update is not None:
            self._context.send(update)

    def _cancel(self, job: Job) -> None:
        self._waiting = deque(prompt for prompt in self._waiting if prompt.order.job != job)
        for request_id, prompt in list(self._running.items()):
            if prompt.order.job == job:
                del self._running[request_id]
                self._engine.engine.cancel(request_id)
                self._engine.step()
                if prompt.order.deliver_to is not None:
                    self._context.senders.to(prompt.order.deliver_to).send(CancelOrder(job))
        _report_dropped(self._context, job)

    def _measure(self, port: int | None) -> None:
        context = self._context
        self._context.send(
            Measured(
                prefill=measure_prefill(self._engine, context.model, context.shape, context.spec),
                transfer=() if port is None else measure_transfer(port, context.identity, context.channel),
            )
        )


@final
class DecodeRole:
    """Decodes requests whose KVCache arrived, one token each per iteration. Mutable: it owns an engine."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._engine = DecodeEngine(
            context.model, context.settings(context.spec.decode_tokens), clock=time.monotonic
        )
        self.capacity_tokens = self._engine.engine.blocks * context.spec.block_size_tokens
        self._expected: dict[Job, DecodeOrder] = {}
        self._arrived: dict[Job, ReceivedKV] = {}
        self._cancelled: OrderedDict[Job, None] = OrderedDict()
        self._running: dict[int, Job] = {}
        self._made: list[tuple[Job, int]] = []

    @property
    def busy(self) -> bool:
        """Whether a request is in the engine."""
        return self._engine.engine.busy

    def take(self, item: object) -> None:
        """Take an order, or KVCache."""
        match item:
            case DecodeOrder():
                self._expected[item.job] = item
                self._join(item.job)
            case ReceivedKV():
                if item.job not in self._cancelled:
                    self._arrived[item.job] = item
                    self._join(item.job)
            case CancelOrder():
                self._cancel(item.job)
            case ResetPrefixCache():
                self._context.send(Pong(item.number, 0.0))  # nothing is kept here
            case Measure():
                context = self._context
                context.send(measure_decode(self._engine, context.model, context.shape, context.spec))
            case _:
                raise TypeError(f"a decode worker cannot take {type(item).__name__}")

    def step(self) -> None:
        """Generate one token for each request in the batch."""
        start_s = time.monotonic()
        done = self._engine.step()
        log, pacer = self._engine.engine.log, self._context.spec.metronome
        if pacer is not None and log:
            pacer.hold_decode(start_s, log[-1].iteration.plan.segments)
            log.clear()
        end_s = time.monotonic()
        if self._made:
            made = [(job.request_id, token) for job, token in self._made]
            step = _step(self._context.spec.name, start_s, end_s, [request_id for request_id, _ in made])
            self._context.report(self._made[0][0], step, tokens=made)
            self._made = []
        for output in done:
            job = self._running.pop(output.request_id, None)
            if job is not None:  # else it was cancelled
                self._context.report(job, _ended(job, output, end_s))

    def _join(self, job: Job) -> None:
        """Submit a request to the engine once it is expected and its KVCache is here."""
        if job not in self._expected or job not in self._arrived:
            return
        asked, came = self._expected.pop(job).asked, self._arrived.pop(job)
        ends = self._context.model.config.end_tokens if asked.end_tokens is None else asked.end_tokens
        if asked.max_new_tokens == 1 or came.first_token in ends:
            self._report_joined(job, came)
            self._context.report(job, RequestDone(at_s=time.monotonic(), attempt=job.attempt))
            return
        try:
            request = _generation_request(asked, lambda _, token: self._made.append((job, token)))
            request_id = self._engine.submit(request, first_token=came.first_token, kv=(came.kv,))
        except ValueError as error:
            self._context.report(job, _hopeless(job, str(error)))
            return
        self._running[request_id] = job
        self._report_joined(job, came)

    def _report_joined(self, job: Job, came: ReceivedKV) -> None:
        """KVCache arrived, and the token that prefill computed is shown."""
        attempt, now_s = job.attempt, time.monotonic()
        *parts, last = came.moves
        self._context.report(
            job,
            came.prefilled,
            *(KVPartArrived(at_s=m.end_s, attempt=attempt, start_s=m.start_s, bytes=m.bytes) for m in parts),
            KVArrived(at_s=last.end_s, attempt=attempt, start_s=last.start_s, bytes=last.bytes),
            KVLoaded(at_s=now_s, attempt=attempt),
            DecodeStarted(at_s=now_s, attempt=attempt),
            tokens=[(job.request_id, came.first_token)],
        )

    def _cancel(self, job: Job) -> None:
        self._expected.pop(job, None)
        self._arrived.pop(job, None)
        self._cancelled[job] = None
        if len(self._cancelled) > _REMEMBERED:
            self._cancelled.popitem(last=False)
        for request_id in [key for key, value in self._running.items() if value == job]:
            del self._running[request_id]
            self._engine.engine.cancel(request_id)


@dataclass(slots=True, kw_only=True, eq=False)
class _Served:
    """A request at a coupled worker. Mutable: tokens are made for it."""

    job: Job
    keys: list[bytes]
    tokens: int
    """Tokens that its client has, those of earlier attempts included."""
    is_decoding: bool = False
    """Whether some of them were made here."""
    has_begun: bool = False
    """Whether some of its prompt was computed here."""


@final
class CoupledRole:
    """Does both stages in one engine, under any batching policy (the baseline, FAST'25 §5.1). Mutable."""

    def __init__(self, context: WorkerContext) -> None:
        self._context, spec = context, context.spec
        chunk_tokens = spec.chunk_tokens if spec.batching in CHUNKED_POLICIES else None
        policy = named_policy(spec.batching, chunk_tokens=chunk_tokens)
        settings = context.settings(spec.decode_tokens, prefix_reuse=spec.prefix_reuse)
        self._engine = CoupledEngine(context.model, policy, settings, clock=time.monotonic)
        self.capacity_tokens = self._engine.engine.blocks * spec.block_size_tokens
        self._served: dict[int, _Served] = {}  # by the engine's id
        self._made: list[tuple[_Served, int]] = []
        self._ended_keys: set[bytes] = set()
        self._announced: set[bytes] = set()

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return self._engine.engine.busy

    def take(self, item: object) -> None:
        """Take an order."""
        match item:
            case PrefillOrder():
                self._accept(item)
            case CancelOrder():
                for request_id in [key for key, one in self._served.items() if one.job == item.job]:
                    self._leave(request_id)
                    self._engine.cancel(request_id)
                _report_dropped(self._context, item.job)
            case ResetPrefixCache():
                self._engine.engine.allocator.forget()
                self._announce()
                self._context.send(Pong(item.number, 0.0))
            case Measure():
                self._context.send(measure_coupled(self._engine, self._context.model, self._context.spec))
                self._engine.engine.allocator.forget()
                self._engine.engine.log.clear()
            case _:
                raise TypeError(f"a coupled worker cannot take {type(item).__name__}")

    def step(self) -> None:
        """Run one iteration: pieces of prompts, and decodes."""
        start_s = time.monotonic()
        done = self._engine.step()
        self._keep_pace(start_s)
        end_s = time.monotonic()
        chunks = self._chunks(start_s, end_s)
        self._report_iteration(chunks, start_s, end_s)
        for output in done:
            served = self._leave(output.request_id)
            if served is None:
                continue  # cancelled
            if output.finish_reason == "rejected":
                _report_dropped(self._context, served.job)
            self._context.report(served.job, _ended(served.job, output, end_s))
        if chunks:
            self._announce()

    def _accept(self, order: PrefillOrder) -> None:
        prompt = _tokens(order.asked)
        keys = self._context.keys(prompt) if self._context.spec.prefix_reuse else []
        served = _Served(job=order.job, keys=keys, tokens=order.shown_tokens)
        try:
            request = _generation_request(order.asked, lambda _, token: self._made.append((served, token)))
            request_id = self._engine.submit(request)
        except ValueError as error:
            _report_dropped(self._context, order.job)
            self._context.report(order.job, _hopeless(order.job, str(error)))
            return
        self._served[request_id] = served

    def _leave(self, request_id: int) -> _Served | None:
        """A request is here no longer; what it computed may be found again."""
        served = self._served.pop(request_id, None)
        if served is not None:
            self._ended_keys.update(served.keys)
        return served

    def _keep_pace(self, start_s: float) -> None:
        pacer, log = self._context.spec.metronome, self._engine.engine.log
        if pacer is not None and log:
            segments = log[-1].iteration.plan.segments
            new = sum(s.kind == "prefill" and not self._has_begun(s.request_id) for s in segments)
            pacer.hold_iteration(start_s, segments, new)

    def _has_begun(self, request_id: int) -> bool:
        served = self._served.get(request_id)
        return served is not None and served.has_begun

    def _chunks(self, start_s: float, end_s: float) -> list[tuple[Job, ChunkDone]]:
        """The pieces of prompts that the last iteration computed."""
        log, chunks = self._engine.engine.log, list[tuple[Job, ChunkDone]]()
        segments = log[-1].iteration.plan.segments if log else ()
        log.clear()
        for segment in segments:
            served = self._served.get(segment.request_id)
            if segment.kind == "prefill" and served is not None:
                chunk = ChunkDone(
                    at_s=end_s,
                    attempt=served.job.attempt,
                    worker=self._context.spec.name,
                    start_s=start_s,
                    computed_tokens=segment.new_tokens,
                    reused_tokens=0 if served.has_begun else segment.cached_tokens,
                    context_tokens=segment.cached_tokens + segment.new_tokens,
                )
                served.has_begun = True
                chunks.append((served.job, chunk))
        return chunks

    def _report_iteration(self, chunks: list[tuple[Job, ChunkDone]], start_s: float, end_s: float) -> None:
        """Steps of requests that had tokens before, then pieces of prompts, then the first tokens of others."""
        made, self._made = self._made, []
        stepped = [served for served, _ in made if served.tokens]
        resumed = [served for served in stepped if not served.is_decoding]
        first = [served for served, _ in made if not served.tokens]
        events: list[WorkerEvent] = [DecodeStarted(at_s=end_s, attempt=one.job.attempt) for one in resumed]
        if stepped:
            ids = [one.job.request_id for one in stepped]
            events.append(_step(self._context.spec.name, start_s, end_s, ids))
        events += [chunk for _, chunk in chunks]
        events += [DecodeStarted(at_s=end_s, attempt=one.job.attempt) for one in first]
        for served, _ in made:
            served.tokens, served.is_decoding = served.tokens + 1, True
        jobs = [served.job for served, _ in made] + [job for job, _ in chunks]
        if jobs:
            tokens = [(served.job.request_id, token) for served, token in made]
            self._context.report(jobs[0], *events, tokens=tokens)

    def _announce(self) -> None:
        """Tell the cluster which whole prompt blocks the engine can find again."""
        match = self._engine.engine.allocator.match
        known = self._ended_keys.union(*(served.keys for served in self._served.values()))
        self._ended_keys = set()
        added = tuple(key for key in known - self._announced if match([key]))
        removed = tuple(key for key in self._announced if not match([key]))
        self._announced.update(added)
        self._announced.difference_update(removed)
        if added or removed:
            self._context.send(CacheUpdate(added=added, removed=removed))


def _report_dropped(context: WorkerContext, job: Job) -> None:
    dropped = PrefillDropped(at_s=time.monotonic(), attempt=job.attempt, worker=context.spec.name)
    context.report(job, dropped)


def _hopeless(job: Job, reason: str) -> AttemptFailed:
    return AttemptFailed(at_s=time.monotonic(), attempt=job.attempt, reason=reason, retriable=False)


def _ended(job: Job, output: Output, end_s: float) -> RequestDone | AttemptFailed:
    if output.finish_reason == "rejected":
        return _hopeless(job, output.error)
    return RequestDone(at_s=end_s, attempt=job.attempt)


def _step(worker: str, start_s: float, end_s: float, request_ids: Sequence[int]) -> StepDone:
    return StepDone(
        at_s=end_s,
        worker=worker,
        start_s=start_s,
        steps=1,
        first_step_s=end_s - start_s,
        step_growth_s=0.0,
        request_ids=tuple(request_ids),
    )


def _tokens(asked: Generation) -> npt.NDArray[np.int32]:
    """The prompt of a request, shape (n,)."""
    return np.frombuffer(asked.prompt, dtype="<i4").astype(np.int32)


def _sampling(asked: Generation) -> Sampling:
    return Sampling(temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, seed=asked.seed)


def _generation_request(asked: Generation, on_token: TokenCallback) -> GenerationRequest:
    """A request as an engine takes it.

    Raises:
        ValueError: when a number of it is out of range.
    """
    return GenerationRequest(
        prompt=_tokens(asked),
        max_new_tokens=asked.max_new_tokens,
        sampling=_sampling(asked),
        end_tokens=asked.end_tokens,
        min_new_tokens=asked.min_new_tokens,
        on_token=on_token,
    )
