"""Traces made from traces (other arrivals, larger blocks, shorter prompts), and one of known sharing."""

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import Request, blocks_for
from mooncake_lab.workload.trace import Trace


def poisson_arrivals_s(requests: int, requests_per_s: float, *, seed: int = 0) -> npt.NDArray[np.float64]:
    """Shape (requests,): arrival times with independent exponential gaps, the first one after a gap too.

    Raises:
        ValueError: when there are fewer than 0 requests, or the rate is not a positive number.
    """
    if requests < 0:
        raise ValueError(f"cannot draw {requests} arrivals; at least 0 are needed")
    if not 0 < requests_per_s < np.inf:
        raise ValueError(f"requests_per_s is {requests_per_s!r}; it must be a positive number")
    gaps_s = np.random.default_rng(seed).exponential(1 / requests_per_s, requests)
    return np.cumsum(gaps_s)


def with_poisson_arrivals(trace: Trace, requests_per_s: float, *, seed: int = 0) -> Trace:
    """The same requests in the same order, arriving as a Poisson process.

    Raises:
        ValueError: when the rate is not a positive number.
    """
    return replace(
        trace,
        arrival_s=poisson_arrivals_s(len(trace), requests_per_s, seed=seed),
        source=f"{trace.source}, Poisson arrivals at {requests_per_s:g}/s, seed {seed}",
    )


def tick_s(trace: Trace) -> float:
    """The seconds between the time stamps of a trace that come in ticks; 0 where they do not.

    Stamps come in ticks when some requests share one, and nearly all gaps between different stamps are whole
    multiples of one length, up to a hundredth of it. Ticks may be empty, and a clock may be off by milliseconds.
    """
    gaps_s = np.diff(np.unique(trace.arrival_s))
    if len(gaps_s) in {0, len(trace) - 1}:
        return 0.0
    short_s = np.percentile(gaps_s, 5)  # of one tick, even if a few stamps are out of place
    multiples = np.rint(gaps_s / short_s)
    tick = float(np.median(gaps_s[multiples > 0] / multiples[multiples > 0]))
    is_multiple = np.abs(gaps_s - multiples * tick) <= tick / 100
    return tick if is_multiple.mean() >= _IN_TICKS else 0.0


_IN_TICKS: Final = 0.95
"""The share of gaps that are multiples of the tick in a trace whose stamps come in ticks."""


def with_spread_arrivals(trace: Trace, *, seed: int = 0) -> Trace:
    """The same requests in the same order, each at a random moment of the tick that begins at its time stamp.

    The moments are independent and uniform. A trace whose stamps do not come in ticks is returned as it is.
    """
    tick = tick_s(trace)
    if not tick:
        return trace
    # a stream of its own, so that a twin of the same seed and its arrivals do not move together
    moments = np.random.default_rng([seed, 4]).uniform(0, tick, len(trace))
    return replace(
        trace,
        arrival_s=np.sort(trace.arrival_s + moments),
        source=f"{trace.source}, arrivals spread over ticks of {tick:.3g} s, seed {seed}",
    )


def with_larger_blocks(trace: Trace, factor: int) -> Trace:
    """The same requests, `factor` neighbouring blocks made one.

    A block id stands for a block and everything before it, so the id of the last of the joined blocks
    names the larger one. Smaller blocks cannot be had: what happens inside a block is not in the file.

    Raises:
        ValueError: when the factor is not at least 1.
    """
    if factor < 1:
        raise ValueError(f"cannot join {factor} blocks to one; at least 1 is needed")
    sizes = np.diff(trace.block_starts)
    position = np.arange(len(trace.block_ids)) - np.repeat(trace.block_starts[:-1], sizes)
    is_last = position == np.repeat(sizes, sizes) - 1
    return replace(
        trace,
        block_size_tokens=trace.block_size_tokens * factor,
        block_ids=trace.block_ids[is_last | (position % factor == factor - 1)],
        block_starts=np.concatenate([[0], np.cumsum(-(-sizes // factor))]),
        source=trace.source if factor == 1 else f"{trace.source}, in blocks of {trace.block_size_tokens * factor}",
    )


def prompt_of(request: Request, vocabulary: int) -> npt.NDArray[np.int32]:
    """Token ids for a request of a trace, shape (input_tokens,): each block's are drawn from its key alone."""
    size = request.block_size_tokens
    blocks = [_block(key, size, vocabulary) for key in request.block_keys]
    return np.concatenate(blocks)[: request.input_tokens]


def _block(key: int | bytes, size: int, vocabulary: int) -> npt.NDArray[np.int32]:
    seed = key if isinstance(key, int) else int.from_bytes(key, "little")
    return np.random.default_rng(seed).integers(0, vocabulary, size, dtype=np.int32)


def scaled_down(trace: Trace, divisor: int, *, most_tokens: int | None = None) -> Trace:
    """The same requests with lengths divided and blocks as much smaller, so that they share what they shared.

    Args:
        trace: what is to be replayed.
        divisor: of lengths, and of the block size, which it must divide.
        most_tokens: requests whose prompt and answer are longer afterwards are left out; None keeps all.

    Raises:
        ValueError: when the divisor does not divide the block size, or no request is short enough.
    """
    if divisor < 1 or trace.block_size_tokens % divisor:
        raise ValueError(
            f"lengths cannot be divided by {divisor}: it must divide the block size of {trace.block_size_tokens}"
        )
    inputs, outputs = -(-trace.input_tokens // divisor), -(-trace.output_tokens // divisor)
    keep = np.ones(len(trace), dtype=bool) if most_tokens is None else inputs + outputs <= most_tokens
    if not keep.any():
        raise ValueError(
            f"none of {len(trace)} requests has at most {most_tokens} tokens after division by {divisor}"
        )
    counts = np.diff(trace.block_starts)
    return replace(
        trace,
        block_size_tokens=trace.block_size_tokens // divisor,
        arrival_s=trace.arrival_s[keep],
        input_tokens=inputs[keep],
        output_tokens=outputs[keep],
        block_ids=trace.block_ids[np.repeat(keep, counts)],
        block_starts=np.concatenate([[0], np.cumsum(counts[keep])]),
        sessions=None
        if trace.sessions is None
        else tuple(s for s, k in zip(trace.sessions, keep, strict=True) if k),
        wait_for=_kept_waits(trace, keep),
        delay_s=None if trace.delay_s is None else trace.delay_s[keep],
        max_tokens=None if trace.max_tokens is None else -(-trace.max_tokens[keep] // divisor),
        source=f"{trace.source}, lengths divided by {divisor}",
    )


def _kept_waits(trace: Trace, keep: npt.NDArray[np.bool_]) -> tuple[tuple[int, ...], ...] | None:
    """What the kept requests wait for, by their new numbers; nobody waits for a request that is left out."""
    if trace.wait_for is None:
        return None
    number = np.cumsum(keep) - 1
    return tuple(
        tuple(int(number[i]) for i in waits if keep[i])
        for waits, kept in zip(trace.wait_for, keep, strict=True)
        if kept
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefix:
    """Prompts that begin with one of `prefixes` prefixes, each as likely as the others.

    The papers' simulated dataset is of this kind: prompts of one length, half of it cached (arXiv Table 2).

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
        lows = {"requests": 1, "input_tokens": 1, "shared_tokens": 0, "output_tokens": 1}
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
