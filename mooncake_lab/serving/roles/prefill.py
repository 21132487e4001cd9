"""A prefill worker: fetches prefixes, computes prompts, and streams KVCache to decode workers."""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import torch

from mooncake_lab.cluster import (
    PrefillDone,
    PrefillDropped,
    PrefillStarted,
    PrefixFetched,
    TierRead,
)
from mooncake_lab.engine import (
    KVSpan,
    PrefillEngine,
    PrefillResult,
)
from mooncake_lab.engine.kv_layout import bytes_of
from mooncake_lab.serving.kv_transfer.fetch import fetch
from mooncake_lab.serving.kv_transfer.protocol import EndTransfer, KVChunk, StartTransfer
from mooncake_lab.serving.measure import measure_prefill, measure_transfer
from mooncake_lab.serving.messages import (
    CacheUpdate,
    CancelOrder,
    Fetch,
    Job,
    Measure,
    Measured,
    Pong,
    PrefillOrder,
    ResetPrefixCache,
)
from mooncake_lab.serving.prefix_cache import PrefixCache
from mooncake_lab.serving.roles.base import (
    WorkerContext,
    hopeless,
    prompt_tokens,
    report_dropped,
    sampling,
)


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
        keys = self._context.keys(prompt_tokens(order.asked))
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
        tokens = prompt_tokens(asked)
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
                sampling=sampling(asked),
                end_tokens=asked.end_tokens,
                min_new_tokens=asked.min_new_tokens,
                on_kv=stream if context.spec.layerwise else None,
            )
        except ValueError as error:
            sender.send(CancelOrder(order.job))
            now_s = time.monotonic()
            dropped = PrefillDropped(at_s=now_s, attempt=attempt, worker=name)
            context.report(order.job, dropped, hopeless(order.job, str(error)))
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
        report_dropped(self._context, job)

    def _measure(self, port: int | None) -> None:
        context = self._context
        self._context.send(
            Measured(
                prefill=measure_prefill(self._engine, context.model, context.shape, context.spec),
                transfer=() if port is None else measure_transfer(port, context.identity, context.channel),
            )
        )
