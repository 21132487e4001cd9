"""A prefill worker: fetches prefixes, computes prompts, and streams KVCache to decode workers."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, final

import torch

from mooncake_lab.cluster import (
    POOL,
    PrefillDone,
    PrefillDropped,
    PrefillStarted,
    PrefixFetched,
    TierRead,
)
from mooncake_lab.engine import (
    PrefillEngine,
    PrefillResult,
)
from mooncake_lab.engine.kv_layout import bytes_of
from mooncake_lab.engine.layerwise.arriving import ArrivingPrefix
from mooncake_lab.serving.kv_transfer.fetch import PrefixSource, fetch, open_pool
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
    UsePool,
)
from mooncake_lab.serving.prefix_cache import HeldPrefix, PrefixCache
from mooncake_lab.serving.roles.base import (
    WorkerContext,
    hopeless,
    prompt_tokens,
    report_dropped,
    sampling,
)
from mooncake_lab.store.backends import StorageError

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """A request at a prefill worker. Mutable: it waits, and then it runs."""

    order: PrefillOrder
    keys: list[bytes]
    is_ready: bool
    """Whether the prefix that comes from elsewhere is here, or given up."""
    start_s: float = 0.0
    """When its fetch began, and later when its prefill began."""
    deadline: threading.Timer | None = None
    """Ends its fetch."""
    held: HeldPrefix | None = None
    """What is loaded while it is computed."""


@dataclass(frozen=True, slots=True)
class FetchEnded:
    """A fetch is over: what came is in the cache; or its time is over, and nothing came."""

    prompt: Prompt
    came: tuple[tuple[str, int], ...] = ()
    """Bytes by the worker, or the pool, that they came from."""


@dataclass(frozen=True, slots=True)
class _FoundInPool:
    """The cache uses another pool, or none."""

    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class _CameUp:
    """The cluster knows this worker now."""


@final
class PrefillRole:
    """Computes prompts one after the other, in order of arrival. Mutable: it owns an engine and a store.

    A prefix is loaded from the store layer by layer while the rest is computed, and every layer is sent as soon as
    it is loaded or computed (arXiv Fig. 7). A prompt whose prefix is on its way from elsewhere holds up those
    behind it for at most `fetch_timeout_s`; the other way is worse in the simulation of chapter 09.
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
        self._fetches_as = replace(context.identity, timeout_s=context.spec.fetch_timeout_s)
        self._layout = replace(context.shape, block_tokens=context.spec.block_size_tokens)
        self._cache = PrefixCache(context.spec, context.shape)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="cache")
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
            case FetchEnded():
                self._end_fetch(item.prompt, dict(item.came))
            case _CameUp():
                self._update(self._cache.found_at_start())
            case _FoundInPool():
                self._update(self._cache.news(item.keys))
            case UsePool():
                self._background.submit(self._use_pool, item.address)
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
        for prompt in self._waiting:
            if prompt.deadline is not None:
                prompt.deadline.cancel()
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        self._background.shutdown(wait=True, cancel_futures=True)
        self._cache.close()

    def lookup(self, keys: Sequence[bytes]) -> list[tuple[torch.Tensor, ...]]:
        """The leading blocks of these keys that are here, for another worker; runs on its connection's thread."""
        return self._cache.blocks(keys)

    def _accept(self, order: PrefillOrder) -> None:
        fetch, keys = order.fetch, self._context.keys(prompt_tokens(order.asked))
        if fetch is not None and fetch.source == POOL and self._cache.match(keys) >= fetch.blocks:
            fetch = None  # all of it is here
        prompt = Prompt(order=order, keys=keys, is_ready=fetch is None)
        self._waiting.append(prompt)
        if fetch is not None:
            timeout_s, end = self._context.spec.fetch_timeout_s, FetchEnded(prompt)
            late = threading.Timer(timeout_s, self._context.enqueue, [end])
            prompt.start_s, prompt.deadline, late.daemon = time.monotonic(), late, True
            late.start()
            self._fetcher.submit(self._fetch, prompt, fetch)

    def _fetch(self, prompt: Prompt, wanted: Fetch) -> None:
        """Copy blocks that are not here; they stay, which is how hot blocks spread (FAST'25 §4.2).

        They come from the worker that holds them, and what it lacks from the pool. When the prompt has begun
        without them they are dropped.
        """
        keys, came = prompt.keys[: wanted.blocks], list[tuple[str, int]]()
        sources: dict[str, PrefixSource] = {} if wanted.port is None else {wanted.source: self._peer(wanted.port)}
        sources[POOL] = self._cache.pooled
        try:
            for name, source in sources.items():
                have = self._cache.match(keys)
                blocks = source(keys[have:], have) if have < len(keys) else []
                if prompt.is_ready:
                    return
                self._cache.adopt(keys[have : have + len(blocks)], blocks, first=have)
                came.append((name, sum(layer.nbytes for block in blocks for layer in block)))
        finally:
            self._context.enqueue(FetchEnded(prompt, tuple(came)))

    def _peer(self, port: int) -> PrefixSource:
        """Another worker's store."""
        context = self._context
        size = context.spec.block_size_tokens
        return lambda keys, _first: fetch(port, self._fetches_as, context.shape, keys, size, context.channel)

    def _end_fetch(self, prompt: Prompt, came: dict[str, int]) -> None:
        """The prefix of a prompt is here, or is computed after all; once per prompt."""
        order = prompt.order
        if prompt.is_ready or prompt.deadline is None or order.fetch is None:
            return
        prompt.deadline.cancel()
        prompt.is_ready = True
        for source in dict.fromkeys((order.fetch.source, *came)):
            size = came.get(source, 0)
            if size or source == order.fetch.source:
                self._report_fetched(prompt, source, size)
        self._update(self._cache.news(prompt.keys))

    def _report_fetched(self, prompt: Prompt, source: str, size: int) -> None:
        fetched = PrefixFetched(
            at_s=time.monotonic(),
            attempt=prompt.order.job.attempt,
            source=source,
            worker=self._context.spec.name,
            start_s=prompt.start_s,
            bytes=size,
        )
        self._context.report(prompt.order.job, fetched)

    def _use_pool(self, address: str | None) -> None:
        """Use the pool at an address, or none."""
        context = self._context
        try:
            pool = None if address is None else open_pool(context.spec, context.shape, address)
            found = self._cache.use_pool(pool)
        except (OSError, StorageError) as error:
            _LOG.warning("%s does not use the pool at %s: %s", context.spec.name, address, error)
            return
        context.enqueue(_FoundInPool(found))

    def _begin(self, prompt: Prompt) -> None:
        prompt.start_s = time.monotonic()
        context, order, asked = self._context, prompt.order, prompt.order.asked
        attempt, name = order.job.attempt, context.spec.name
        context.report(order.job, PrefillStarted(at_s=prompt.start_s, attempt=attempt, worker=name))
        tokens = prompt_tokens(asked)
        assert order.deliver_to is not None  # noqa: S101  # the cluster names a decode worker with each prompt
        sender = context.senders.to(order.deliver_to)
        sender.send(StartTransfer(job=order.job, tokens=len(tokens)))

        def stream(layer: int, start: int, span: torch.Tensor) -> None:
            host = span.cpu().contiguous()
            sender.send(KVChunk(job=order.job, layer=layer, start=start, tokens=host.shape[1]), [bytes_of(host)])

        prompt.held = self._cache.prefix(prompt.keys if context.spec.prefix_reuse else ())
        arriving = ArrivingPrefix(
            prompt.held,
            self._layout,
            on_layer=lambda layer, span: stream(layer, 0, span),
            whole=not context.spec.layerwise,
        )
        try:
            request_id = self._engine.submit(
                tokens,
                prefix=arriving if prompt.held.blocks else (),
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
        if context.spec.pacer is not None:
            context.spec.pacer.hold_prefill(prompt.start_s, tokens, reused)
        prefilled = PrefillDone(
            at_s=time.monotonic(),
            attempt=job.attempt,
            worker=context.spec.name,
            start_s=prompt.start_s,
            computed_tokens=tokens - reused,
            reused_tokens=reused,
        )
        self._report_tier_read(prompt)
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

    def _report_tier_read(self, prompt: Prompt) -> None:
        """What of the prefix came from the SSD is in DRAM from now on."""
        held, job = prompt.held, prompt.order.job
        if held is not None and held.ssd_bytes:
            read = TierRead(
                at_s=held.ssd_end_s,
                attempt=job.attempt,
                worker=self._context.spec.name,
                start_s=held.ssd_start_s,
                bytes=held.ssd_bytes,
            )
            self._context.report(job, read)
            self._background.submit(self._cache.promote, held.keys)

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
