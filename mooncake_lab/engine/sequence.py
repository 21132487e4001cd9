"""One request inside an engine: its tokens, how far they are computed, and the blocks that hold them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.batching import Limits, Progress
from mooncake_lab.core import BlockKey, blocks_for
from mooncake_lab.engine.kvcache import KVSpan
from mooncake_lab.engine.layerwise.loader import LayerLoader
from mooncake_lab.engine.sampling import GREEDY, Sampling

FinishReason = Literal["length", "end_token", "cancelled", "rejected"]
"""Why an output ended: its most tokens, an end token, its client, or a policy that can never serve it."""
TokenCallback = Callable[[int, int], None]
"""Called with request id and token, for every token as it appears."""
KVCallback = Callable[[int, int, torch.Tensor], None]
"""Called with layer, first position and (2, tokens, kv_heads, head_width), layer by layer as they are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a client asks an engine for.

    Raises:
        ValueError: when there are no prompt tokens or no new tokens.
    """

    prompt: Sequence[int] | npt.NDArray[np.int32]
    """Token ids."""
    max_new_tokens: int = 16
    sampling: Sampling = GREEDY
    end_tokens: tuple[int, ...] | None = None
    """Tokens that end the output (the last one is part of it); None takes the model's."""
    min_new_tokens: int = 0
    """No end token is chosen before the output has this many tokens (vLLM: `min_tokens`)."""
    on_token: TokenCallback | None = None
    on_kv: KVCallback | None = None

    def __post_init__(self) -> None:
        if len(self.prompt) < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"a prompt of {len(self.prompt)} tokens and {self.max_new_tokens} new; each must be at least 1"
            )
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens is {self.min_new_tokens}; allowed are whole numbers from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What became of a request."""

    request_id: int
    tokens: tuple[int, ...]
    """Generated tokens."""
    finish_reason: FinishReason
    error: str = ""
    """Why it was rejected."""
    prompt_tokens: int
    reused_tokens: int
    """Prompt tokens that needed no computation when it first ran."""
    preemptions: int
    submitted_s: float
    token_s: tuple[float, ...]
    """When each token appeared, on the clock of `submitted_s`."""
    finished_s: float

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from submission; None without a token."""
        return self.token_s[0] - self.submitted_s if self.token_s else None


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request in an engine: its tokens and blocks. The `Instance` keeps its `Progress`. Mutable."""

    id: int
    request: GenerationRequest
    submitted_s: float
    tokens: npt.NDArray[np.int32]
    """Known tokens, with room for those to come."""
    known: int
    """How many of `tokens` exist."""
    table: npt.NDArray[np.int32]
    """Its blocks, with room for those to come."""
    held: int = 0
    """How many of `table` it holds."""
    published: int = 0
    """How many of its blocks others can find."""
    keys: list[BlockKey] = field(default_factory=list[BlockKey])
    """Keys of its full blocks, as far as its tokens were known when they were named."""
    swapped_kv: tuple[KVSpan, ...] = ()
    """Its KVCache while it is outside the engine: given from elsewhere, or swapped out."""
    kv_loader: LayerLoader | None = None
    """KVCache of its first tokens that is brought layer by layer, until its first iteration is over."""
    before_release: "Callable[[RunningRequest], None] | None" = None
    """Called when it is done, while it still holds its blocks."""
    reused: int | None = None
    preemptions: int = 0
    token_s: list[float] = field(default_factory=list[float])

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return self.known - self.prompt_tokens

    @property
    def blocks(self) -> npt.NDArray[np.int32]:
        """The blocks it holds, front to back."""
        return self.table[: self.held]

    def append(self, token: int) -> None:
        """One more token is known."""
        self.tokens[self.known] = token
        self.known += 1

    def progress(self, cached_tokens: int) -> Progress:
        """How far it has come when it begins to wait."""
        return Progress(
            request_id=self.id,
            arrival=self.id,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=cached_tokens,
            generated_tokens=self.generated,
            max_new_tokens=self.request.max_new_tokens,
        )

    def output(self, finish_reason: FinishReason, finished_s: float, error: str = "") -> Output:
        """What became of it."""
        return Output(
            request_id=self.id,
            tokens=tuple(self.tokens[self.prompt_tokens : self.known].tolist()),
            finish_reason=finish_reason,
            error=error,
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.reused or 0,
            preemptions=self.preemptions,
            submitted_s=self.submitted_s,
            token_s=tuple(self.token_s),
            finished_s=finished_s,
        )


def enter(
    request_id: int,
    request: GenerationRequest,
    submitted_s: float,
    block_size_tokens: int,
    generated: Sequence[int] = (),
) -> RunningRequest:
    """A request as it enters an engine, with the tokens that were generated elsewhere."""
    prompt, longest = len(request.prompt), len(request.prompt) + request.max_new_tokens
    known = prompt + len(generated)
    tokens = np.zeros(longest, dtype=np.int32)
    tokens[:prompt], tokens[prompt:known] = request.prompt, generated
    table = np.zeros(blocks_for(longest, block_size_tokens), dtype=np.int32)
    return RunningRequest(request_id, request, submitted_s, tokens, known, table)


def check_fits(request: GenerationRequest, generated: Sequence[int], limits: Limits, vocabulary: int) -> None:
    """Refuse a request that an engine can never finish.

    Raises:
        ValueError: when it is longer than the context length or the KVCache, has a token outside the vocabulary,
            or more tokens were generated than it allows.
    """
    context_tokens, room = limits.max_request_tokens, limits.capacity_blocks * limits.block_size_tokens
    longest = len(request.prompt) + request.max_new_tokens - 1  # the KVCache of the last token is never read
    if context_tokens is not None and longest > context_tokens:
        raise ValueError(
            f"prompt and new tokens make {longest} tokens; the model's context length here is {context_tokens}"
        )
    if longest > room:
        raise ValueError(f"prompt and new tokens make {longest} tokens of KVCache; this engine's holds {room}")
    for what, tokens in (("prompt holds", request.prompt), ("generated part holds", generated)):
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < vocabulary):
            raise ValueError(
                f"the {what} tokens {min(tokens)} to {max(tokens)}; the model knows 0 to {vocabulary - 1}"
            )
    if len(generated) > request.max_new_tokens:
        raise ValueError(f"{len(generated)} tokens are generated already; allowed are {request.max_new_tokens}")
