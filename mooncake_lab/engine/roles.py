"""The three roles of an engine: prefill only, decode only, or both. All are one engine under another policy."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mooncake_lab.batching import BatchingPolicy, DecodeOnly, PrefillOnly, SarathiServe
from mooncake_lab.engine.kvcache import KVSpan
from mooncake_lab.engine.layerwise.loader import LayerLoader
from mooncake_lab.engine.loop import Engine, EngineSettings
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.sampling import GREEDY, Sampling
from mooncake_lab.engine.sequence import GenerationRequest, Output, RunningRequest, TokenCallback

TokenIds = Sequence[int] | npt.NDArray[np.int32]
"""Token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What a prefill hands to a decode instance."""

    request_id: int
    first_token: int
    kv: KVSpan
    """KVCache of the prompt, from the end of the prefix that was given on: what the receiver does not have yet."""
    reused_tokens: int
    """Prompt tokens that were not computed, whether given or found here."""
    seconds: float
    """From submission to first token."""


class PrefillEngine:
    """Tokens and reused KVCache in; first token and new KVCache out (FAST'25 §3, prefill pool).

    `chunk_tokens` and `pack_tokens` are those of `PrefillOnly`.
    """

    def __init__(
        self,
        model: LlamaModel,
        settings: EngineSettings | None = None,
        *,
        chunk_tokens: int | None = None,
        pack_tokens: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = Engine(model, PrefillOnly(chunk_tokens, pack_tokens), settings, clock=clock)
        self._kv: dict[int, KVSpan] = {}
        self._ended: list[PrefillResult] = []  # not yet returned by a step

    def submit(self, request: GenerationRequest, *, prefix: Sequence[KVSpan] | LayerLoader = ()) -> int:
        """Let a prompt wait; its id.

        Args:
            request: whose prompt it is; of its answer the first token is made.
            prefix: KVCache of its first tokens, from the store: as it is, or arriving layer by layer.

        Raises:
            ValueError: when the prompt does not fit or the prefix is not its own.
        """

        def keep(done: RunningRequest) -> None:
            given = sum(span.tokens for span in ((prefix,) if isinstance(prefix, LayerLoader) else prefix))
            self._kv[done.id] = self.engine.runner.export(done, given, done.known - 1)

        return self.engine.submit(replace(request, max_new_tokens=1), kv=prefix, before_release=keep)

    def step(self) -> list[PrefillResult]:
        """One iteration; the prefills that ended, those that ended while another was waited for included."""
        ended, self._ended = self._ended, []
        return ended + [
            self._result(output) for output in self.engine.step() if output.finish_reason != "cancelled"
        ]

    def wait(self, request_id: int) -> PrefillResult:
        """Step until this one ended; others advance too, and the next `step` returns those that ended."""
        others: list[PrefillResult] = []
        while True:
            results = self.step()
            others += [result for result in results if result.request_id != request_id]
            for result in results:
                if result.request_id == request_id:
                    self._ended += others
                    return result

    def prefill(self, prompt: TokenIds, *, prefix: Sequence[KVSpan] = ()) -> PrefillResult:
        """Prefill one prompt; others that were waiting advance too, see `wait`.

        Raises:
            ValueError: when the prompt does not fit or the prefix is not its own.
        """
        return self.wait(self.submit(GenerationRequest(prompt=prompt), prefix=prefix))

    def _result(self, output: Output) -> PrefillResult:
        if output.finish_reason == "rejected":
            raise ValueError(f"prefill {output.request_id} was rejected: {output.error}")
        return PrefillResult(
            request_id=output.request_id,
            first_token=output.tokens[0],
            kv=self._kv.pop(output.request_id),
            reused_tokens=output.reused_tokens,
            seconds=output.finished_s - output.submitted_s,
        )


class _Generating:
    """An engine whose step returns the requests that ended."""

    def __init__(
        self,
        model: LlamaModel,
        policy: BatchingPolicy,
        settings: EngineSettings | None,
        clock: Callable[[], float],
    ) -> None:
        self.engine = Engine(model, policy, settings, clock=clock)

    def step(self) -> list[Output]:
        """One iteration; the requests that ended."""
        return self.engine.step()

    def run(self) -> list[Output]:
        """Step until no request waits or runs; all outputs, by request id."""
        return self.engine.run()


class DecodeEngine(_Generating):
    """Continuous batching over KVCache that was computed elsewhere (FAST'25 §3, decode pool)."""

    def __init__(
        self,
        model: LlamaModel,
        settings: EngineSettings | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(model, DecodeOnly(), settings, clock)

    def submit(
        self,
        request: GenerationRequest,
        *,
        first_token: int,
        kv: Sequence[KVSpan],
        before_release: Callable[[RunningRequest], None] | None = None,
    ) -> int:
        """Let a prefilled request join the batch when there is room; its id.

        Its output begins with `first_token`; `request.on_token` gets the tokens after it. Where it ends the
        request, the next step returns that. Before the request gives its KVCache back, `before_release` is called.

        Raises:
            ValueError: when the KVCache does not cover the prompt, is not this model's, or does not fit.
        """
        covered = sum(span.tokens for span in kv)
        if covered != len(request.prompt):
            raise ValueError(
                f"KVCache of {covered} of {len(request.prompt)} prompt tokens is given; decode needs all of it"
            )
        return self.engine.submit(request, kv=kv, generated=(first_token,), before_release=before_release)


class CoupledEngine(_Generating):
    """Prefill and decode on one device under any policy: what vLLM is (FAST'25 §5.1, the baseline)."""

    def __init__(
        self,
        model: LlamaModel,
        policy: BatchingPolicy | None = None,
        settings: EngineSettings | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(model, policy or SarathiServe(), settings, clock)

    def submit(self, request: GenerationRequest) -> int:
        """Let a request wait; its id.

        Raises:
            ValueError: when it can never fit or holds a token the model has not.
        """
        return self.engine.submit(request)

    def cancel(self, request_id: int) -> None:
        """End a request before the next iteration."""
        self.engine.cancel(request_id)

    def generate(
        self,
        prompts: Sequence[TokenIds],
        *,
        max_new_tokens: int = 16,
        sampling: Sampling = GREEDY,
        on_token: TokenCallback | None = None,
    ) -> list[Output]:
        """Generate for several prompts at once; outputs in their order. Each has a seed one above the last's.

        Raises:
            ValueError: when one can never fit or holds a token the model has not.
        """
        return self.engine.generate(
            GenerationRequest(
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                sampling=sampling.of_request(index),
                on_token=on_token,
            )
            for index, prompt in enumerate(prompts)
        )
