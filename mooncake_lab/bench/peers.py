"""Our engine and transformers, on the same weights and behind one interface, to be timed in turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from mooncake_lab.batching import SarathiServe
from mooncake_lab.engine.config import LlamaConfig
from mooncake_lab.engine.kvcache import KVSpan  # noqa: TC001  # beside others that are needed when it runs
from mooncake_lab.engine.loop import Engine, EngineSettings
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.reference import Clock
from mooncake_lab.engine.sequence import GenerationRequest, RunningRequest
from mooncake_lab.engine.weights import LlamaWeights, state_dict

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import LlamaConfig as HuggingFaceConfig
    from transformers import LlamaForCausalLM

Tokens = list[list[int]]
"""Token ids of several requests."""


class Decoding(Protocol):
    """A batch of equal requests, each with a KVCache of its own, whose prompts are computed."""

    tokens: list[int]
    """What the first request has generated."""

    def turn(self, steps: int) -> float:
        """Generate `steps + 1` tokens per request; seconds from the first of them to the last."""
        ...

    def close(self) -> None:
        """Free the KVCache."""
        ...


class Subject(Protocol):
    """An engine with a model that is timed."""

    def seconds(self, prompts: Tokens, new_tokens: Sequence[int], clock: Clock) -> float:
        """Seconds to generate exactly `new_tokens[i]` tokens greedily for each prompt `i`, all together."""
        ...

    def decoding(self, prompt: list[int], batch: int, most_tokens: int, clock: Clock) -> Decoding:
        """`batch` requests with this prompt, each generating up to `most_tokens` tokens."""
        ...


@runtime_checkable
class ReusingSubject(Protocol):
    """An engine that keeps the KVCache of prompts for those that begin with the same tokens."""

    def reuse_s(self, prompt: list[int], reused_tokens: int, clock: Clock) -> float:
        """Seconds from a prompt to its first token, where a request has just computed its first tokens."""
        ...


def checked_seconds(
    generate: Callable[[Tokens, Sequence[int]], Tokens], prompts: Tokens, new_tokens: Sequence[int], clock: Clock
) -> float:
    """Time `generate`.

    Raises:
        RuntimeError: when it generates fewer or more tokens than asked for.
    """
    start = clock()
    found = generate(prompts, new_tokens)
    seconds = clock() - start
    if [len(tokens) for tokens in found] != list(new_tokens):
        raise RuntimeError(f"{generate.__qualname__} did not generate the tokens it was asked for")
    return seconds


@dataclass(frozen=True, slots=True)
class OurEngine:
    """This package's engine; prefixes are reused where it was made so."""

    engine: Engine

    def generate(self, prompts: Tokens, new_tokens: Sequence[int]) -> Tokens:
        """All at once, under the engine's policy."""
        outputs = self.engine.generate(
            GenerationRequest(prompt=prompt, max_new_tokens=count, end_tokens=())
            for prompt, count in zip(prompts, new_tokens, strict=True)
        )
        return [list(output.tokens) for output in outputs]

    def seconds(self, prompts: Tokens, new_tokens: Sequence[int], clock: Clock) -> float:
        """As `Subject`."""
        return checked_seconds(self.generate, prompts, new_tokens, clock)

    def reuse_s(self, prompt: list[int], reused_tokens: int, clock: Clock) -> float:
        """As `ReusingSubject`; whole blocks are reused, and nothing that is older."""
        self.engine.allocator.forget()
        self.generate([prompt[:reused_tokens]], (1,))
        return self.seconds([prompt], (1,), clock)

    def decoding(self, prompt: list[int], batch: int, most_tokens: int, clock: Clock) -> Decoding:
        """As `Subject`; the engine must not be busy."""
        return _OurDecoding(self.engine, prompt, batch, most_tokens, clock)


class _OurDecoding:
    """Decoding on an engine of this package. Mutable: it goes on."""

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


@dataclass(frozen=True, slots=True)
class HuggingFaceGenerate:
    """transformers' `generate` with its dynamic cache: one batch, padded on the left, as long as its longest."""

    model: "LlamaForCausalLM"

    @torch.inference_mode()
    def generate(self, prompts: Tokens, new_tokens: Sequence[int]) -> Tokens:
        """One padded batch; what it generates beyond a request's tokens is dropped."""
        from transformers import GenerationConfig

        longest, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        how = GenerationConfig(do_sample=False, max_new_tokens=max(new_tokens), pad_token_id=0)
        out: Tokens = self.model.generate(ids, attention_mask=mask, generation_config=how)[:, longest:].tolist()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]  # partly typed
        return [tokens[:count] for tokens, count in zip(out, new_tokens, strict=True)]

    def seconds(self, prompts: Tokens, new_tokens: Sequence[int], clock: Clock) -> float:
        """As `Subject`."""
        return checked_seconds(self.generate, prompts, new_tokens, clock)

    def decoding(self, prompt: list[int], batch: int, most_tokens: int, clock: Clock) -> Decoding:
        """As `Subject`; its cache grows without a limit."""
        del most_tokens
        return _HuggingFaceDecoding(self.model, prompt, batch, clock)


@dataclass(slots=True, eq=False)
class _HuggingFaceDecoding:
    """Decoding with `generate` and its dynamic cache. Mutable: it goes on."""

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

    def close(self) -> None:
        """Drop the cache."""
        self._cache = None

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


def our_engine(
    model: LlamaModel, *, cache_tokens: int, chunk_tokens: int = 512, prefix_caching: bool = False
) -> OurEngine:
    """This package's engine, with space for `cache_tokens` of KVCache."""
    settings = EngineSettings(
        cache_blocks=-(-cache_tokens // 16),
        block_size_tokens=16,
        max_batch_tokens=max(chunk_tokens, 256),
        prefix_caching=prefix_caching,
        keep_log=False,
    )
    return OurEngine(Engine(model, SarathiServe(chunk_tokens=chunk_tokens), settings))


def hugging_face(weights: LlamaWeights) -> "LlamaForCausalLM":
    """The same weights in transformers, sharing their memory where they are not prepared otherwise."""
    from transformers import LlamaForCausalLM

    config = weights.config
    if config.rope_scaling is not None:
        raise ValueError("peers are built for models without rope scaling; measure with another shape")
    with torch.device("meta"):
        model = LlamaForCausalLM(_config(config))
    model.load_state_dict(state_dict(weights), assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(weights.embedding.device)
    model.generation_config.eos_token_id = None
    return model.eval()


def _config(config: LlamaConfig) -> "HuggingFaceConfig":
    from transformers import LlamaConfig as HuggingFaceConfig

    return HuggingFaceConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=config.ffn_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.query_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_width,
        rms_norm_eps=config.norm_epsilon,
        max_position_embeddings=config.max_positions,
        tie_word_embeddings=config.tied_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
