"""Decode in turns: two engines whose prompts are done take a few steps each, again and again.

So both are timed on the same contexts and the same minutes of a machine, without computing a prompt per round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mooncake_lab.engine.kvcache import KVSpan  # noqa: TC001  # beside others that are needed when it runs
from mooncake_lab.engine.loop import Engine
from mooncake_lab.engine.reference import Clock
from mooncake_lab.engine.sequence import GenerationRequest, RunningRequest

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import LlamaForCausalLM


class Decoding(Protocol):
    """A batch of equal requests, each with a KVCache of its own, in the middle of generating."""

    tokens: list[int]
    """What the first request has generated."""

    def turn(self, steps: int) -> float:
        """Generate `steps + 1` tokens per request; seconds from the first of them to the last."""
        ...


class OurDecoding:
    """Decoding on an engine of this package. Mutable: it goes on.

    Args:
        engine: not busy.
        prompt: of every request.
        batch: requests.
        most_tokens: how many a request may generate.
        clock: times steps.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], batch: int, most_tokens: int, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        spans: list[KVSpan] = []  # of the one prompt that is computed

        def keep(done: RunningRequest) -> None:
            spans.append(engine.runner.export(done, 0, done.known - 1))

        first = GenerationRequest(prompt=prompt, max_new_tokens=1, end_tokens=())
        engine.submit(first, before_release=keep)
        self.tokens: list[int] = list(engine.run()[0].tokens)
        for number in range(batch):
            request = GenerationRequest(
                prompt=prompt,
                max_new_tokens=most_tokens,
                end_tokens=(),
                on_token=(lambda _, token: self.tokens.append(token)) if number == 0 else None,
            )
            engine.submit(request, kv=spans, generated=self.tokens[:1])
        self._ids = list(engine.requests)

    def turn(self, steps: int) -> float:
        """Steps of the engine; the first is not timed."""
        self._engine.step()
        start = self._clock()
        for _ in range(steps):
            self._engine.step()
        return self._clock() - start

    def close(self) -> None:
        """Leave the engine empty."""
        for request_id in self._ids:
            self._engine.cancel(request_id)
        self._engine.run()


@dataclass(slots=True, eq=False)
class HuggingFaceDecoding:
    """Decoding with transformers' `generate` and its dynamic cache. Mutable: it goes on."""

    model: "LlamaForCausalLM"
    prompt: Sequence[int]
    batch: int
    clock: Clock
    tokens: list[int] = field(default_factory=list[int])
    _cache: Any = None
    _ids: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        self._ids = torch.tensor([self.prompt], device=self.model.device)
        self._generate(1)
        self._cache.batch_repeat_interleave(self.batch)
        self._ids = self._ids.repeat(self.batch, 1)

    def turn(self, steps: int) -> float:
        """One call; starting it, and its first token, are not timed."""
        times = self._generate(steps + 1)
        return times[-1] - times[-steps - 1]

    @torch.inference_mode()
    def _generate(self, new_tokens: int) -> list[float]:
        """Generate more tokens; the times at which they appeared."""
        from transformers import GenerationConfig

        watch = _Watch(self.clock)
        how = GenerationConfig(
            do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, return_dict_in_generate=True
        )
        arguments: dict[str, Any] = {"attention_mask": torch.ones_like(self._ids), "streamer": watch}
        found: Any = self.model.generate(  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]  # partly typed
            self._ids, generation_config=how, past_key_values=self._cache, **arguments
        )
        self._ids, self._cache = found.sequences, found.past_key_values
        self.tokens = self._ids[0, len(self.prompt) :].tolist()
        return watch.times


@dataclass(slots=True, eq=False)
class _Watch:
    """Stands where `generate` wants a streamer of text; notes when tokens come. Mutable: a list of times."""

    clock: Clock
    times: list[float] = field(default_factory=list[float])

    def put(self, tokens: object) -> None:  # noqa: ARG002  # what it streams is not looked at
        """Prompt or tokens of a step."""
        self.times.append(self.clock())

    def end(self) -> None:
        """Nothing is left to print."""
