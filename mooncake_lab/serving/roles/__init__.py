"""What workers do: prefill, decode, or both. Here is what the roles share: their context and their reports."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_lab.cluster import events
from mooncake_lab.core import DecodeStretch
from mooncake_lab.engine import EngineSettings, GenerationRequest, LlamaModel, Output, Sampling
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.engine.sequence import KVCallback, TokenCallback
from mooncake_lab.serving.kv_transfer import Identity
from mooncake_lab.serving.kv_transfer.sender import KVSenders
from mooncake_lab.serving.kv_transfer.transfer_engine import TransferEngineChannel
from mooncake_lab.serving.messages import (
    Job,
    Report,
    RequestOrder,
    WorkerEvent,
    WorkerMessage,
)
from mooncake_lab.serving.pacer import PacedLink
from mooncake_lab.serving.spec import WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What workers of every role have."""

    spec: WorkerSpec
    model: LlamaModel
    layout: KVLayout
    """The layout of the blocks of its KVCache."""
    identity: Identity
    senders: KVSenders
    channel: TransferEngineChannel | None
    """What KVCache travels by; None is the connections between workers."""
    link: PacedLink
    """Carries what this worker sends."""
    send: Callable[[WorkerMessage], None]
    """Sends a message to the cluster."""
    enqueue: Callable[[object], None]
    """Puts something into the worker's own inbox, from any thread."""

    def report(self, job: Job, *reported: WorkerEvent, tokens: Sequence[tuple[int, int]] = ()) -> None:
        """Report events of the run of this attempt, and tokens of its requests."""
        self.send(Report(job.run, reported, tuple(tokens)))

    def settings(self, tokens: int, *, prefix_caching: bool = False) -> EngineSettings:
        """The settings of an engine with KVCache for this number of tokens."""
        spec = self.spec
        blocks = max(1, tokens // spec.block_size_tokens)
        max_requests = spec.max_requests or blocks
        most = max(spec.max_context_tokens if spec.role == "coupled" else spec.chunk_tokens, max_requests)
        return EngineSettings(
            block_size_tokens=spec.block_size_tokens,
            cache_blocks=blocks,
            max_batch_tokens=min(spec.max_batch_tokens, most) if spec.role == "coupled" else most,
            max_requests=max_requests,
            max_request_tokens=spec.max_context_tokens,
            prefix_caching=prefix_caching,
            keep_log=False,
        )


def report_dropped(context: WorkerContext, job: Job) -> None:
    """Report that a request left this worker before its prompt was computed."""
    dropped = events.PrefillDropped(at_s=time.monotonic(), attempt=job.attempt, instance=context.spec.name)
    context.report(job, dropped)


def not_retriable(job: Job, reason: str) -> events.AttemptFailed:
    """The report that an attempt failed for a reason that another worker would meet too."""
    return events.AttemptFailed(at_s=time.monotonic(), attempt=job.attempt, reason=reason, retriable=False)


def ended(job: Job, output: Output, end_s: float) -> events.RequestDone | events.AttemptFailed:
    """The report that a request has all its tokens, or that the engine refused it."""
    if output.finish_reason == "rejected":
        return not_retriable(job, output.error)
    return events.RequestDone(at_s=end_s, attempt=job.attempt)


def step_done(worker: str, start_s: float, end_s: float, request_ids: Sequence[int]) -> DecodeStretch:
    """The report of one decode iteration."""
    return DecodeStretch(
        at_s=end_s,
        instance=worker,
        start_s=start_s,
        steps=1,
        first_step_s=end_s - start_s,
        step_growth_s=0.0,
        request_ids=tuple(request_ids),
    )


def prompt_tokens(order: RequestOrder) -> npt.NDArray[np.int32]:
    """The prompt of a request, shape (n,)."""
    return np.frombuffer(order.prompt, dtype="<i4").astype(np.int32)


def generation_request(
    order: RequestOrder, *, on_token: TokenCallback | None = None, on_kv: KVCallback | None = None
) -> GenerationRequest:
    """A request as an engine takes it.

    Raises:
        ValueError: when a number of it is out of range.
    """
    params = order.params
    return GenerationRequest(
        prompt=prompt_tokens(order),
        max_new_tokens=params.max_new_tokens,
        sampling=Sampling(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, seed=params.seed
        ),
        end_tokens=params.end_tokens,
        min_new_tokens=params.min_new_tokens,
        on_token=on_token,
        on_kv=on_kv,
    )
