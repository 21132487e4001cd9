"""From logits to tokens: greedy, or drawn with temperature, top-k and top-p, seeded per request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request's tokens are chosen; a draw depends on its seed and the token's position alone.

    So neither batching nor preemption changes what a request generates, as far as they leave its logits alone: in
    16 bits, steps of few tokens round elsewhere than large ones do.

    Raises:
        ValueError: when a parameter is out of range.
    """

    temperature: float = 0.0
    """0 takes the likeliest token; otherwise logits are divided by it."""
    top_k: int | None = None
    """Draw among this number of likeliest tokens; None means all tokens."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together reach this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; allowed are finite numbers from 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; allowed is above 0 up to 1")
        if self.top_k is not None and not 1 <= self.top_k < 2**63:
            raise ValueError(f"top_k is {self.top_k}; allowed are whole numbers from 1 below 2**63, or None")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; allowed are whole numbers from 0 below 2**63")

    def of_request(self, index: int) -> "Sampling":
        """The same for one of several requests of a call: each has a seed of its own."""
        return replace(self, seed=self.seed + index)


GREEDY = Sampling()
"""The likeliest token, always."""


def without(logits: torch.Tensor, banned: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits (rows, vocabulary) with the banned tokens of each row at minus infinity; a copy if there are any."""
    if not any(banned):
        return logits
    logits = logits.clone()
    for row, tokens in enumerate(banned):
        logits[row, list(tokens)] = -math.inf
    return logits


def sample(logits: torch.Tensor, how: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """The next token of each row of logits (rows, vocabulary).

    Args:
        logits: one row a request.
        how: each request's sampling.
        positions: each token's place in its request.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, (sampling, position) in enumerate(zip(how, positions, strict=True)):
        if sampling.temperature > 0:
            tokens[row] = _draw(logits[row], sampling, position)
    return tokens


def _draw(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    """One draw from one row: the inverse of the cumulative distribution at a number keyed by seed and position."""
    below = logits.float() - logits.max().float()  # at most 0, so that no temperature makes two of them infinite
    scaled, tokens = (below / sampling.temperature).sort(descending=True, stable=True)
    shares = scaled[: sampling.top_k].softmax(dim=-1).double()
    cumulative = shares.cumsum(dim=0)
    # a token is in while those before it have not reached top_p: the likeliest always is
    kept = max(1, int((cumulative - shares < sampling.top_p).sum()))
    uniform = np.random.Generator(np.random.Philox(key=[sampling.seed, position])).random()
    target = uniform * cumulative[kept - 1]
    return int(tokens[min(int(torch.searchsorted(cumulative[:kept], target, right=True)), kept - 1)])
