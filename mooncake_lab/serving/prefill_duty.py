"""A prefill worker's duty: reuse a prefix, compute the rest, and send every layer on its way as it is computed."""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import torch

from mooncake_lab.engine import KVSpan, PrefillEngine, PrefillResult
from mooncake_lab.serving import messages
from mooncake_lab.serving.desk import Desk, sampling_of, tokens_of
from mooncake_lab.serving.fetching import fetch
from mooncake_lab.serving.kv import raw
from mooncake_lab.serving.measure import measure_prefill, measure_transfer
from mooncake_lab.serving.messages import Compute, Holds, Job, Span
from mooncake_lab.serving.parcels import Begin, End, Piece
from mooncake_lab.serving.prefix_cache import PrefixCache


@dataclass(slots=True, kw_only=True, eq=False)
class _Prompt:
    """A request on its way through here. Mutable: it waits, and then it runs."""

    order: Compute
    keys: list[bytes]
    is_ready: bool
    """Whether the prefix that comes from elsewhere is here, or given up."""
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _FetchEnded:
    prompt: _Prompt


@dataclass(frozen=True, slots=True)
class _Born:
    """A note to itself: the cluster knows this worker now."""


@final
class PrefillDuty:
    """Prompts one after the other, in order of arrival. Mutable: it owns an engine and a store.

    One whose prefix is still on its way holds up those behind it; that is short, and the other way is worse in the
    simulation of chapter 09.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        tokens = desk.spec.max_request_tokens + desk.spec.block_size_tokens
        self.capacity_tokens = tokens
        self._engine = PrefillEngine(
            desk.model, desk.settings(tokens), chunk_tokens=desk.spec.chunk_tokens, clock=time.monotonic
        )
        self._waiting: deque[_Prompt] = deque()
        self._running: dict[int, _Prompt] = {}
        self._fetcher = ThreadPoolExecutor(2, thread_name_prefix="fetch")
        self._cache = PrefixCache(desk.spec, desk.shape)
        desk.note(_Born())

    @property
    def busy(self) -> bool:
        """Whether a prompt runs or could begin."""
        return bool(self._running or (self._waiting and self._waiting[0].is_ready))

    def take(self, item: object) -> None:
        """Take an order, or the end of a fetch."""
        match item:
            case Compute():
                self._accept(item)
            case _FetchEnded():
                item.prompt.is_ready = True
                self._tell(self._cache.news(item.prompt.keys))
            case _Born():
                self._tell(self._cache.found_at_birth())
            case messages.Cancel():
                self._cancel(item.job)
            case messages.Forget():
                self._tell(self._cache.forget())
                self._desk.say(messages.Pong(item.number, 0.0))
            case messages.Measure():
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

    def _accept(self, order: Compute) -> None:
        keys = self._desk.keys(tokens_of(order.asked))
        prompt = _Prompt(order=order, keys=keys, is_ready=order.fetch_from is None)
        self._waiting.append(prompt)
        if order.fetch_from is not None:
            self._fetcher.submit(self._fetch, prompt, order.fetch_from)

    def _fetch(self, prompt: _Prompt, port: int) -> None:
        """Copy missing blocks from their holder; they stay, which is how hot blocks spread (FAST'25 §4.2)."""
        try:
            self._copy_blocks(prompt, port)
        finally:  # whatever happened: a prompt that waits for ever would hold up all behind it
            self._desk.note(_FetchEnded(prompt))

    def _copy_blocks(self, prompt: _Prompt, port: int) -> None:
        desk, wanted = self._desk, prompt.keys[: prompt.order.fetch_blocks]
        have = self._cache.match(wanted)
        start_s = time.monotonic()
        blocks = fetch(port, desk.who, desk.shape, wanted[have:], desk.spec.block_size_tokens, desk.lane)
        self._cache.adopt(wanted[have : have + len(blocks)], blocks, first=have)
        if blocks:
            size = len(blocks) * desk.spec.block_size_tokens * desk.shape.bytes_per_token
            desk.say(messages.Fetched(job=prompt.order.job, start_s=start_s, end_s=time.monotonic(), bytes=size))

    def _begin(self, prompt: _Prompt) -> None:
        prompt.start_s = time.monotonic()
        desk, order, asked = self._desk, prompt.order, prompt.order.asked
        tokens = tokens_of(asked)
        prefix = self._reuse(prompt) if desk.spec.prefix_reuse else None
        assert order.deliver_to is not None  # noqa: S101  # the cluster names a decode worker with each prompt
        courier = desk.couriers.to(order.deliver_to)
        courier.send(Begin(job=order.job, tokens=len(tokens)))

        def stream(layer: int, start: int, span: torch.Tensor) -> None:
            host = span.cpu().contiguous()
            courier.send(Piece(job=order.job, layer=layer, start=start, tokens=host.shape[1]), [raw(host)])

        if prefix is not None:
            for layer, tensor in enumerate(prefix.layers):
                stream(layer, 0, tensor)
        try:
            request_id = self._engine.submit(
                tokens,
                prefix=() if prefix is None else (prefix,),
                sampling=sampling_of(asked),
                end_tokens=asked.end_tokens,
                min_new_tokens=asked.min_new_tokens,
                on_kv=stream if desk.spec.layerwise else None,
            )
        except ValueError as error:
            courier.send(messages.Cancel(order.job))
            desk.say(messages.Trouble(job=order.job, reason=str(error), is_hopeless=True))
            return
        self._running[request_id] = prompt

    def _finish(self, prompt: _Prompt, result: PrefillResult) -> None:
        order, tokens, reused = prompt.order, len(prompt.order.asked.prompt) // 4, result.reused_tokens
        if self._desk.spec.metronome is not None:
            self._desk.spec.metronome.hold_prefill(prompt.start_s, tokens, reused)
        span = Span(order.job, prompt.start_s, time.monotonic(), tokens - reused, reused)
        self._desk.say(messages.Prefilled(span, result.first_token))
        assert order.deliver_to is not None  # noqa: S101  # as above
        courier = self._desk.couriers.to(order.deliver_to)
        if not self._desk.spec.layerwise:
            self._send_all(order, result.kv)
        courier.send(End(job=order.job, first_token=result.first_token, span=span))
        if self._desk.spec.prefix_reuse:
            self._cache.keep(prompt.keys, result.kv)
            self._tell(self._cache.news(prompt.keys))

    def _send_all(self, order: Compute, kv: KVSpan) -> None:
        assert order.deliver_to is not None  # noqa: S101  # as above
        courier = self._desk.couriers.to(order.deliver_to)
        for layer, tensor in enumerate(kv.layers):
            if not kv.tokens:
                continue
            host = tensor.cpu().contiguous()
            courier.send(Piece(job=order.job, layer=layer, start=kv.start, tokens=kv.tokens), [raw(host)])

    def _reuse(self, prompt: _Prompt) -> KVSpan | None:
        """The prefix that is here now."""
        found = self._cache.read(prompt.keys)
        if found is None:
            return None
        if found.ssd_bytes:
            self._desk.say(
                messages.Loaded(
                    job=prompt.order.job, start_s=found.start_s, end_s=found.end_s, bytes=found.ssd_bytes
                )
            )
        return found.span

    def _tell(self, news: Holds | None) -> None:
        """Tell the cluster what came into the cache and what left it."""
        if news is not None:
            self._desk.say(news)

    def _cancel(self, job: Job) -> None:
        self._waiting = deque(prompt for prompt in self._waiting if prompt.order.job != job)
        for request_id, prompt in list(self._running.items()):
            if prompt.order.job == job:
                del self._running[request_id]
                self._engine.engine.cancel(request_id)
                self._engine.step()
                if prompt.order.deliver_to is not None:
                    self._desk.couriers.to(prompt.order.deliver_to).send(messages.Cancel(job))

    def _measure(self, port: int | None) -> None:
        desk = self._desk
        self._desk.say(
            messages.Measured(
                prefill=measure_prefill(self._engine, desk.model, desk.shape, desk.spec),
                transfer=() if port is None else measure_transfer(port, desk.who, desk.lane),
            )
        )
