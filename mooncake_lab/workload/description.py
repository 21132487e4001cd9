"""What a trace says about conversations and reuse: turns, growth of prompts, gaps, and the ceiling."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_lab.workload.trace import Trace
from mooncake_lab.workload.trace_statistics import (
    conversation_sizes,
    reusable_blocks,
    reuse_gaps_s,
    use_counts,
)

_PERCENTILES: Final = (50, 90, 99)
IDS: Final = {
    "recorded": "block ids of the file",
    "minted": "block ids made from the lengths of shared prefixes in the file; sessions share nothing",
    "hashed": "block ids made from the tokens of the texts",
    "none": "no block ids: what prompts share is not in the file, so no hit rate follows",
}
"""What is known of sharing, by the origin of the ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDescription:
    """A trace in the terms of conversations; what the trace does not say is None."""

    requests: int
    duration_s: float
    format: str
    block_size_tokens: int
    block_ids: str
    """Where they come from."""
    sessions: int
    sessions_known: bool
    """Whether the file names them; else they are inferred from shared blocks, or each request is one."""
    turns: dict[str, float]
    """Requests of a session: mean, percentiles and maximum."""
    waiting_requests: int
    """Those that follow the answer of another."""
    delay_s: dict[str, float] | None
    """From such an answer to the next request."""
    prompt_tokens: dict[str, float]
    growth_tokens: dict[str, float] | None
    """How much longer a turn's prompt is than that of the turn before; None without named sessions."""
    new_tokens: dict[str, float] | None
    """Tokens of a prompt that no earlier request had as its prefix."""
    reuse_gap_s: dict[str, float] | None
    """From a use of a block to its next."""
    unique_blocks: int | None
    token_hit_rate_ceiling: float | None
    """Tokens of prefixes that an earlier request had, over all prompt tokens: a cache without limit."""
    block_hit_rate_ceiling: float | None
    gaps_s: npt.NDArray[np.float64] = field(repr=False)
    """Shape (reuses,), sorted: what the percentiles are of."""
    turn_counts: npt.NDArray[np.int64] = field(repr=False)
    """Shape (sessions,), largest first."""
    prompts_by_turn: tuple[tuple[int, float, float], ...] = field(repr=False)
    """For each turn up to the 99th percentile of a session's: its number, and the median and 90th percentile of
    its prompts' lengths."""


def describe(trace: Trace) -> TraceDescription:
    """Describe a trace.

    Raises:
        ValueError: when it has no requests.
    """
    if len(trace) == 0:
        raise ValueError(f"trace {trace.name!r} has no requests, so there is nothing to describe")
    known = trace.ids != "none"
    numbers, turn_of, before = _turns(trace)
    named = trace.sessions is not None
    counts = np.sort(np.bincount(numbers))[::-1] if named else _inferred(trace)
    later = before >= 0
    reusable = np.minimum(reusable_blocks(trace) * trace.block_size_tokens, trace.input_tokens)
    gaps_s = np.sort(reuse_gaps_s(trace)) if known else np.zeros(0)
    delays = np.zeros(0) if trace.delay_s is None else trace.delay_s[~np.isnan(trace.delay_s)]
    waits = sum(1 for each in trace.wait_for or () if each) or int(later.sum())
    unique = len(use_counts(trace)) if known else None
    growth = trace.input_tokens[later] - trace.input_tokens[before[later]]
    return TraceDescription(
        requests=len(trace),
        duration_s=float(trace.arrival_s[-1] - trace.arrival_s[0]),
        format=trace.format,
        block_size_tokens=trace.block_size_tokens,
        block_ids=IDS[trace.ids],
        sessions=len(counts),
        sessions_known=named,
        turns=_spread(counts) or {},
        waiting_requests=waits,
        delay_s=_spread(delays),
        prompt_tokens=_spread(trace.input_tokens) or {},
        growth_tokens=_spread(growth) if named else None,
        new_tokens=_spread(trace.input_tokens - reusable) if known else None,
        reuse_gap_s=_spread(gaps_s),
        unique_blocks=unique,
        token_hit_rate_ceiling=float(reusable.sum() / trace.input_tokens.sum()) if known else None,
        block_hit_rate_ceiling=None if unique is None else 1 - unique / len(trace.block_ids),
        gaps_s=gaps_s,
        turn_counts=counts,
        prompts_by_turn=_by_turn(trace, turn_of, counts) if named else (),
    )


def _inferred(trace: Trace) -> npt.NDArray[np.int64]:
    return conversation_sizes(trace) if trace.ids != "none" else np.ones(len(trace), np.int64)


def _turns(trace: Trace) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each request: its session's number, its place in it from 0, and the request before it there, or -1."""
    sessions = trace.sessions or (None,) * len(trace)
    numbers, turn, before = (np.full(len(trace), -1, np.int64) for _ in range(3))
    seen: dict[str, tuple[int, int, int]] = {}
    alone = len({each for each in sessions if each is not None})
    for i, session in enumerate(sessions):
        if session is None:
            numbers[i], turn[i] = alone, 0
            alone += 1
            continue
        number, count, last = seen.get(session, (len(seen), 0, -1))
        numbers[i], turn[i], before[i] = number, count, last
        seen[session] = number, count + 1, i
    return numbers, turn, before


def _by_turn(
    trace: Trace, turn_of: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> tuple[tuple[int, float, float], ...]:
    most = int(np.percentile(counts, 99))
    found = list[tuple[int, float, float]]()
    for turn in range(most):
        tokens = trace.input_tokens[turn_of == turn]
        middle, high = np.percentile(tokens, (50, 90)).tolist()
        found.append((turn + 1, middle, high))
    return tuple(found)


def _spread(values: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None of nothing."""
    if not len(values):
        return None
    percentiles = np.percentile(values, _PERCENTILES).tolist()
    named = {f"p{percent}": value for percent, value in zip(_PERCENTILES, percentiles, strict=True)}
    return {"mean": float(values.mean()), **named, "max": float(values.max())}
