"""A prefill worker: fetches prefixes, computes prompts, and streams KVCache to decode workers."""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, final

import torch

from mooncake_lab.batching import PrefillOnly
from mooncake_lab.cluster import SHARED_STORE, events
from mooncake_lab.core import blocks_for
from mooncake_lab.engine import GenerationRequest, KVSpan, PrefillEngine, PrefillResult
from mooncake_lab.engine.host_copies import HostCopies
from mooncake_lab.engine.kv_layout import bytes_of
from mooncake_lab.engine.layerwise.loader import LayerLoader
from mooncake_lab.engine.roles import TokenIds
from mooncake_lab.serving import messages
from mooncake_lab.serving.kv_transfer import LayerStream
from mooncake_lab.serving.kv_transfer.fetch import PrefixSource, fetch_layers
from mooncake_lab.serving.kv_transfer.receiver import ReceivedKV
from mooncake_lab.serving.kv_transfer.sender import KVSender
from mooncake_lab.serving.measuring import measure_prefill, measure_transfer
from mooncake_lab.serving.messages import Job
from mooncake_lab.serving.prefix_cache import PrefixCache, PrefixPlan, open_shared_store
from mooncake_lab.serving.roles import (
    WorkerContext,
    generation_request,
    not_retriable,
    prompt_tokens,
    report_dropped,
)
from mooncake_lab.store.backends import StorageError

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillTask:
    """A request at a prefill worker. Mutable: it waits, and then it runs."""

    order: messages.PrefillOrder
    sender: KVSender
    """To its decode worker."""
    tokens: int
    keys: list[bytes]
    is_ready: bool
    """Whether the first layer of the prefix that comes from elsewhere is here, or the prefix is given up."""
    plan: PrefixPlan
    """Where its prefix is."""
    is_fetching: bool
    """Whether a part of that is on its way from elsewhere."""
    start_s: float = 0.0
    """When its prefill began."""
    deadline: threading.Timer | None = None
    """Ends its fetch."""
    fetching: Future[None] | None = None
    reused_tokens: int = 0
    """Tokens of the prefix that are reused, as far as known when the prompt begins."""
    reports: list[messages.PromptEvent] = field(default_factory=list[messages.PromptEvent])
    """What was reported of it."""

    def stop_fetch(self) -> None:
        """Wait for no prefix from elsewhere any more; blocks that still come are dropped."""
        self.plan.give_up()
        if self.deadline is not None:
            self.deadline.cancel()
        if self.fetching is not None:
            self.fetching.cancel()


@final
class PrefillRole:
    """Computes prompts in order of arrival, one or a few at a time. Mutable: it owns an engine and a store.

    `PrefillOnly` says which of those that wait begin together, and the next begin when these are done.
    A prefix is loaded layer by layer while the rest is computed, from its own tiers, another worker or the shared
    store. Every layer is sent as soon as it is loaded or computed (arXiv Fig. 7). A prompt begins when the first
    layer of what comes from elsewhere is here. Until then, and while its later layers are waited for, it holds up
    those behind it, for at most `fetch_timeout_s`; the other way is worse in the simulation of chapter 09.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        longest = max(context.spec.max_context_tokens, context.spec.pack_tokens)
        tokens = longest + context.spec.block_size_tokens
        self.capacity_tokens = tokens
        self._engine = PrefillEngine(
            context.model,
            context.settings(tokens),
            chunk_tokens=context.spec.chunk_tokens,
            clock=time.monotonic,
        )
        self._policy = PrefillOnly(pack_tokens=context.spec.pack_tokens)
        self._copies = HostCopies()
        self._waiting: deque[PrefillTask] = deque()
        self._running: dict[int, PrefillTask] = {}
        self._batch: list[PrefillTask] = []
        """Prompts that began together, the ended ones included."""
        self._fetcher = ThreadPoolExecutor(2, thread_name_prefix="fetch")
        self._fetches_as = replace(context.identity, timeout_s=context.spec.fetch_timeout_s)
        self._layout = context.layout
        self._cache = PrefixCache(context.spec, context.layout)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="cache")
        context.enqueue(lambda: self._update(self._cache.news()))  # when the cluster knows this worker

    @property
    def busy(self) -> bool:
        """Whether a prompt runs or could begin."""
        return bool(self._running or (self._waiting and self._waiting[0].is_ready))

    def take(self, item: object) -> None:
        """Take an order, or what one of the role's own threads leaves to this one."""
        match item:
            case messages.PrefillOrder():
                self._accept(item)
            case Callable():
                item()
            case ReceivedKV(answer=messages.AnswerBlocks() as answer):
                self._keep_answer(item, answer)
            case messages.UseSharedStore():
                self._background.submit(self._use_shared_store, item.address)
            case messages.CancelOrder():
                self._cancel(item.job)
            case messages.ResetPrefixCache():
                self._update(self._cache.forget())
                self._context.send(messages.Pong(item.number, 0.0))
            case messages.Measure(port=int(port)):
                self._measure(port)
            case _:
                raise TypeError(f"a prefill worker cannot take {type(item).__name__}")

    def step(self) -> None:
        """Begin the next prompts if none runs, and compute one chunk."""
        if not self._running:
            self._begin_batch()
        self._compute()

    def _begin_batch(self) -> None:
        """Begin the first prompt, and those behind it that may share its iteration and its memory."""
        self._batch = []
        now_s, size = time.monotonic(), self._layout.block_tokens
        while self._waiting and self._waiting[0].is_ready:
            prompt = self._waiting[0]
            blocks = prompt.plan.match(read_from_ssd=prompt.order.reused_blocks)
            prompt.reused_tokens = min(blocks * size, prompt.tokens - 1)
            batch_tokens = sum(one.tokens - one.reused_tokens for one in self._batch)
            memory_blocks = sum(blocks_for(one.tokens, size) for one in (*self._batch, prompt))
            fits = not self._batch or memory_blocks * size <= self.capacity_tokens
            if not (fits and self._policy.joins(prompt.tokens - prompt.reused_tokens, batch_tokens)):
                return
            self._batch.append(prompt)
            self._begin(self._waiting.popleft(), now_s)

    def _compute(self) -> None:
        """Compute one chunk, and send what ends with it."""
        for result in self._engine.step():
            self._finish(self._running.pop(result.request_id), result)

    def close(self) -> None:
        """Save what its store holds where that outlives the worker; what still runs ends by itself."""
        for prompt in (*self._waiting, *self._running.values()):
            prompt.stop_fetch()
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        self._background.shutdown(wait=False, cancel_futures=True)
        self._cache.close()

    def lookup(self, job: Job, keys: Sequence[bytes]) -> LayerStream:
        """The leading blocks of these keys that are here, for another worker; runs on its connection's thread."""
        plan = self._cache.prefix(keys)
        for number, layer in enumerate(plan.layers(), 1):
            if number == self._layout.layers and (read := self._tier_read(plan, job)) is not None:
                self._context.report(job, read)
            yield layer

    def _accept(self, order: messages.PrefillOrder) -> None:
        tokens = prompt_tokens(order)
        fetch, keys = order.fetch, self._layout.keys(tokens)
        if fetch is not None and fetch.source == SHARED_STORE and self._cache.match(keys) >= fetch.blocks:
            fetch = None  # all of it is here
        assert order.deliver_to is not None  # noqa: S101  # the cluster names a decode worker with each prompt
        sender = self._context.senders.to(order.deliver_to)
        prompt = PrefillTask(
            order=order,
            sender=sender,
            tokens=len(tokens),
            keys=keys,
            is_ready=fetch is None,
            plan=self._plan(keys),
            is_fetching=fetch is not None,
        )
        self._waiting.append(prompt)
        if fetch is not None:
            late = threading.Timer(self._context.spec.fetch_timeout_s, self._over, [prompt, prompt.plan])
            prompt.deadline, late.daemon = late, True
            late.start()
            prompt.fetching = self._fetcher.submit(self._fetch, prompt, prompt.plan, fetch)

    def _plan(self, keys: Sequence[bytes]) -> PrefixPlan:
        return PrefixPlan(self._cache, keys if self._context.spec.prefix_caching else ())

    def _fetch(self, prompt: PrefillTask, plan: PrefixPlan, wanted: messages.Fetch) -> None:
        """Bring blocks that are not here; they stay, which is how hot blocks spread (FAST'25 §4.2).

        They come from the worker that holds them, and what it lacks from the shared store. Those that are given up
        before their last layer is here are dropped.
        """
        sources = dict[str, PrefixSource]()
        if wanted.port is not None:
            sources[wanted.source] = self._peer(prompt.order.job, wanted.port)
        sources[SHARED_STORE] = self._cache.shared
        try:
            plan.fetch(wanted.blocks, sources, lambda: self._begun(prompt))
        finally:
            self._over(prompt, plan)

    def _begun(self, prompt: PrefillTask) -> None:
        """The first layer of a prefix from elsewhere is here."""

        def ready() -> None:
            prompt.is_ready = True

        self._context.enqueue(ready)

    def _over(self, prompt: PrefillTask, plan: PrefixPlan) -> None:
        """A fetch is over: what came is in the cache; or its time is over, and nothing came."""
        plan.give_up()  # at once: the engine may wait for it
        self._context.enqueue(partial(self._fetched, prompt))

    def _fetched(self, prompt: PrefillTask) -> None:
        self._end_fetch(prompt)
        self._update(self._cache.news())

    def _peer(self, job: Job, port: int) -> PrefixSource:
        """Another worker's store."""
        context, layout = self._context, self._layout
        return lambda keys, _: fetch_layers(port, self._fetches_as, layout, job, keys, context.channel)

    def _end_fetch(self, prompt: PrefillTask) -> None:
        """The prefix of a prompt is here, or is computed after all; once per prompt."""
        fetch, plan = prompt.order.fetch, prompt.plan
        if fetch is None or not prompt.is_fetching:
            return
        prompt.stop_fetch()
        prompt.is_ready, prompt.is_fetching = True, False
        if not prompt.start_s:  # what came is in the cache, which may evict it again while the prompt waits
            prompt.plan = self._plan(prompt.keys)
        came = plan.bytes_by_source()
        for source in dict.fromkeys((fetch.source, *came)):
            size = came.get(source, 0)
            if size or source == fetch.source:
                fetched = events.PrefixFetched(
                    at_s=plan.fetch_end_s,
                    attempt=prompt.order.job.attempt,
                    source=source,
                    instance=self._context.spec.name,
                    start_s=plan.fetch_start_s,
                    bytes=size,
                )
                self._report(prompt, fetched)

    def _use_shared_store(self, address: str | None) -> None:
        """Use the shared store at an address, or none."""
        context = self._context
        try:
            store = None if address is None else open_shared_store(context.spec, context.layout, address)
            self._cache.use_shared_store(store)
        except (OSError, StorageError) as error:
            _LOG.warning("%s does not use the shared store at %s: %s", context.spec.name, address, error)
            return
        context.enqueue(lambda: self._update(self._cache.news()))

    def _begin(self, prompt: PrefillTask, now_s: float) -> None:
        prompt.start_s = now_s
        context, job = self._context, prompt.order.job
        attempt, name = job.attempt, context.spec.name
        context.report(job, events.PrefillStarted(at_s=prompt.start_s, attempt=attempt, instance=name))
        prompt.sender.send(messages.StartTransfer(job=job, tokens=prompt.tokens))
        stream = partial(self._send_layer, prompt.sender, job)
        loader = LayerLoader(
            prompt.plan,
            self._layout,
            on_layer=lambda layer, span: stream(layer, 0, span),
            whole=not context.spec.streams_layers,
        )
        try:
            request_id = self._engine.submit(
                generation_request(prompt.order, on_kv=stream if context.spec.streams_layers else None),
                prefix=loader if prompt.plan.blocks else (),
            )
        except ValueError as error:
            prompt.sender.send(messages.CancelOrder(job))
            self._batch.remove(prompt)
            report_dropped(context, job)
            context.report(job, not_retriable(job, str(error)))
            return
        self._running[request_id] = prompt

    def _finish(self, prompt: PrefillTask, result: PrefillResult) -> None:
        context, job = self._context, prompt.order.job
        self._end_fetch(prompt)
        reused = prompt.reused_tokens = result.reused_tokens
        if context.spec.pacer is not None:
            parts = [(one.tokens, one.reused_tokens) for one in self._batch]
            context.spec.pacer.hold_prefill(prompt.start_s, parts)
        prefilled = events.PrefillDone(
            at_s=time.monotonic(),
            attempt=job.attempt,
            instance=context.spec.name,
            start_s=prompt.start_s,
            computed_tokens=prompt.tokens - reused,
            reused_tokens=reused,
        )
        if (read := self._tier_read(prompt.plan, job)) is not None:
            self._report(prompt, read)
        self._report(prompt, prefilled, tokens=[(job.request_id, result.first_token)])
        if not context.spec.streams_layers and result.kv.tokens:
            for layer, tensor in enumerate(result.kv.layers):
                self._send_layer(prompt.sender, job, layer, result.kv.start, tensor)
        prompt.sender.send(
            messages.EndTransfer(job=job, first_token=result.first_token, reports=tuple(prompt.reports))
        )
        if context.spec.prefix_caching:
            self._cache.keep(prompt.keys, self._copies.of(result.kv))
            self._update(self._cache.news())

    def _keep_answer(self, came: ReceivedKV, answer: messages.AnswerBlocks) -> None:
        """Keep the whole blocks of an answer that a decode worker sends back."""
        context, size = self._context, self._layout.block_tokens
        blocks = [
            tuple(layer[:, place * size : (place + 1) * size].contiguous() for layer in came.kv.layers)
            for place in range(len(answer.keys))
        ]
        self._cache.adopt(answer.keys, blocks, first=answer.first)
        kept = events.AnswerKept(
            at_s=time.monotonic(),
            attempt=came.job.attempt,
            instance=context.spec.name,
            source=answer.source,
            start_s=answer.start_s,
            bytes=sum(move.bytes for move in came.moves),
        )
        context.report(came.job, kept)
        self._update(self._cache.news())

    def _tier_read(self, plan: PrefixPlan, job: Job) -> events.TierRead | None:
        """Copy what of a prefix came from the SSD to DRAM, in the background; the report of that, if any did."""
        if not plan.ssd_bytes:
            return None
        with suppress(RuntimeError):  # the worker ends
            self._background.submit(self._promote, plan.keys[: plan.blocks])
        return events.TierRead(
            at_s=plan.ssd_end_s,
            attempt=job.attempt,
            instance=self._context.spec.name,
            start_s=plan.ssd_start_s,
            bytes=plan.ssd_bytes,
        )

    def _report(
        self, prompt: PrefillTask, event: messages.PromptEvent, *, tokens: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Report an event of a prompt; its decode worker will report it too."""
        prompt.reports.append(event)
        self._context.report(prompt.order.job, event, tokens=tokens)

    def _promote(self, keys: Sequence[bytes]) -> None:
        self._cache.promote(keys)
        self._context.enqueue(lambda: self._update(self._cache.news()))

    def _update(self, update: messages.CacheUpdate | None) -> None:
        """Tell the cluster what came into the cache and what left it."""
        if update is not None:
            self._context.send(update)

    def _cancel(self, job: Job) -> None:
        for prompt in [prompt for prompt in self._waiting if prompt.order.job == job]:
            self._end_fetch(prompt)  # the cluster counts it as under way until this is reported
            self._waiting.remove(prompt)
        for request_id, prompt in list(self._running.items()):
            if prompt.order.job == job:
                self._end_fetch(prompt)
                del self._running[request_id]
                self._batch.remove(prompt)
                self._engine.engine.cancel(request_id)
                self._compute()  # what ends it; the others of its iteration go on
                prompt.sender.send(messages.CancelOrder(job))
        report_dropped(self._context, job)

    def _measure(self, port: int) -> None:
        """Time prompts whose KVCache is sent as in serving, transfers, and reads from the SSD."""
        context, numbers = self._context, itertools.count()
        sender = context.senders.to(port)

        def prefill(prompt: TokenIds, prefix: Sequence[KVSpan]) -> None:
            job = Job(-1, next(numbers), 1)  # of no run
            sender.send(messages.StartTransfer(job=job, tokens=len(prompt)))
            stream = partial(self._send_layer, sender, job)
            for span in prefix:
                for layer, tensor in enumerate(span.layers):
                    stream(layer, 0, tensor)
            request = GenerationRequest(prompt=prompt, on_kv=stream if context.spec.streams_layers else None)
            self._engine.wait(self._engine.submit(request, prefix=prefix))
            sender.send(messages.CancelOrder(job))  # it is not decoded

        rows = measure_prefill(prefill, context.layout, context.spec, context.model.config.vocabulary)
        transfer = measure_transfer(port, context.identity, context.link, context.channel)
        context.send(messages.Measured(prefill=rows, transfer=transfer, ssd=self._cache.time_ssd()))

    def _send_layer(self, sender: KVSender, job: Job, layer: int, start: int, span: torch.Tensor) -> None:
        """Send the KVCache of one layer of some tokens; shape (2, tokens, KV heads, head width).

        From a device it comes beside the computation, and the sender's thread waits for it.
        """
        copy = self._copies.start(span)
        chunk = messages.KVChunk(job=job, layer=layer, start=start, tokens=span.shape[1])
        sender.send(chunk, [bytes_of(copy.tensor)], wait=copy.wait)
