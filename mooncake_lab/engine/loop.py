"""The engine: submit requests, then step; a step is schedule, run, postprocess."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from mooncake_lab.batching import BatchingPolicy, Iteration, Limits
from mooncake_lab.core import blocks_for
from mooncake_lab.engine.allocator import BlockAllocator
from mooncake_lab.engine.graphs import DecodeGraphs, capture_cuda
from mooncake_lab.engine.kvcache import KVCache, KVSpan, fingerprint
from mooncake_lab.engine.layerwise.arriving import ArrivingPrefix, PrefixLostError
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.runner import ModelRunner
from mooncake_lab.engine.scheduler import Schedule, Scheduler
from mooncake_lab.engine.sequence import FinishReason, GenerationRequest, Output, RunningRequest, enter
from mooncake_lab.engine.settings import EngineSettings, cache_blocks


@dataclass(frozen=True, slots=True)
class TimedIteration:
    """One iteration of a real engine: what was planned and done, and when."""

    start_s: float
    end_s: float
    iteration: Iteration

    def plain(self) -> dict[str, object]:
        """The same as plain values, for JSON."""
        values = msgspec.to_builtins({"start_s": self.start_s, "end_s": self.end_s, "iteration": self.iteration})
        assert isinstance(values, dict)  # noqa: S101  # a dict went in
        return values


class Engine:
    """One model on one device under one batching policy: continuous batching over a paged KVCache.

    Args:
        model: what computes.
        policy: what runs next.
        settings: what it may use.
        clock: gives seconds.
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
        window = min(self.settings.max_request_tokens or config.max_positions, len(model.rope.cosines))
        graphs = None
        if device.type == "cuda" and model.backend.name == "cuda":
            graphs = DecodeGraphs(model, cache, blocks_for(window, size), capture_cuda)
        self.runner = ModelRunner(model, cache, name, graphs)
        limits = Limits(
            max_batch_tokens=self.settings.max_batch_tokens,
            max_requests=min(self.settings.max_requests, self.settings.max_batch_tokens),
            block_size_tokens=size,
            capacity_blocks=self.blocks,
            free_blocks=self.blocks,
            max_request_tokens=window,
        )
        self.allocator = BlockAllocator(self.blocks)
        namespace = name if self.settings.prefix_reuse else None
        self.scheduler = Scheduler(policy, limits, self.allocator, self._park, namespace)
        self.log: list[TimedIteration] = []
        self._clock = clock
        self._next_id = 0
        self._steps = 0
        self._cancelled: set[int] = set()
        self._before_release: dict[int, Callable[[RunningRequest], None]] = {}
        self._ended: list[Output] = []  # not yet returned by a step

    @property
    def busy(self) -> bool:
        """Whether requests wait or run, or ended and were not returned yet."""
        return bool(self._ended or self.scheduler.waiting or self.scheduler.running)

    def submit(
        self,
        request: GenerationRequest,
        *,
        kv: Sequence[KVSpan] | ArrivingPrefix = (),
        generated: Sequence[int] = (),
        before_release: Callable[[RunningRequest], None] | None = None,
    ) -> int:
        """Let a request wait; its id. One whose tokens so far end it already is returned by the next step.

        Args:
            request: what is asked for.
            kv: KVCache of its first tokens, computed elsewhere: as it is, or arriving layer by layer.
            generated: tokens it has generated elsewhere.
            before_release: called when it is done, while it still holds its blocks.

        Raises:
            ValueError: when it can never fit, holds a token the model has not, or the KVCache is not its own.
        """
        self._check(request, generated)
        entered = enter(self._next_id, request, self._clock(), self.settings.block_size_tokens)
        for token in generated:
            entered.append(token)
        given = self.runner.accept([kv] if isinstance(kv, ArrivingPrefix) else kv)
        if given > entered.known:
            raise ValueError(f"KVCache of {given} tokens is given for a request of {entered.known}")
        entered.cached = min(given, entered.known - 1)  # the last token is computed: its logits are what is wanted
        if isinstance(kv, ArrivingPrefix):
            kv.limit(entered.cached)
            entered.arriving = kv if entered.cached else None
        else:
            entered.parked = tuple(kv) if entered.cached else ()
        self._next_id += 1
        reason = self._reason(entered) if generated else None
        if reason is not None:
            self._ended.append(entered.output(reason, self._clock(), ""))
            return entered.id
        if before_release is not None:
            self._before_release[entered.id] = before_release
        self.scheduler.add(entered)
        return entered.id

    def cancel(self, request_id: int) -> None:
        """End a request before the next iteration; unknown and finished ones are ignored."""
        if any(r.id == request_id for r in (*self.scheduler.waiting, *self.scheduler.running)):
            self._cancelled.add(request_id)

    def step(self) -> list[Output]:
        """One iteration; the requests that ended."""
        done, self._ended = self._ended + self._cancel(), []
        if not (self.scheduler.waiting or self.scheduler.running):
            return done
        start_s = self._clock()
        schedule = self.scheduler.schedule()
        try:
            tokens = self._run(schedule)
        except PrefixLostError:  # nothing was counted as computed: the next iteration is planned with what is left
            self.scheduler.shorten(schedule)
            return done + self._reject(schedule)
        done += self._postprocess(schedule, tokens, start_s)
        try:
            _tell(schedule)  # last, so that a client's callback finds the engine in order
        except BaseException:
            self._ended += done
            raise
        return done

    def run(self) -> list[Output]:
        """Step until nothing waits or runs; all outputs, by request id."""
        done: list[Output] = []
        while self.busy:
            done += self.step()
        return sorted(done, key=lambda output: output.request_id)

    def generate(self, requests: Iterable[GenerationRequest]) -> list[Output]:
        """Submit requests and step until they ended; their outputs in order. The rest comes with the next step.

        Raises:
            ValueError: when one can never fit or holds a token the model has not; none is submitted then.
        """
        wanted = list(requests)
        for request in wanted:
            self._check(request, ())
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

    def check(self) -> None:
        """Verify that no block is lost or counted twice.

        Raises:
            AssertionError: naming the block.
        """
        self.scheduler.check()

    def _run(self, schedule: Schedule) -> list[int]:
        for request, _ in schedule.work:
            if request.parked:
                self.runner.restore(request)
            if request.arriving is not None:
                request.arriving.begin(self.runner.cache, request.blocks.tolist())
        return self.runner.run(schedule.work) if schedule.work else []

    def _postprocess(self, schedule: Schedule, tokens: list[int], start_s: float) -> list[Output]:
        """Append the new tokens, end who is done, and write the iteration down."""
        done = self._reject(schedule)
        now_s, emitted = self._clock(), iter(tokens)
        finished: list[int] = []
        for request, segment in schedule.work:
            self.scheduler.computed(request, segment.new_tokens)
            reason = self._append(request, next(emitted), now_s) if segment.emits else None
            if reason is not None:
                finished.append(request.id)
                done.append(self._finish(request, reason, now_s))
        if self.settings.keep_log:
            self.log.append(TimedIteration(start_s, now_s, _iteration(self._steps, schedule, tuple(finished))))
        self._steps += 1
        return done

    def _reject(self, schedule: Schedule) -> list[Output]:
        now_s = self._clock()
        return [self._end(request, "rejected", now_s, reason) for request, reason in schedule.rejected]

    def _append(self, request: RunningRequest, token: int, now_s: float) -> FinishReason | None:
        """One token more; why the request ends with it, or None."""
        request.append(token)
        request.token_s.append(now_s)
        return self._reason(request)

    def _reason(self, request: RunningRequest) -> FinishReason | None:
        """Why a request ends with the token it has last, or None."""
        ends = request.request.end_tokens
        if int(request.tokens[request.known - 1]) in (
            self.runner.model.config.end_tokens if ends is None else ends
        ):
            return "end_token"
        return "length" if request.generated >= request.request.max_new_tokens else None

    def _finish(self, request: RunningRequest, reason: FinishReason, now_s: float) -> Output:
        hook = self._before_release.pop(request.id, None)
        if hook is not None and reason != "cancelled":
            hook(request)
        self.scheduler.remove(request)
        return self._end(request, reason, now_s)

    def _end(self, request: RunningRequest, reason: FinishReason, now_s: float, error: str = "") -> Output:
        self._before_release.pop(request.id, None)
        self._cancelled.discard(request.id)
        return request.output(reason, now_s, error)

    def _cancel(self) -> list[Output]:
        ids, now_s = self._cancelled, self._clock()
        self._cancelled = set()
        found = [r for r in (*self.scheduler.waiting, *self.scheduler.running) if r.id in ids]
        return [self._finish(request, "cancelled", now_s) for request in found]

    def _park(self, request: RunningRequest) -> tuple[KVSpan, ...]:
        """On the host: what has to leave the device's memory must not stay in it."""
        span = self.runner.export(request, 0, request.cached)
        return (replace(span, layers=tuple(layer.cpu() for layer in span.layers)),)

    def _check(self, request: GenerationRequest, generated: Sequence[int]) -> None:
        size, window = self.settings.block_size_tokens, self.scheduler.limits.max_request_tokens
        longest = len(request.prompt) + request.max_new_tokens - 1  # the last token is never read again
        if window is not None and longest > window:
            raise ValueError(f"prompt and new tokens make {longest} tokens; the model's window here is {window}")
        if blocks_for(longest, size) > self.blocks:
            raise ValueError(
                f"prompt and new tokens make {longest} tokens of KVCache; this engine's holds {self.blocks * size}"
            )
        vocabulary = self.runner.model.config.vocabulary
        for what, tokens in (("prompt holds", request.prompt), ("generated part holds", generated)):
            if len(tokens) and not (min(tokens) >= 0 and max(tokens) < vocabulary):
                raise ValueError(
                    f"the {what} tokens {min(tokens)} to {max(tokens)}; the model knows 0 to {vocabulary - 1}"
                )
        if len(generated) > request.max_new_tokens:
            raise ValueError(
                f"{len(generated)} tokens are generated already; allowed are {request.max_new_tokens}"
            )


def _tell(schedule: Schedule) -> None:
    """Stream the iteration's tokens to those who asked for them; the first who raises is heard last."""
    raised: Exception | None = None
    for request, segment in schedule.work:
        if segment.emits and request.request.on_token is not None:
            try:
                request.request.on_token(request.id, int(request.tokens[request.known - 1]))
            except Exception as error:  # noqa: BLE001  # a client's own; the other clients are still told
                raised = raised or error
    if raised:
        raise raised


def _iteration(index: int, schedule: Schedule, finished: tuple[int, ...]) -> Iteration:
    return Iteration(
        index=index,
        waiting=schedule.waiting,
        running=schedule.running,
        limits=schedule.limits,
        plan=schedule.plan,
        finished=finished,
    )
