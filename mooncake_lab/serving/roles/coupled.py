"""A coupled worker: prefill and decode of its requests in the same iterations."""

import time
from dataclasses import dataclass
from typing import final

from mooncake_lab.batching import CHUNKED_POLICIES, named_policy
from mooncake_lab.cluster import (
    ChunkDone,
    DecodeStarted,
)
from mooncake_lab.engine import (
    CoupledEngine,
)
from mooncake_lab.serving.measure import measure_coupled
from mooncake_lab.serving.messages import (
    CacheUpdate,
    CancelOrder,
    Job,
    Measure,
    Pong,
    PrefillOrder,
    ResetPrefixCache,
    WorkerEvent,
)
from mooncake_lab.serving.roles.base import (
    WorkerContext,
    ended,
    generation_request,
    hopeless,
    prompt_tokens,
    report_dropped,
    step_done,
)


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
                report_dropped(self._context, item.job)
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
                report_dropped(self._context, served.job)
            self._context.report(served.job, ended(served.job, output, end_s))
        if chunks:
            self._announce()

    def _accept(self, order: PrefillOrder) -> None:
        prompt = prompt_tokens(order)
        keys = self._context.keys(prompt) if self._context.spec.prefix_reuse else []
        served = _Served(job=order.job, keys=keys, tokens=order.shown_tokens)
        try:
            request = generation_request(order, lambda _, token: self._made.append((served, token)))
            request_id = self._engine.submit(request)
        except ValueError as error:
            report_dropped(self._context, order.job)
            self._context.report(order.job, hopeless(order.job, str(error)))
            return
        self._served[request_id] = served

    def _leave(self, request_id: int) -> _Served | None:
        """A request is here no longer; what it computed may be found again."""
        served = self._served.pop(request_id, None)
        if served is not None:
            self._ended_keys.update(served.keys)
        return served

    def _keep_pace(self, start_s: float) -> None:
        pacer, log = self._context.spec.pacer, self._engine.engine.log
        if pacer is not None and log:
            segments = log[-1].plan.segments
            new = sum(s.kind == "prefill" and not self._has_begun(s.request_id) for s in segments)
            pacer.hold_iteration(start_s, segments, new)

    def _has_begun(self, request_id: int) -> bool:
        served = self._served.get(request_id)
        return served is not None and served.has_begun

    def _chunks(self, start_s: float, end_s: float) -> list[tuple[Job, ChunkDone]]:
        """The pieces of prompts that the last iteration computed."""
        log, chunks = self._engine.engine.log, list[tuple[Job, ChunkDone]]()
        segments = log[-1].plan.segments if log else ()
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
            events.append(step_done(self._context.spec.name, start_s, end_s, ids))
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
