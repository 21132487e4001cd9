"""A workload of known sharing: every prompt is one of a few prefixes plus tokens of its own.

The papers' simulated dataset is of this kind: prompts of one length, half of it cached (arXiv Table 2).
"""

import math
from dataclasses import dataclass

import numpy as np

from mooncake_lab.core import blocks_for
from mooncake_lab.workload.trace import Trace
from mooncake_lab.workload.transforms import poisson_arrivals_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Prompts that begin with one of `prefixes` prefixes, each as likely as the others.

    Raises:
        ValueError: when a number is out of range, or the prefix is not a whole number of blocks.
    """

    requests: int
    requests_per_s: float
    """Of Poisson arrivals."""
    input_tokens: int
    shared_tokens: int
    """Tokens of the prefix: whole blocks, for a block that is only partly shared is not shared at all."""
    output_tokens: int
    prefixes: int = 1
    block_size_tokens: int = 512

    def __post_init__(self) -> None:
        lows = {"requests": 1, "input_tokens": 1, "shared_tokens": 0, "output_tokens": 0}
        for name, low in (lows | {"prefixes": 1, "block_size_tokens": 1}).items():
            if getattr(self, name) < low:
                raise ValueError(f"SharedPrefix.{name} is {getattr(self, name)}; at least {low} is needed")
        if not 0 < self.requests_per_s < math.inf:
            raise ValueError(
                f"SharedPrefix.requests_per_s is {self.requests_per_s!r}; it must be a positive number"
            )
        if self.shared_tokens > self.input_tokens or self.shared_tokens % self.block_size_tokens:
            raise ValueError(
                f"SharedPrefix.shared_tokens is {self.shared_tokens}; allowed are multiples of"
                f" {self.block_size_tokens} up to the {self.input_tokens} input tokens"
            )

    def make(self, *, seed: int = 0) -> Trace:
        """Draw a trace: the same seed gives the same one."""
        shared = self.shared_tokens // self.block_size_tokens
        blocks = blocks_for(self.input_tokens, self.block_size_tokens)
        # a stream of its own, so that choices and arrivals do not move together
        chosen = np.random.default_rng([seed, 1]).integers(self.prefixes, size=self.requests)
        ids = np.empty((self.requests, blocks), dtype=np.int64)
        ids[:, :shared] = chosen[:, None] * shared + np.arange(shared)
        own = self.requests * (blocks - shared)
        ids[:, shared:] = self.prefixes * shared + np.arange(own).reshape(self.requests, -1)
        return Trace(
            name="shared_prefix",
            origin="generated",
            block_size_tokens=self.block_size_tokens,
            arrival_s=poisson_arrivals_s(self.requests, self.requests_per_s, seed=seed),
            input_tokens=np.full(self.requests, self.input_tokens),
            output_tokens=np.full(self.requests, self.output_tokens),
            block_ids=ids.ravel(),
            block_starts=np.arange(self.requests + 1) * blocks,
            source=f"shared-prefix workload of {self.prefixes} prefixes, seed {seed}",
        )
