"""The reference engine: a seeded random Llama, run by Hugging Face transformers.

It is what every faster engine must agree with, and what chapter 02 times. Weights are random because
time does not depend on their values; a step costs the same whether or not its answer makes sense.
It copies its KVCache at every step, as transformers' default does, so it is not the fastest way.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch

from mooncake_lab.perf import ModelShape

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import DynamicCache, LlamaConfig

Clock = Callable[[], float]
"""Seconds from some fixed moment, e.g. `time.perf_counter`."""

Tokens = npt.NDArray[np.int64]
"""Token ids."""

_DTYPES: Final = {2: torch.bfloat16, 4: torch.float32}


def llama_config(shape: ModelShape) -> "LlamaConfig":
    """The transformers configuration of a shape.

    Raises:
        ValueError: when the shape is no Llama (its feed-forward has no gate).
    """
    from transformers import LlamaConfig

    if shape.ffn_matrices != 3:
        raise ValueError(f"model {shape.name!r} has {shape.ffn_matrices} feed-forward matrices; a Llama has 3")
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_width,
        tie_word_embeddings=shape.tied_embeddings,
        max_position_embeddings=1 << 17,
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReferencePrefill:
    """What a prefill leaves behind: the KVCache of its tokens, and the first token of the answer."""

    first_token: int
    logits: torch.Tensor
    """Shape (vocabulary,), of the last prompt token."""
    cache: "DynamicCache"
    seconds: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Decoded:
    """What decode steps produced; row `k` of each array belongs to step `k`."""

    tokens: Tokens
    """Shape (steps, batch): the tokens generated."""
    logits: torch.Tensor
    """Shape (steps, batch, vocabulary)."""
    seconds: npt.NDArray[np.float64]
    """Shape (steps,)."""


class ReferenceEngine:
    """A random Llama of some shape on one device. Mutable only in the caches that its callers hold.

    Raises:
        ValueError: when the shape is no Llama, or its elements are neither float32 nor bfloat16.
    """

    def __init__(
        self, shape: ModelShape, *, seed: int = 0, device: str = "cpu", clock: Clock = time.perf_counter
    ) -> None:
        from transformers import LlamaForCausalLM

        if shape.bytes_per_element not in _DTYPES:
            raise ValueError(
                f"model {shape.name!r} has {shape.bytes_per_element} bytes an element;"
                " allowed are 4 (float32) and 2 (bfloat16)"
            )
        self.shape = shape
        self.device = torch.device(device)
        self._clock = clock
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(llama_config(shape))
        placed = cast("Any", model).to(device=self.device, dtype=_DTYPES[shape.bytes_per_element])
        self._model: Any = placed.eval()

    def prefill(self, tokens: Tokens) -> ReferencePrefill:
        """Compute a whole prompt, shape (n,), in one forward pass.

        Raises:
            ValueError: when the prompt is empty or not a vector.
        """
        from transformers import DynamicCache

        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"a prompt has shape {tokens.shape}; a vector of at least one token is needed")
        cache = DynamicCache(config=self._model.config)
        inputs = torch.from_numpy(tokens).to(self.device)[None]
        logits, seconds = self._forward(inputs, cache)
        return ReferencePrefill(
            first_token=int(logits[0].argmax()), logits=logits[0], cache=cache, seconds=seconds
        )

    def decode(self, cache: "DynamicCache", next_tokens: Tokens, steps: int) -> Decoded:
        """Decode greedily, one token per step for each request, growing `cache` by `steps` tokens.

        `next_tokens`, shape (batch,), are the last token of each request, not yet in the cache.
        """
        inputs = torch.from_numpy(next_tokens).to(self.device)[:, None]
        tokens: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        seconds: list[float] = []
        for _ in range(steps):
            logits, elapsed_s = self._forward(inputs, cache)
            inputs = logits.argmax(dim=-1, keepdim=True)
            tokens.append(inputs[:, 0].cpu())
            scores.append(logits)
            seconds.append(elapsed_s)
        return Decoded(tokens=torch.stack(tokens).numpy(), logits=torch.stack(scores), seconds=np.array(seconds))

    def logits(self, tokens: Tokens) -> torch.Tensor:
        """Logits of every token of a prompt, shape (n, vocabulary), without any cache: the definition."""
        with torch.inference_mode():
            inputs = torch.from_numpy(tokens).to(self.device)[None]
            return self._model(inputs, use_cache=False).logits[0]

    def _forward(self, inputs: torch.Tensor, cache: "DynamicCache") -> tuple[torch.Tensor, float]:
        wait = torch.cuda.synchronize if self.device.type == "cuda" else int  # else it computes beside the clock
        wait()
        start_s = self._clock()
        with torch.inference_mode():
            logits = self._model(inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        wait()
        return logits, self._clock() - start_s
