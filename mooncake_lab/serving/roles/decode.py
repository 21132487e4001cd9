"""A decode worker: takes in KVCache that arrives, and decodes all its requests together."""

import time
from collections import OrderedDict
from typing import Final, final

from mooncake_lab.cluster import (
    DecodeStarted,
    KVArrived,
    KVLoaded,
    KVPartArrived,
    RequestDone,
)
from mooncake_lab.engine import (
    DecodeEngine,
)
from mooncake_lab.serving.kv_transfer.receiver import ReceivedKV
from mooncake_lab.serving.measure import measure_decode
from mooncake_lab.serving.messages import (
    CancelOrder,
    DecodeOrder,
    Job,
    Measure,
    Pong,
    ResetPrefixCache,
)
from mooncake_lab.serving.roles.base import (
    WorkerContext,
    ended,
    generation_request,
    hopeless,
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
        log, pacer = self._engine.engine.log, self._context.spec.pacer
        if pacer is not None and log:
            pacer.hold_decode(start_s, log[-1].plan.segments)
            log.clear()
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

    def _join(self, job: Job) -> None:
        """Submit a request to the engine once it is expected and its KVCache is here."""
        if job not in self._expected or job not in self._arrived:
            return
        order, came = self._expected.pop(job), self._arrived.pop(job)
        params = order.params
        ends = self._context.model.config.end_tokens if params.end_tokens is None else params.end_tokens
        if params.max_new_tokens == 1 or came.first_token in ends:
            self._report_joined(job, came)
            self._context.report(job, RequestDone(at_s=time.monotonic(), attempt=job.attempt))
            return
        try:
            request = generation_request(order, lambda _, token: self._made.append((job, token)))
            request_id = self._engine.submit(request, first_token=came.first_token, kv=(came.kv,))
        except ValueError as error:
            self._context.report(job, hopeless(job, str(error)))
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
