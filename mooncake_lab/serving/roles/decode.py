"""Workers that decode: one that takes in KVCache, and a coupled one that computes its prompts itself."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import msgspec

from mooncake_lab.batching import BATCHING_POLICIES
from mooncake_lab.cluster import events
from mooncake_lab.cluster.iteration import CoupledRequest, iteration_events, preemptions
from mooncake_lab.engine import DecodeEngine, Engine, GenerationRequest, KVSpan
from mooncake_lab.engine.kv_layout import bytes_of
from mooncake_lab.engine.roles import TokenIds
from mooncake_lab.engine.sequence import RunningRequest
from mooncake_lab.serving import messages
from mooncake_lab.serving.kv_transfer.receiver import ReceivedKV
from mooncake_lab.serving.measuring import measure_decode, measure_prefill
from mooncake_lab.serving.messages import Job
from mooncake_lab.serving.roles import (
    WorkerContext,
    ended,
    generation_request,
    not_retriable,
    prompt_tokens,
    report_dropped,
    step_done,
)

_REMEMBERED: Final = 4096
"""Cancelled attempts whose KVCache a decode worker still refuses."""


@final
class DecodeRole:
    """Decodes requests whose KVCache arrived, one token each per iteration. Mutable: it owns an engine."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._engine = DecodeEngine(
            context.model, context.settings(context.spec.device_tokens), clock=time.monotonic
        )
        self._engine.engine.record_steps()
        self.capacity_tokens = self._engine.engine.blocks * context.spec.block_size_tokens
        self._expected: dict[Job, messages.DecodeOrder] = {}
        self._arrived: dict[Job, ReceivedKV] = {}
        self._cancelled: OrderedDict[Job, None] = OrderedDict()
        self._running: dict[int, Job] = {}
        self._made: list[tuple[Job, int]] = []
        self._answers: list[tuple[Job, int, KVSpan, messages.AnswerBlocks]] = []

    @property
    def busy(self) -> bool:
        """Whether a request is in the engine."""
        return self._engine.engine.busy

    def take(self, item: object) -> None:
        """Take an order, or KVCache."""
        match item:
            case messages.DecodeOrder():
                self._expected[item.job] = item
                self._join(item.job)
            case ReceivedKV():
                if item.job not in self._cancelled:
                    self._arrived[item.job] = item
                    self._join(item.job)
            case messages.CancelOrder():
                self._cancel(item.job)
            case messages.ResetPrefixCache():
                self._context.send(messages.Pong(item.number, 0.0))  # nothing is kept here
            case messages.Measure():
                context = self._context
                vocabulary = context.model.config.vocabulary
                context.send(measure_decode(self._engine.engine, context.layout, context.spec, vocabulary))
            case _:
                raise TypeError(f"a decode worker cannot take {type(item).__name__}")

    def step(self) -> None:
        """Generate one token for each request in the batch."""
        start_s = time.monotonic()
        done = self._engine.step()
        if self._context.spec.pacer is not None:
            self._context.spec.pacer.hold_decode(start_s, self._engine.engine.last_plan)
        end_s = time.monotonic()
        if self._made:
            made = [(job.request_id, token) for job, token in self._made]
            step = step_done(self._context.spec.name, start_s, end_s, [request_id for request_id, _ in made])
            self._context.report(self._made[0][0], step, tokens=made)
            self._made = []
        for output in done:
            job = self._running.pop(output.request_id, None)
            if job is not None:  # else it was cancelled
                self._context.report(job, ended(job, output, end_s))
        if self._answers:
            self._send_answers()

    def _join(self, job: Job) -> None:
        """Submit a request to the engine once it is expected and its KVCache is here."""
        if job not in self._expected or job not in self._arrived:
            return
        order, came = self._expected.pop(job), self._arrived.pop(job)
        params = order.params
        ends = self._context.model.config.end_tokens if params.end_tokens is None else params.end_tokens
        if params.max_new_tokens == 1 or came.first_token in ends:
            self._report_joined(job, came)
            self._context.report(job, events.RequestDone(at_s=time.monotonic(), attempt=job.attempt))
            return
        try:
            request = generation_request(order, on_token=lambda _, token: self._made.append((job, token)))
            request_id = self._engine.submit(
                request,
                first_token=came.first_token,
                kv=(came.kv,),
                before_release=None if order.keep_at is None else partial(self._export, job, order.keep_at),
            )
        except ValueError as error:
            self._context.report(job, not_retriable(job, str(error)))
            return
        self._running[request_id] = job
        self._report_joined(job, came)

    def _export(self, job: Job, port: int, done: RunningRequest) -> None:
        """Copy the whole blocks of a complete answer; the KVCache of its last token was never computed.

        The prefill worker has the whole blocks of the prompt.
        """
        size = self._context.spec.block_size_tokens
        first, blocks = len(done.request.prompt) // size, (done.known - 1) // size
        if first < blocks:
            kv = self._engine.engine.runner.export(done, first * size, blocks * size)
            keys = tuple(self._context.layout.keys(done.tokens[: blocks * size])[first:])
            answer = messages.AnswerBlocks(self._context.spec.name, first, keys, time.monotonic())
            self._answers.append((job, port, kv, answer))

    def _send_answers(self) -> None:
        """Send answers to the prefill workers that keep them; their requests were reported as done before."""
        answers, self._answers = self._answers, []
        for job, port, kv, answer in answers:
            sender = self._context.senders.to(port)
            sender.send(messages.StartTransfer(job=job, tokens=kv.tokens))
            for layer, tensor in enumerate(kv.layers):
                chunk = messages.KVChunk(job=job, layer=layer, start=0, tokens=kv.tokens)
                sender.send(chunk, [bytes_of(tensor.cpu().contiguous())])
            sender.send(messages.EndTransfer(job=job, first_token=0, reports=(), answer=answer))

    def _report_joined(self, job: Job, came: ReceivedKV) -> None:
        """KVCache arrived, and the token that prefill computed is shown."""
        attempt, now_s = job.attempt, time.monotonic()
        last = came.moves[-1]
        self._context.report(
            job,
            *came.reports,
            *(
                events.KVArrived(
                    at_s=m.end_s, attempt=attempt, start_s=m.start_s, bytes=m.bytes, is_last=m is last
                )
                for m in came.moves
            ),
            events.KVLoaded(at_s=now_s, attempt=attempt),
            events.DecodeStarted(at_s=now_s, attempt=attempt),
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
class _Served(CoupledRequest):
    job: Job
    keys: list[bytes]


@final
class CoupledRole:
    """Does both stages in one engine, under any batching policy (the baseline, FAST'25 §5.1). Mutable."""

    def __init__(self, context: WorkerContext) -> None:
        self._context, spec = context, context.spec
        name, parameters = spec.batching
        settings = context.settings(spec.device_tokens, prefix_caching=spec.prefix_caching)
        policy = BATCHING_POLICIES[name](**parameters)
        self._engine = Engine(context.model, policy, settings, clock=time.monotonic)
        self._engine.record_steps()
        self.capacity_tokens = self._engine.blocks * spec.block_size_tokens
        self._served: dict[int, _Served] = {}  # by the engine's id
        self._made: list[tuple[int, int]] = []
        self._ended_keys: set[bytes] = set()
        self._announced: set[bytes] = set()

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return self._engine.busy

    def take(self, item: object) -> None:
        """Take an order."""
        match item:
            case messages.PrefillOrder():
                self._accept(item)
            case messages.CancelOrder():
                for request_id in [key for key, one in self._served.items() if one.job == item.job]:
                    self._leave(request_id)
                    self._engine.cancel(request_id)
                report_dropped(self._context, item.job)
            case messages.ResetPrefixCache():
                self._engine.allocator.forget()
                self._announce()
                self._context.send(messages.Pong(item.number, 0.0))
            case messages.Measure():
                self._measure()
            case _:
                raise TypeError(f"a coupled worker cannot take {type(item).__name__}")

    def step(self) -> None:
        """Run one iteration: pieces of prompts, and decodes."""
        start_s, spec = time.monotonic(), self._context.spec
        done = self._engine.step()
        plan = self._engine.last_plan
        parts = [(self._served[segment.request_id], segment) for segment in plan.segments]
        if spec.pacer is not None:
            begun = sum(segment.kind == "prefill" and not served.begun for served, segment in parts)
            spec.pacer.hold_iteration(start_s, plan, begun)
        end_s = time.monotonic()
        waiting = self._engine.instance.waiting
        reported: list[messages.WorkerEvent] = [
            *preemptions(plan, waiting, self._served, spec.name, start_s),
            *iteration_events(step_done(spec.name, start_s, end_s, ()), parts),
        ]
        made, self._made = self._made, []
        if reported:
            job = next(iter(self._served.values())).job  # any of the run
            self._context.report(job, *reported, tokens=made)
        for output in done:
            served = self._leave(output.request_id)
            if served is None:
                continue  # cancelled
            if output.finish_reason == "rejected":
                report_dropped(self._context, served.job)
            self._context.report(served.job, ended(served.job, output, end_s))
        if plan.prefills:
            self._announce()

    def _measure(self) -> None:
        engine, context = self._engine, self._context
        known = context.layout, context.spec, context.model.config.vocabulary

        def prefill(prompt: TokenIds, _: Sequence[KVSpan]) -> None:
            engine.submit(GenerationRequest(prompt=prompt, max_new_tokens=1, end_tokens=()))
            engine.run()

        rows = measure_prefill(prefill, *known)
        context.send(msgspec.structs.replace(measure_decode(engine, *known), prefill=rows))
        engine.allocator.forget()

    def _accept(self, order: messages.PrefillOrder) -> None:
        prompt = prompt_tokens(order)
        keys = self._context.layout.keys(prompt) if self._context.spec.prefix_caching else []
        job, shown = order.job, order.shown_tokens
        served = _Served(job=job, keys=keys, attempt=job.attempt, shown_tokens=shown, generated_tokens=shown)
        try:
            request = generation_request(
                order, on_token=lambda _, token: self._made.append((job.request_id, token))
            )
            request_id = self._engine.submit(request)
        except ValueError as error:
            report_dropped(self._context, order.job)
            self._context.report(order.job, not_retriable(order.job, str(error)))
            return
        self._served[request_id] = served

    def _leave(self, request_id: int) -> _Served | None:
        """A request is here no longer; what it computed may be found again."""
        served = self._served.pop(request_id, None)
        if served is not None:
            self._ended_keys.update(served.keys)
        return served

    def _announce(self) -> None:
        """Tell the cluster which whole prompt blocks the engine can find again."""
        match = self._engine.allocator.match
        known = self._ended_keys.union(*(served.keys for served in self._served.values()))
        self._ended_keys = set()
        added = tuple(key for key in known - self._announced if match([key]))
        removed = tuple(key for key in self._announced if not match([key]))
        self._announced.update(added)
        self._announced.difference_update(removed)
        if added or removed:
            self._context.send(messages.CacheUpdate(added=added, removed=removed))
