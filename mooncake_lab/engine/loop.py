"""The engine: requests are submitted, and each step plans, computes and applies one iteration."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from mooncake_lab.batching import BatchingPolicy, Instance, Iteration, Limits, Plan
from mooncake_lab.core import blocks_for
from mooncake_lab.engine.blocks import BlockAllocator, EngineBlocks
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.graphs import DecodeGraphs, capture_cuda
from mooncake_lab.engine.kvcache import KVCache, KVSpan, fingerprint
from mooncake_lab.engine.layerwise.loader import LayerLoader, PrefixLostError
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.runner import ModelRunner, Work
from mooncake_lab.engine.sequence import FinishReason, GenerationRequest, Output, RunningRequest, check_fits, enter

_CPU_SHARE, _CUDA_SHARE = 0.25, 0.85
"""Part of the free memory a KVCache takes if its size is not set; the rest is for activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The limits of one engine.

    Raises:
        ValueError: when one of them is below 1.
    """

    block_size_tokens: int = 16
    cache_blocks: int | None = None
    """Blocks of the KVCache; None takes a share of the free memory, but no more than could ever be used."""
    max_batch_tokens: int = 2048
    """Most tokens of an iteration."""
    max_requests: int = 256
    """Most requests that run at once."""
    prefix_caching: bool = True
    """Whether requests find the blocks of earlier ones that began with the same tokens."""
    max_request_tokens: int | None = None
    """Longest context; None takes the model's context length."""
    keep_log: bool = True
    """Whether iterations are kept, for charts."""

    def __post_init__(self) -> None:
        limits = ("block_size_tokens", "cache_blocks", "max_batch_tokens", "max_requests", "max_request_tokens")
        for name in limits:
            if (limit := getattr(self, name)) is not None and limit < 1:
                raise ValueError(f"EngineSettings.{name} is {limit!r}; at least 1 is needed")


def cache_blocks(settings: EngineSettings, config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> int:
    """How many blocks an engine's KVCache has.

    Raises:
        MemoryError: when there is no room for one block.
    """
    if settings.cache_blocks is not None:
        return settings.cache_blocks
    block_bytes = config.kv_bytes_per_token(dtype.itemsize) * settings.block_size_tokens
    longest = -(-(settings.max_request_tokens or config.max_positions) // settings.block_size_tokens)
    blocks = min(_free_bytes(device) // block_bytes, longest * settings.max_requests)
    if blocks < 1:
        raise MemoryError(f"no room on {device} for one KVCache block of {block_bytes} bytes")
    return blocks


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)


class Engine:
    """One model on one device under one batching policy: continuous batching over a paged KVCache.

    Args:
        model: the model that computes.
        policy: chooses the requests of each iteration.
        settings: the limits of the engine.
        clock: returns seconds.
    """

    def __init__(
        self,
        model: LlamaModel,
        policy: BatchingPolicy,
        settings: EngineSettings | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.settings = settings or EngineSettings()
        size, config = self.settings.block_size_tokens, model.config
        device, dtype = model.embedding.device, model.embedding.dtype
        self.blocks = cache_blocks(self.settings, config, device, dtype)
        cache = KVCache(config, blocks=self.blocks, block_size_tokens=size, device=device, dtype=dtype)
        name = fingerprint(config, model.weights_digest, dtype)
        context_tokens = min(self.settings.max_request_tokens or config.max_positions, len(model.rope.cosines))
        graphs = None
        if device.type == "cuda" and model.backend.name == "cuda":
            graphs = DecodeGraphs(model, cache, blocks_for(context_tokens, size), capture_cuda)
        self.runner = ModelRunner(model, cache, name, graphs)
        self.limits = Limits(
            max_batch_tokens=self.settings.max_batch_tokens,
            max_requests=min(self.settings.max_requests, self.settings.max_batch_tokens),
            block_size_tokens=size,
            capacity_blocks=self.blocks,
            free_blocks=self.blocks,
            max_request_tokens=context_tokens,
        )
        self.allocator = BlockAllocator(self.blocks)
        self.requests: dict[int, RunningRequest] = {}
        """Those that wait or run, by id."""
        namespace = name if self.settings.prefix_caching else None
        self._blocks = EngineBlocks(self.allocator, size, self.requests, namespace, self._swap_out)
        self.instance = Instance(policy, self.limits, self._blocks)
        self.last_plan = Plan()
        """Of the latest step; empty where that computed nothing."""
        self.log: list[Iteration] = []
        self._clock = clock
        self._next_id = 0
        self._steps = 0
        self._cancelled: set[int] = set()
        self._ended: list[Output] = []  # not yet returned by a step

    def record_steps(self) -> None:
        """Record the decode steps of all batch sizes, on devices that have graphs, so that none waits for it."""
        if self.runner.graphs is not None:
            self.runner.graphs.prepare(self.limits.max_requests)

    @property
    def busy(self) -> bool:
        """Whether requests wait or run, or ended and were not returned yet."""
        return bool(self._ended or self.requests)

    def submit(
        self,
        request: GenerationRequest,
        *,
        kv: Sequence[KVSpan] | LayerLoader = (),
        generated: Sequence[int] = (),
        before_release: Callable[[RunningRequest], None] | None = None,
    ) -> int:
        """Queue a request and return its id; the next step returns a request that `generated` already ends.

        Args:
            request: the prompt and its limits.
            kv: KVCache of its first tokens, computed elsewhere: complete, or arriving layer by layer.
            generated: tokens that were generated elsewhere.
            before_release: called when the request is done, while it still holds its blocks.

        Raises:
            ValueError: when the request can never fit or has a token outside the vocabulary, or the KVCache is
                that of another request or model.
        """
        check_fits(request, generated, self.limits, self.runner.model.config.vocabulary)
        entered = enter(self._next_id, request, self._clock(), self.settings.block_size_tokens, generated)
        entered.before_release = before_release
        given = self.runner.accept([kv] if isinstance(kv, LayerLoader) else kv)
        if given > entered.known:
            raise ValueError(
                f"the KVCache has {given} tokens and the request {entered.known}; it may have at most those"
            )
        cached = min(given, entered.known - 1)  # the last token is always computed, because its logits are needed
        if isinstance(kv, LayerLoader):
            kv.limit(cached)
            entered.kv_loader = kv if cached else None
        else:
            entered.swapped_kv = tuple(kv) if cached else ()
        self._next_id += 1
        reason = self._reason(entered) if generated else None
        if reason is not None:
            self._ended.append(entered.output(reason, self._clock(), ""))
            return entered.id
        self._blocks.name_blocks(entered)
        self.requests[entered.id] = entered
        self.instance.enqueue(entered.progress(cached))
        return entered.id

    def cancel(self, request_id: int) -> None:
        """End a request before the next iteration; unknown and finished requests are ignored."""
        if request_id in self.requests:
            self._cancelled.add(request_id)

    def step(self) -> list[Output]:
        """Run one iteration and return the requests that ended.

        Raises:
            RuntimeError: when the policy plans nothing although requests wait or run.
        """
        self._ended += self._cancel()
        self.last_plan = Plan()
        if self.requests:
            self._iterate()
        ended, self._ended = self._ended, []
        return ended

    def _iterate(self) -> None:
        """Plan, compute and apply one iteration; what ended stays for the next step where this one raises."""
        start_s = self._clock()
        plan = self.instance.plan()
        if plan.is_empty:
            ids = list(self.requests)[:8]
            raise RuntimeError(f"{self.instance.policy} does nothing while requests {ids} wait or run")
        self._ended += [self._end(refusal.request_id, "rejected", refusal.reason) for refusal in plan.rejected]
        for request_id in (*plan.preempted, *plan.swapped):
            self.requests[request_id].preemptions += 1
        work = [(self.requests[segment.request_id], segment) for segment in plan.segments]
        try:
            tokens = self._run(work)
        except BaseException as error:
            self.instance.apply(plan, steps=0)  # nothing was computed, and the next iteration is planned again
            if isinstance(error, PrefixLostError):
                self._shorten(work)
                return
            raise
        self.instance.apply(plan)
        self.last_plan = plan
        ended = self._append(work, tokens)
        if self.settings.keep_log:
            finished = tuple(output.request_id for output in ended)
            self.log.append(Iteration.of(self.instance, self._steps, plan, finished, start_s, self._clock()))
        self._steps += 1
        self._ended += ended
        _stream(work)  # last, so that a client's callback finds the engine in a consistent state

    def run(self) -> list[Output]:
        """Step until no request waits or runs; returns all outputs in order of request id."""
        done: list[Output] = []
        while self.busy:
            done += self.step()
        return sorted(done, key=lambda output: output.request_id)

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Output]:
        """Submit requests, step until they have ended, and return their outputs in order.

        Outputs of other requests are returned by the next step.

        Raises:
            ValueError: when a request can never fit or has a token outside the vocabulary; none is submitted then.
        """
        wanted = list(requests)
        for request in wanted:
            check_fits(request, (), self.limits, self.runner.model.config.vocabulary)
        ids = [self.submit(request) for request in wanted]
        found, others = dict[int, Output](), list[Output]()
        while not found.keys() >= set(ids):
            for output in self.step():
                if output.request_id in ids:
                    found[output.request_id] = output
                else:
                    others.append(output)
        self._ended += others
        return [found[request_id] for request_id in ids]

    def _run(self, work: Work) -> list[int]:
        """Restore or load the KVCache from elsewhere, compute, and return the new tokens."""
        for request, _ in work:
            if request.swapped_kv:
                self.runner.restore(request)
            if request.kv_loader is not None:
                request.kv_loader.begin(self.runner.cache, request.blocks)
        return self.runner.run(work) if work else []

    def _shorten(self, work: Work) -> None:
        """Keep the rest of a prefix of which a part was lost while it was loaded."""
        for request, _ in work:
            if request.kv_loader is not None:
                request.reused = request.kv_loader.tokens
                self.instance.shorten(request.id, request.reused)
                if not request.reused:
                    request.kv_loader = None

    def _append(self, work: Work, tokens: Sequence[int]) -> list[Output]:
        """Add each new token to its request, and return the requests that end with it."""
        now_s, emitted, ended = self._clock(), iter(tokens), list[Output]()
        for request, segment in work:
            if segment.emits:
                request.append(next(emitted))
                request.token_s.append(now_s)
                reason = self._reason(request)
                if reason is not None:
                    ended.append(self._finish(request, reason))
        return ended

    def _reason(self, request: RunningRequest) -> FinishReason | None:
        """The reason why a request ends with its last token, or None if it continues."""
        ends = request.request.end_tokens
        if int(request.tokens[request.known - 1]) in (
            self.runner.model.config.end_tokens if ends is None else ends
        ):
            return "end_token"
        return "length" if request.generated >= request.request.max_new_tokens else None

    def _finish(self, request: RunningRequest, reason: FinishReason) -> Output:
        if request.before_release is not None and reason != "cancelled":
            request.before_release(request)
        self.instance.finish(request.id)
        return self._end(request.id, reason)

    def _end(self, request_id: int, reason: FinishReason, error: str = "") -> Output:
        """End a request that has left the instance."""
        self._cancelled.discard(request_id)
        return self.requests.pop(request_id).output(reason, self._clock(), error)

    def _cancel(self) -> list[Output]:
        ids, self._cancelled = self._cancelled, set()
        return [
            self._finish(request, "cancelled") for request in list(self.requests.values()) if request.id in ids
        ]

    def _swap_out(self, request: RunningRequest, tokens: int) -> tuple[KVSpan, ...]:
        """Copy the KVCache of the first tokens of a request to host memory, which frees its device memory."""
        span = self.runner.export(request, 0, tokens)
        return (replace(span, layers=tuple(layer.cpu() for layer in span.layers)),)


def _stream(work: Work) -> None:
    """Pass the iteration's tokens to clients; the first callback error is raised after all callbacks ran."""
    raised: Exception | None = None
    for request, segment in work:
        if segment.emits and request.request.on_token is not None:
            try:
                request.request.on_token(request.id, int(request.tokens[request.known - 1]))
            except Exception as error:  # noqa: BLE001  # a client's own; the other clients still get their tokens
                raised = raised or error
    if raised:
        raise raised
