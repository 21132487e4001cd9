"""What a cache keeps: hit rates by policy and capacity (arXiv Table 1, FAST'25 Fig. 9), and what would do."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from mooncake_lab.chapters.store.fine_grained import fine_grained_reuse
from mooncake_lab.chapters.store.live_set import live_set, reuse_distances
from mooncake_lab.chapters.store.replay import Requests, replay, replay_tokens
from mooncake_lab.core import block_keys
from mooncake_lab.metrics.hits import covered_tokens, token_hit_rate
from mooncake_lab.paper import assumption
from mooncake_lab.store import BlockStore, Stored
from mooncake_lab.store.eviction import Belady, make_policy
from mooncake_lab.workload import Trace, load

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
