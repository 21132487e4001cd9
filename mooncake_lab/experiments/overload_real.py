"""Admission on two real engines in one process: a burst, decided by the Conductor's own policies.

Prompts are really computed, KVCache really moves, answers are really decoded. Decisions run on ticks of one
prefill and one decode step, so what is decided never depends on how fast this machine is. Seconds are measured.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mooncake_lab.conductor import (
    CacheAware,
    ClusterView,
    DecodeView,
    PrefillView,
    Rejection,
    ServedView,
    decide,
    named_admission,
)
from mooncake_lab.core import SLO, Request
from mooncake_lab.engine import (
    DecodeEngine,
    EngineSettings,
    GenerationRequest,
    PrefillEngine,
    choose_backend,
    config_from_shape,
    make_model,
    random_weights,
)
from mooncake_lab.experiments.engine_bench import Clock, measured_by, one_thread, random_prompt
from mooncake_lab.perf import model_shape


@dataclass(frozen=True, slots=True)
class _Ticks:
    """The Conductor's belief: a prefill is a tick, and a decode step has as many units as requests."""

    def prefill_s(self, request_id: int, input_tokens: int, reused_tokens: int) -> float:
        del request_id, input_tokens, reused_tokens
        return 1.0

    def transfer_s(self, tokens: int, flows: int) -> float:
        del tokens, flows
        return 0.0

    def decode_step_s(self, requests: float, context_tokens: float) -> float:
        del context_tokens
        return float(requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """More requests than the decode engine has places for, all at once, on this machine."""

    policy: str = "early"
    requests: int = 24
    per_tick: int = 3
    """Arrivals of a tick; prefill takes one."""
    slots: int = 4
    """Requests that may decode at a time."""
    prompt_tokens: int = 256
    answer_tokens: int = 10
    model: str = "lab-tiny"
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row: what was served and refused, and the seconds of prefill that were for nothing."""
        with one_thread() as clock:
            yield _Run(self, clock).to_end()


class _Run:
    """Two engines and the queue between; it changes with every tick."""

    def __init__(self, burst: Burst, clock: Clock) -> None:
        self._burst, self._clock = burst, clock
        weights = random_weights(
            config_from_shape(model_shape(burst.model)),
            seed=burst.seed,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        model = make_model(weights, choose_backend(torch.device("cpu"), torch.float32))
        blocks = 2 * burst.requests * -(-(burst.prompt_tokens + burst.answer_tokens) // 16)
        settings = EngineSettings(block_size_tokens=16, cache_blocks=blocks, prefix_reuse=False)
        self._vocabulary = weights.config.vocabulary
        self._prefill, self._decode = PrefillEngine(model, settings), DecodeEngine(model, settings)
        self._prefill.prefill(self._prompt(-1))  # the first prompt pays for everything that is done once
        self._admission = named_admission(burst.policy, decode_s=burst.answer_tokens - 1.0)  # t_d in ticks
        self._slo = SLO(ttft_s=float(burst.requests), tbt_s=burst.slots + 1.0)
        self._queue: deque[Request] = deque()
        self._coming: dict[int, ServedView] = {}
        self._present: dict[int, ServedView] = {}
        self._request_of: dict[int, int] = {}
        self._counts = {"early": 0, "late": 0, "finished": 0, "tokens": 0}
        self._seconds = {"prefill_s": 0.0, "wasted_prefill_s": 0.0}

    def to_end(self) -> dict[str, Any]:
        burst, tick = self._burst, 0
        while tick * burst.per_tick < burst.requests or self._queue or self._present:
            for i in range(tick * burst.per_tick, min((tick + 1) * burst.per_tick, burst.requests)):
                self._arrive(i, float(tick))
            self._compute(float(tick))
            self._step()
            tick += 1
        return {
            "finished": self._counts["finished"],
            "refused_on_arrival": self._counts["early"],
            "refused_after_prefill": self._counts["late"],
            "tokens": self._counts["tokens"],
            "ticks": tick,
            **self._seconds,
            "machine": measured_by(),
        }

    def _arrive(self, number: int, now: float) -> None:
        request = Request(
            id=number,
            arrival_s=now,
            input_tokens=self._burst.prompt_tokens,
            block_keys=(number,),
            block_size_tokens=self._burst.prompt_tokens,
        )
        waiting = len(self._queue)
        view = ClusterView(now, (PrefillView("prefill", float(waiting), waiting, 0, 0),), (self._decode_view(),))
        decision = decide(
            request, view, placement=CacheAware(), admission=self._admission, estimate=_Ticks(), slo=self._slo
        )
        if isinstance(decision, Rejection):
            self._counts["early"] += 1
            return
        self._coming[number] = ServedView(number, request.input_tokens, now + decision.expected_ttft_s)
        self._queue.append(request)

    def _compute(self, now: float) -> None:
        """One prompt: computed, and then refused or decoded."""
        if not self._queue:
            return
        request = self._queue.popleft()
        start = self._clock()
        result = self._prefill.prefill(self._prompt(request.id))
        seconds = self._clock() - start
        self._seconds["prefill_s"] += seconds
        del self._coming[request.id]
        refused = self._admission.double_check(request, self._decode_view(), estimate=_Ticks(), slo=self._slo)
        if refused is not None:
            self._counts["late"] += 1
            self._seconds["wasted_prefill_s"] += seconds
            return
        asked = GenerationRequest(
            prompt=self._prompt(request.id), max_new_tokens=self._burst.answer_tokens, end_tokens=()
        )
        number = self._decode.submit(asked, first_token=result.first_token, kv=(result.kv,))
        self._request_of[number] = request.id
        self._present[request.id] = ServedView(request.id, request.input_tokens, now + 1.0)

    def _step(self) -> None:
        for output in self._decode.step():
            del self._present[self._request_of.pop(output.request_id)]
            self._counts["finished"] += 1
            self._counts["tokens"] += len(output.tokens)

    def _decode_view(self) -> DecodeView:
        decoding, coming = tuple(self._present.values()), tuple(self._coming.values())
        tokens = sum(served.input_tokens for served in (*decoding, *coming))
        return DecodeView("decode", len(decoding) + len(coming), tokens, 10**9, decoding, coming)

    def _prompt(self, number: int) -> Any:
        return random_prompt(self._burst.prompt_tokens, self._vocabulary, seed=self._burst.seed, number=number + 1)
