"""A decode worker's duty: take in requests whose KVCache has arrived, and step them all, one token each."""

import time
from collections import OrderedDict
from typing import final

from mooncake_lab.engine import DecodeEngine
from mooncake_lab.serving import messages
from mooncake_lab.serving.arriving import Delivery
from mooncake_lab.serving.desk import Desk, generation_request
from mooncake_lab.serving.measure import measure_decode
from mooncake_lab.serving.messages import Expect, Job

_REMEMBERED = 4096


@final
class DecodeDuty:
    """Continuous batching over KVCache that came over the network. Mutable: it owns an engine."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._engine = DecodeEngine(desk.model, desk.settings(desk.spec.decode_tokens), clock=time.monotonic)
        self.capacity_tokens = self._engine.engine.blocks * desk.spec.block_size_tokens
        self._expected: dict[Job, Expect] = {}
        self._arrived: dict[Job, Delivery] = {}
        self._cancelled: OrderedDict[Job, None] = OrderedDict()
        self._running: dict[int, Job] = {}
        self._made: list[tuple[Job, int]] = []

    @property
    def busy(self) -> bool:
        """Whether a request is in the engine."""
        return self._engine.engine.busy

    def take(self, item: object) -> None:
        """Take an order, or a delivery."""
        match item:
            case Expect():
                self._expected[item.job] = item
                self._join(item.job)
            case Delivery():
                if item.job not in self._cancelled:
                    self._arrived[item.job] = item
                    self._join(item.job)
            case messages.Cancel():
                self._cancel(item.job)
            case messages.Forget():
                self._desk.say(messages.Pong(item.number, 0.0))  # nothing is kept here
            case messages.Measure():
                desk = self._desk
                desk.say(measure_decode(self._engine, desk.model, desk.shape, desk.spec))
            case _:
                raise TypeError(f"a decode worker cannot take {type(item).__name__}")

    def step(self) -> None:
        """One token for every request in the batch."""
        start_s = time.monotonic()
        done = self._engine.step()
        log = self._engine.engine.log
        if self._desk.spec.metronome is not None and log:
            self._desk.spec.metronome.hold_decode(start_s, log[-1].iteration.plan.segments)
            log.clear()
        end_s = time.monotonic()
        if self._made:
            self._desk.say(messages.Stepped(start_s=start_s, end_s=end_s, tokens=tuple(self._made)))
            self._made = []
        for output in done:
            job = self._running.pop(output.request_id, None)
            if job is None:
                continue  # cancelled
            if output.finish_reason == "rejected":
                self._desk.say(messages.Trouble(job=job, reason=output.error, is_hopeless=True))
            else:
                self._desk.say(messages.Ended(job=job, at_s=end_s, reason=output.finish_reason))

    def _join(self, job: Job) -> None:
        """Let a request into the engine once it is expected and its KVCache is here."""
        if job not in self._expected or job not in self._arrived:
            return
        asked, came = self._expected.pop(job).asked, self._arrived.pop(job)
        ends = self._desk.model.config.end_tokens if asked.end_tokens is None else asked.end_tokens
        now_s = time.monotonic()
        joined = messages.Joined(
            job=job, at_s=now_s, first_token=came.first_token, moves=came.moves, span=came.span
        )
        if asked.max_new_tokens == 1 or came.first_token in ends:
            self._desk.say(joined)
            reason = "end_token" if came.first_token in ends else "length"
            self._desk.say(messages.Ended(job=job, at_s=now_s, reason=reason))
            return
        try:
            request = generation_request(asked, lambda _, token: self._made.append((job, token)))
            request_id = self._engine.submit(request, first_token=came.first_token, kv=(came.kv,))
        except ValueError as error:
            self._desk.say(messages.Trouble(job=job, reason=str(error), is_hopeless=True))
            return
        self._running[request_id] = job
        self._desk.say(joined)

    def _cancel(self, job: Job) -> None:
        self._expected.pop(job, None)
        self._arrived.pop(job, None)
        self._cancelled[job] = None
        if len(self._cancelled) > _REMEMBERED:
            self._cancelled.popitem(last=False)
        for request_id in [key for key, value in self._running.items() if value == job]:
            del self._running[request_id]
            self._engine.engine.cancel(request_id)
