"""Chapter 07: hit rates by capacity, policy, block size and tier."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab.chapters.store.replay import Requests, replay, replay_tokens
from mooncake_lab.core import BlockKey, block_keys
from mooncake_lab.metrics.hits import covered_tokens, token_hit_rate
from mooncake_lab.paper import assumption
from mooncake_lab.store import BlockStore, Stored
from mooncake_lab.store.eviction import Belady, make_policy
from mooncake_lab.workload import Trace, load


@dataclass(frozen=True, slots=True, eq=False)
class LiveSet:
    """How many blocks a cache would have to hold, access by access; both vectors have shape (accesses,)."""

    live_blocks: npt.NDArray[np.int64]
    """Blocks used already that will be used again: what Belady's optimum keeps."""
    seen_blocks: npt.NDArray[np.int64]
    """Distinct blocks so far: what a cache that never evicts holds."""


def live_set(accesses: Sequence[BlockKey]) -> LiveSet:
    """The live and the seen blocks after each access of a sequence."""
    first: dict[BlockKey, int] = {}
    last: dict[BlockKey, int] = {}
    for step, key in enumerate(accesses):
        first.setdefault(key, step)
        last[key] = step
    born = np.zeros(len(accesses), np.int64)
    died = np.zeros(len(accesses), np.int64)
    born[list(first.values())] = 1
    died[list(last.values())] = 1
    return LiveSet(np.cumsum(born - died), np.cumsum(born))


def reuse_distances(accesses: Sequence[BlockKey]) -> npt.NDArray[np.int64]:
    """The LRU capacity that would turn each repeated access into a hit, in order; first accesses have none.

    It is the number of distinct blocks since the block's last use, itself included (Mattson et al., 1970). A
    Fenwick tree marks the latest use of each block, and counts the marks between the two uses.
    """
    size = len(accesses)
    tree = [0] * (size + 1)
    latest: dict[BlockKey, int] = {}
    distances: list[int] = []
    for step, key in enumerate(accesses, start=1):
        before = latest.get(key)
        if before is not None:
            distances.append(len(latest) - _marks_up_to(tree, before) + 1)
            _mark(tree, before, -1)
        latest[key] = step
        _mark(tree, step, 1)
    return np.array(distances, np.int64)


def _mark(tree: list[int], step: int, change: int) -> None:
    while step < len(tree):
        tree[step] += change
        step += step & -step


def _marks_up_to(tree: list[int], step: int) -> int:
    total = 0
    while step:
        total += tree[step]
        step &= step - 1
    return total


def fine_grained_reuse(
    prefix_hits: npt.NDArray[np.int64],
    input_tokens: npt.NDArray[np.int64],
    *,
    remainder_tokens: int,
    after_first_tokens: int | npt.NDArray[np.int64] | None = None,
    block_size_tokens: int = 512,
) -> npt.NDArray[np.int64]:
    """Tokens each request would reuse in a cache of much smaller blocks, shape (requests,); for FAST'25 Fig. 9.

    A request whose first `k` blocks match shares some tokens of the next one too, which the released traces, in
    blocks of 512 tokens, cannot show. They are assumed: `remainder_tokens` more when something matches, and
    never the whole prompt, since a prefill has to compute at least the last token.

    Args:
        prefix_hits: shape (requests,), matching blocks from the start.
        input_tokens: shape (requests,), the length of each prompt.
        remainder_tokens: assumed further tokens (an even guess: half a block).
        after_first_tokens: the same when exactly one block matches, where a system prompt known to end inside the
            second block says more; one number, or one a request. `None` is `remainder_tokens`.
        block_size_tokens: tokens of a full block.

    Raises:
        ValueError: when the vectors differ in length.
    """
    if prefix_hits.shape != input_tokens.shape:
        raise ValueError(f"{prefix_hits.shape} prefix hits and {input_tokens.shape} prompts; one each is needed")
    after_first = remainder_tokens if after_first_tokens is None else after_first_tokens
    remainder = np.where(prefix_hits == 1, after_first, remainder_tokens)
    reused = np.where(prefix_hits > 0, block_size_tokens * prefix_hits + remainder, 0)
    return np.minimum(reused, input_tokens - 1)


MERGED: Final = ("conversation", "toolagent", "synthetic")
"""The workloads that "all" of FAST'25 Fig. 9 merges."""
_SERIES_POINTS = 240


@dataclass(frozen=True, slots=True)
class PolicyHitRates:
    """One row: the hit rates of one cache on one trace, block by block (arXiv §4.2, Table 1)."""

    workload: str = "conversation"
    policy: str = "lru"
    capacity_blocks: int | None = None
    """None is unlimited."""
    first: int | None = None
    """Number of requests from the start of the trace; None takes all."""
    seed: int = 0
    """Seed of the twin, which is used where there is no released file."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Replay the trace."""
        trace, requests = _replayable(self.workload, self.first, self.seed)
        found = replay(requests, self.policy, self.capacity_blocks)
        reused = covered_tokens(found.prefix_hits_by_request, trace.input_tokens, trace.block_size_tokens)
        yield {
            "origin": trace.origin,
            "source": trace.source,
            "hit_rate": found.hit_rate,
            "prefix_hit_rate": found.prefix_hit_rate,
            "token_hit_rate": token_hit_rate(reused, trace.input_tokens),
        }


@dataclass(frozen=True, slots=True)
class CapacityHitRates:
    """One row: the prefix hit rate of one LRU cache whose room is counted in tokens (FAST'25 §5.3.1, Fig. 9).

    The workload "all" is the three of `MERGED` in one cache, by time of arrival.
    """

    workload: str = "conversation"
    capacity_tokens: int | None = None
    """None is unlimited."""
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Replay the trace, and count whole blocks, and whole blocks with the assumed remainder."""
        trace, requests = _replayable(self.workload, self.first, self.seed)
        found = replay_tokens(
            requests,
            trace.input_tokens,
            "lru",
            self.capacity_tokens,
            block_size_tokens=trace.block_size_tokens,
        )
        hits = found.prefix_hits_by_request
        whole = covered_tokens(hits, trace.input_tokens, trace.block_size_tokens)
        fine = fine_grained_reuse(
            hits,
            trace.input_tokens,
            remainder_tokens=_assumed_tokens("B12"),
            after_first_tokens=_after_first(self.workload, self.first, self.seed),
            block_size_tokens=trace.block_size_tokens,
        )
        yield {
            "origin": trace.origin,
            "source": trace.source,
            "hit_rate": token_hit_rate(fine, trace.input_tokens),
            "whole_blocks_hit_rate": token_hit_rate(whole, trace.input_tokens),
        }


@dataclass(frozen=True, slots=True)
class LiveBlocks:
    """How many blocks are seen, and how many will be used again, as time goes by."""

    workload: str = "conversation"
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """A few hundred rows, evenly spaced over the requests; each with the peak over all accesses."""
        trace, _ = _replayable(self.workload, self.first, self.seed)
        found = live_set(trace.block_ids.tolist())
        last_access = trace.block_starts[1:] - 1
        for i in np.unique(np.linspace(0, len(trace) - 1, _SERIES_POINTS).astype(int)):
            yield {
                "origin": trace.origin,
                "source": trace.source,
                "at_s": trace.arrival_s[i],
                "live_blocks": found.live_blocks[last_access[i]],
                "seen_blocks": found.seen_blocks[last_access[i]],
                "peak_live_blocks": found.live_blocks.max(),
            }


@dataclass(frozen=True, slots=True)
class LRUNeeds:
    """How large an LRU cache must be to reach a share of what an unlimited one hits, percent by percent."""

    workload: str = "conversation"
    first: int | None = None
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a percent; none where nothing is used again."""
        trace, _ = _replayable(self.workload, self.first, self.seed)
        distances = reuse_distances(trace.block_ids.tolist())
        if not len(distances):
            return
        percents = np.arange(1, 101)
        # the inverted distribution: a distance that occurs, never a mean of two
        needed = np.quantile(distances, percents / 100, method="inverted_cdf")
        for percent, blocks in zip(percents, needed, strict=True):
            yield {"origin": trace.origin, "source": trace.source, "percent": percent, "capacity_blocks": blocks}


def merged(traces: Sequence[Trace]) -> Trace:
    """Several traces as one, by time of arrival, with block ids kept apart; ties go in the order given.

    Raises:
        ValueError: when the block sizes differ, or there is no trace.
    """
    sizes = {trace.block_size_tokens for trace in traces}
    if len(sizes) != 1:
        raise ValueError(f"traces with blocks of {sorted(sizes)} tokens; they must have one size in common")
    order = np.argsort(np.concatenate([trace.arrival_s for trace in traces]), kind="stable")
    named = [np.unique(trace.block_ids, return_inverse=True) for trace in traces]
    offsets = np.cumsum([0, *(len(ids) for ids, _ in named)])
    blocks = [
        block_ids
        for trace, (_, ranks), offset in zip(traces, named, offsets, strict=False)
        for block_ids in np.split(ranks + offset, trace.block_starts[1:-1])
    ]
    return Trace(
        name="all",
        origin="twin" if any(trace.origin == "twin" for trace in traces) else traces[0].origin,
        block_size_tokens=sizes.pop(),
        arrival_s=np.concatenate([trace.arrival_s for trace in traces])[order],
        input_tokens=np.concatenate([trace.input_tokens for trace in traces])[order],
        output_tokens=np.concatenate([trace.output_tokens for trace in traces])[order],
        block_ids=np.concatenate([blocks[i] for i in order]),
        block_starts=np.concatenate([[0], np.cumsum([len(blocks[i]) for i in order])]),
        source=" and ".join(trace.source for trace in traces),
    )


def key_table(prompts: Mapping[str, npt.NDArray[np.int32]], block_size_tokens: int) -> pd.DataFrame:
    """The block keys of some prompts, one row a block: prompt, position, tokens, key (8 hex digits), shared."""
    keys = {name: block_keys(tokens, block_size_tokens) for name, tokens in prompts.items()}
    holders = Counter(key for chain in keys.values() for key in chain)
    return pd.DataFrame(
        {
            "prompt": name,
            "position": position,
            "tokens": " ".join(map(str, prompts[name][position * block_size_tokens :][:block_size_tokens])),
            "key": key.hex()[:8],
            "shared": holders[key] > 1,
        }
        for name, chain in keys.items()
        for position, key in enumerate(chain)
    )


def step_by_step(requests: Sequence[Sequence[int]], policy: str, capacity_blocks: int) -> pd.DataFrame:
    """Every access of a small replay, one row each: request, block, hit or miss, who left, what is held after."""
    chosen = make_policy(policy, capacity_blocks)
    if isinstance(chosen, Belady):
        chosen.foresee([key for request in requests for key in request])
    store: BlockStore[None] = BlockStore(capacity_blocks, chosen)
    rows: list[dict[str, Any]] = []
    for number, request in enumerate(requests):
        for position, key in enumerate(request):
            outcome = store.put(key, None, size_bytes=1, position=position)
            hit = isinstance(outcome, Stored) and outcome.was_held
            left = [str(victim) for victim, _ in outcome.evicted] if isinstance(outcome, Stored) else []
            rows.append(
                {
                    "request": number,
                    "block": key,
                    "found": "hit" if hit else "miss",
                    "evicted": " ".join(left),
                    "held": " ".join(sorted(map(str, store), key=int)),
                }
            )
    return pd.DataFrame(rows)


@lru_cache(maxsize=8)
def _replayable(workload: str, first: int | None, seed: int) -> tuple[Trace, Requests]:
    """A trace and its requests as plain lists, kept: a sweep replays the same one many times."""
    if workload == "all":
        trace = merged([_replayable(name, first, seed)[0] for name in MERGED])
    else:
        trace = load(workload, seed=seed)
        trace = trace if first is None else trace.head(first)
    return trace, [trace.blocks_of(i).tolist() for i in range(len(trace))]


def _after_first(workload: str, first: int | None, seed: int) -> npt.NDArray[np.int64]:
    """Tokens reused beyond a single matching block, a request: only conversations end a system prompt there."""
    names = MERGED if workload == "all" else (workload,)
    traces = [_replayable(name, first, seed)[0] for name in names]
    tokens = [
        np.full(len(trace), _assumed_tokens("B11" if name == "conversation" else "B12"))
        for name, trace in zip(names, traces, strict=True)
    ]
    order = np.argsort(np.concatenate([trace.arrival_s for trace in traces]), kind="stable")
    return np.concatenate(tokens)[order]


def _assumed_tokens(identifier: str) -> int:
    assumed = assumption(identifier)
    if assumed.value is None or assumed.unit != "tokens":
        raise ValueError(f"assumption {identifier} is {assumed.value!r} {assumed.unit}; tokens are needed")
    return int(assumed.value)
