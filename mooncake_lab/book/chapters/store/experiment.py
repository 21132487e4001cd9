"""Chapter 07: hit rates by capacity, policy, block size and tier."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab.book.experiments import OfTrace, tabulated
from mooncake_lab.book.paper import assumption
from mooncake_lab.core import BlockKey, block_keys
from mooncake_lab.metrics.hits import covered_tokens, token_hit_rate
from mooncake_lab.store import BlockStore, Stored
from mooncake_lab.store.eviction import LFU, Belady, LengthAware, PolicyFactory, make_policy
from mooncake_lab.store.replay import Requests, replay, replay_tokens
from mooncake_lab.workload import Trace


def live_set(accesses: Sequence[BlockKey]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """After each access, the blocks that a cache would have to hold, both of shape (accesses,).

    First the live ones, used already and again later: what Belady's optimum keeps. Then the distinct ones so far:
    what a cache that never evicts holds.
    """
    first: dict[BlockKey, int] = {}
    last: dict[BlockKey, int] = {}
    for step, key in enumerate(accesses):
        first.setdefault(key, step)
        last[key] = step
    begun, ended = np.zeros((2, len(accesses)), np.int64)
    begun[list(first.values())] = 1
    ended[list(last.values())] = 1
    return np.cumsum(begun - ended), np.cumsum(begun)


def reuse_distances(accesses: Sequence[BlockKey]) -> npt.NDArray[np.int64]:
    """The LRU capacity that would turn each repeated access into a hit, in order; first accesses have none.

    It is the number of distinct blocks since the block's last use, itself included (Mattson et al., 1970). A
    Fenwick tree marks the latest use of each block, and counts the marks between the two uses.
    """
    tree = [0] * (len(accesses) + 1)
    latest: dict[BlockKey, int] = {}
    distances: list[int] = []

    def mark(step: int, change: int) -> None:
        while step < len(tree):
            tree[step] += change
            step += step & -step

    for step, key in enumerate(accesses, start=1):
        before = latest.get(key)
        if before is not None:
            marks, at = 0, before
            while at:
                marks += tree[at]
                at &= at - 1
            distances.append(len(latest) - marks + 1)
            mark(before, -1)
        latest[key] = step
        mark(step, 1)
    return np.array(distances, np.int64)


def fine_grained_reuse(
    prefix_hits: npt.NDArray[np.int64],
    input_tokens: npt.NDArray[np.int64],
    *,
    remainder_tokens: int,
    after_first_tokens: int | npt.NDArray[np.int64],
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
            second block says more; one number, or one a request.
        block_size_tokens: tokens of a full block.
    """
    remainder = np.where(prefix_hits == 1, after_first_tokens, remainder_tokens)
    reused = np.where(prefix_hits > 0, block_size_tokens * prefix_hits + remainder, 0)
    return np.minimum(reused, input_tokens - 1)


MERGED: Final = ("conversation", "toolagent", "synthetic")
"""The workloads that "all" of FAST'25 Fig. 9 merges."""
_SERIES_POINTS = 240


class OfStore(OfTrace):
    """One cache on one trace. The workload "all" is the three of `MERGED`, by time of arrival."""

    __slots__ = ()

    def replayable(self) -> tuple[Trace, Requests]:
        """The trace, and its requests as plain lists."""
        return _replayable(self.workload, self.first, self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyHitRates(OfStore):
    """One row: the hit rates of one cache on one trace, block by block (arXiv §4.2, Table 1)."""

    policy: str = "lru"
    capacity_blocks: int | None = None
    """None is unlimited."""
    keeps_counts: bool = False
    """Whether the counts of LFU outlive eviction (assumption B26)."""
    keeps_late: bool = False
    """Whether LengthAware evicts the blocks at the start of a request before later ones (assumption B25)."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Replay the trace."""
        trace, requests = self.replayable()
        found = replay(requests, self._eviction(), self.capacity_blocks)
        reused = covered_tokens(
            np.array(found.prefix_hits_by_request), trace.input_tokens, trace.block_size_tokens
        )
        yield {
            "origin": trace.origin,
            "source": trace.source,
            "hit_rate": found.hit_rate,
            "prefix_hit_rate": found.prefix_hit_rate,
            "token_hit_rate": token_hit_rate(reused, trace.input_tokens),
        }

    def _eviction(self) -> str | PolicyFactory:
        if self.policy == "lfu" and self.keeps_counts:
            return lambda _capacity_blocks: CountsOfAllTime()
        if self.policy == "length_aware" and self.keeps_late:
            return lambda _capacity_blocks: KeepsLate()
        return self.policy


class CountsOfAllTime(LFU):
    """LFU whose counts outlive eviction: a block that comes back has all its uses (assumption B26)."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: Counter[BlockKey] = Counter()

    def insert(self, key: BlockKey, _position: int = 0, /) -> None:
        """Hold the key with the uses that it ever had, and this one."""
        self._use(key, self._uses[key] + 1, 0)

    def _use(self, key: BlockKey, uses: int, minus_position: int) -> None:
        self._uses[key] = uses
        super()._use(key, uses, minus_position)


class KeepsLate(LengthAware):
    """LengthAware read the other way: among equals, the earliest in its request is evicted (assumption B25)."""

    def insert(self, key: BlockKey, position: int = 0, /) -> None:
        """Hold the key with one use, and its place in the request."""
        super().insert(key, -position)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityHitRates(OfStore):
    """One row: the prefix hit rate of one LRU cache whose room is counted in tokens (FAST'25 §5.3.1, Fig. 9)."""

    capacity_tokens: int | None = None
    """None is unlimited."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Replay the trace, and count whole blocks, and whole blocks with the assumed remainder."""
        trace, requests = self.replayable()
        size, tokens = trace.block_size_tokens, trace.input_tokens
        found = replay_tokens(requests, tokens, "lru", self.capacity_tokens, block_size_tokens=size)
        hits = np.array(found.prefix_hits_by_request)
        fine = fine_grained_reuse(
            hits,
            tokens,
            remainder_tokens=_assumed_tokens("B12"),
            after_first_tokens=_after_first(self.workload, self.first, self.seed),
            block_size_tokens=size,
        )
        yield {
            "origin": trace.origin,
            "source": trace.source,
            "hit_rate": token_hit_rate(fine, tokens),
            "whole_blocks_hit_rate": token_hit_rate(covered_tokens(hits, tokens, size), tokens),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBlocks(OfStore):
    """How many blocks are seen, and how many will be used again, as time goes by."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """A few hundred rows, evenly spaced over the requests; each with the peak over all accesses."""
        trace, _ = self.replayable()
        live, seen = live_set(trace.block_ids.tolist())
        last_access = trace.block_starts[1:] - 1
        for i in np.unique(np.linspace(0, len(trace) - 1, _SERIES_POINTS).astype(int)):
            yield {
                "origin": trace.origin,
                "source": trace.source,
                "at_s": trace.arrival_s[i],
                "live_blocks": live[last_access[i]],
                "seen_blocks": seen[last_access[i]],
                "peak_live_blocks": live.max(),
            }


@dataclass(frozen=True, slots=True, kw_only=True)
class LRUNeeds(OfStore):
    """How large an LRU cache must be to reach a share of what an unlimited one hits, percent by percent."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row a percent; none where nothing is used again."""
        trace, _ = self.replayable()
        distances = reuse_distances(trace.block_ids.tolist())
        if not len(distances):
            return
        # the inverted distribution: a distance that occurs, never a mean of two
        needed = np.quantile(distances, np.arange(1, 101) / 100, method="inverted_cdf")
        for percent, blocks in enumerate(needed, 1):
            yield {"origin": trace.origin, "source": trace.source, "percent": percent, "capacity_blocks": blocks}


def merged(traces: Sequence[Trace]) -> Trace:
    """Several traces as one, by time of arrival, with block ids kept apart; ties go in the order given.

    Raises:
        ValueError: when the block sizes differ, or there is no trace.
    """
    sizes = {trace.block_size_tokens for trace in traces}
    if len(sizes) != 1:
        raise ValueError(f"traces with blocks of {sorted(sizes)} tokens; they must have one size in common")
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(trace, name) for trace in traces])
        for name in ("arrival_s", "input_tokens", "output_tokens")
    }
    order = np.argsort(joined["arrival_s"], kind="stable")
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
        block_ids=np.concatenate([blocks[i] for i in order]),
        block_starts=np.concatenate([[0], np.cumsum([len(blocks[i]) for i in order])]),
        source=" and ".join(trace.source for trace in traces),
        **{name: values[order] for name, values in joined.items()},
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


@tabulated
def step_by_step(requests: Sequence[Sequence[int]], policy: str, capacity_blocks: int) -> Iterator[dict[str, Any]]:
    """Every access of a small replay, one row each: request, block, hit or miss, who left, what is held after."""
    chosen = make_policy(policy, capacity_blocks)
    if isinstance(chosen, Belady):
        chosen.foresee([key for request in requests for key in request])
    store: BlockStore[None] = BlockStore(capacity_blocks, chosen)
    for number, request in enumerate(requests):
        for position, key in enumerate(request):
            outcome = store.put(key, None, size_bytes=1, position=position)
            hit = isinstance(outcome, Stored) and outcome.was_held
            left = [str(victim) for victim, _ in outcome.evicted] if isinstance(outcome, Stored) else []
            yield {
                "request": number,
                "block": key,
                "found": "hit" if hit else "miss",
                "evicted": " ".join(left),
                "held": " ".join(sorted(map(str, store), key=int)),
            }


@lru_cache(maxsize=8)
def _replayable(workload: str, first: int | None, seed: int) -> tuple[Trace, Requests]:
    """Kept: a sweep replays the same requests many times."""
    if workload == "all":
        trace = merged([_replayable(name, first, seed)[0] for name in MERGED])
    else:
        trace = OfTrace(workload=workload, first=first, seed=seed).trace()
    return trace, [trace.blocks_of(i).tolist() for i in range(len(trace))]


def _after_first(workload: str, first: int | None, seed: int) -> npt.NDArray[np.int64]:
    """Tokens reused beyond a single matching block, a request: only conversations end a system prompt there."""
    names = MERGED if workload == "all" else (workload,)
    traces = {name: _replayable(name, first, seed)[0] for name in names}
    tokens = [
        np.full(len(trace), _assumed_tokens("B11" if name == "conversation" else "B12"))
        for name, trace in traces.items()
    ]
    order = np.argsort(np.concatenate([trace.arrival_s for trace in traces.values()]), kind="stable")
    return np.concatenate(tokens)[order]


def _assumed_tokens(identifier: str) -> int:
    return int(assumption(identifier).value or 0)
