"""Real tokens for traces that name only blocks: equal ids give equal tokens, so that sharing stays what it is."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import Request
from mooncake_lab.workload import Trace


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
    inputs, outputs = -(-trace.input_tokens // divisor), np.maximum(1, -(-trace.output_tokens // divisor))
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
        max_tokens=None if trace.max_tokens is None else -(-trace.max_tokens[keep] // divisor),
        source=f"{trace.source}, lengths divided by {divisor}",
    )
