"""A coupled worker's duty: both stages in one engine under any batching policy (the baseline, FAST'25 §5.1)."""

import time
from typing import final

from mooncake_lab.batching.policies import CHUNKED_POLICIES, named_policy
from mooncake_lab.engine import CoupledEngine
from mooncake_lab.serving import messages
from mooncake_lab.serving.desk import Desk, generation_request, tokens_of
from mooncake_lab.serving.measure import measure_coupled
from mooncake_lab.serving.messages import Compute, Job, Span


@final
class CoupledDuty:
    """Everything a request needs, in one engine. Mutable: it owns the engine."""

    def __init__(self, desk: Desk) -> None:
        self._desk, spec = desk, desk.spec
        chunk_tokens = spec.chunk_tokens if spec.batching in CHUNKED_POLICIES else None
        policy = named_policy(spec.batching, chunk_tokens=chunk_tokens)
        settings = desk.settings(spec.decode_tokens, prefix_reuse=spec.prefix_reuse)
        self._engine = CoupledEngine(desk.model, policy, settings, clock=time.monotonic)
        self.capacity_tokens = self._engine.engine.blocks * spec.block_size_tokens
        self._running: dict[int, Job] = {}
        self._keys: dict[int, list[bytes]] = {}
        self._begun: set[int] = set()
        self._made: list[tuple[Job, int]] = []
        self._announced: set[bytes] = set()

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return self._engine.engine.busy

    def take(self, item: object) -> None:
        """Take an order."""
        match item:
            case Compute():
                self._accept(item)
            case messages.Cancel():
                for request_id in [key for key, job in self._running.items() if job == item.job]:
                    del self._running[request_id]
                    self._engine.cancel(request_id)
            case messages.Forget():
                self._engine.engine.allocator.forget()
                self._announce()
                self._desk.say(messages.Pong(item.number, 0.0))
            case messages.Measure():
                self._desk.say(measure_coupled(self._engine, self._desk.model, self._desk.spec))
                self._engine.engine.allocator.forget()
                self._engine.engine.log.clear()
            case _:
                raise TypeError(f"a coupled worker cannot take {type(item).__name__}")

    def step(self) -> None:
        """One iteration: pieces of prompts, and decodes."""
        start_s = time.monotonic()
        done = self._engine.step()
        self._keep_pace(start_s)
        end_s = time.monotonic()
        spans = self._spans(start_s, end_s)
        if self._made or spans:
            self._desk.say(
                messages.Stepped(start_s=start_s, end_s=end_s, tokens=tuple(self._made), spans=tuple(spans))
            )
            self._made = []
        for output in done:
            job = self._running.pop(output.request_id, None)
            self._begun.discard(output.request_id)
            if job is None:
                continue  # cancelled
            if output.finish_reason == "rejected":
                self._desk.say(messages.Trouble(job=job, reason=output.error, is_hopeless=True))
            else:
                self._desk.say(messages.Ended(job=job, at_s=end_s, reason=output.finish_reason))
        if spans:
            self._announce()

    def _accept(self, order: Compute) -> None:
        asked, job, prompt = order.asked, order.job, tokens_of(order.asked)
        try:
            request = generation_request(asked, lambda _, token: self._made.append((job, token)))
            request_id = self._engine.submit(request)
        except ValueError as error:
            self._desk.say(messages.Trouble(job=job, reason=str(error), is_hopeless=True))
            return
        self._running[request_id] = job
        if self._desk.spec.prefix_reuse:
            self._keys[request_id] = self._desk.keys(prompt)

    def _keep_pace(self, start_s: float) -> None:
        metronome, log = self._desk.spec.metronome, self._engine.engine.log
        if metronome is not None and log:
            segments = log[-1].iteration.plan.segments
            fresh = sum(s.kind == "prefill" and s.request_id not in self._begun for s in segments)
            metronome.hold_iteration(start_s, segments, fresh)

    def _spans(self, start_s: float, end_s: float) -> list[Span]:
        """What of prompts the last iteration computed."""
        log, spans = self._engine.engine.log, list[Span]()
        if not log:
            return spans
        for segment in log.pop().iteration.plan.segments:
            job = self._running.get(segment.request_id)
            if segment.kind == "prefill" and job is not None:
                reused = 0 if segment.request_id in self._begun else segment.cached_tokens
                self._begun.add(segment.request_id)
                spans.append(Span(job, start_s, end_s, segment.new_tokens, reused))
        log.clear()
        return spans

    def _announce(self) -> None:
        """Tell the cluster which whole prompt blocks the engine can find again."""
        match = self._engine.engine.allocator.match
        fresh = {key for keys in self._keys.values() for key in keys}
        self._keys = {key: value for key, value in self._keys.items() if key in self._running}
        added = tuple(key for key in fresh - self._announced if match([key]))
        removed = tuple(key for key in self._announced if not match([key]))
        self._announced.update(added)
        self._announced.difference_update(removed)
        if added or removed:
            self._desk.say(messages.Holds(added=added, removed=removed))
