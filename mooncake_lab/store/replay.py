"""Replay: a sequence of requests through one cache, without time; what the hit rate would have been."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Protocol, TypeAlias

from mooncake_lab.core import BlockKey, blocks_for
from mooncake_lab.store.eviction import Belady, EvictionPolicy, PolicyFactory, make_policy


class Array(Protocol):
    """An array of whole numbers, such as numpy's, which is taken and not needed."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def tolist(self) -> Any:
        """Its numbers as a list of Python's."""
        ...


Requests: TypeAlias = Sequence[Sequence[BlockKey] | Array]
"""The block keys of each request, front to back."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CacheReplay:
    """What a replay found, request by request; every list has one count per request."""

    accesses_by_request: list[int]
    hits_by_request: list[int]
    """Blocks found in the cache."""
    prefix_hits_by_request: list[int]
    """Blocks found before the first one missing: only these save prefill."""

    @property
    def accesses(self) -> int:
        """Blocks asked for."""
        return sum(self.accesses_by_request)

    @property
    def hits(self) -> int:
        """Blocks found."""
        return sum(self.hits_by_request)

    @property
    def prefix_hits(self) -> int:
        """Blocks found before the first missing one of their request."""
        return sum(self.prefix_hits_by_request)

    @property
    def hit_rate(self) -> float:
        """Hits per access; not a number when nothing was accessed."""
        return self.hits / self.accesses if self.accesses else math.nan

    @property
    def prefix_hit_rate(self) -> float:
        """Prefix hits per access; not a number when nothing was accessed."""
        return self.prefix_hits / self.accesses if self.accesses else math.nan


def replay(requests: Requests, policy: str | PolicyFactory, capacity_blocks: int | None) -> CacheReplay:
    """Replay where every block costs one: each key is one access, front to back, evicting block by block.

    Args:
        requests: the block keys of each request.
        policy: a name in `EVICTION_POLICIES`, or a factory.
        capacity_blocks: `None` is unlimited.
    """
    keys = list(map(_plain, requests))
    return _replay(keys, repeat(repeat(1)), policy, capacity_blocks, capacity_blocks)


def replay_tokens(
    requests: Requests,
    input_tokens: Sequence[int] | Array,
    policy: str | PolicyFactory,
    capacity_tokens: int | None,
    *,
    block_size_tokens: int = 512,
) -> CacheReplay:
    """Replay where a block costs its tokens, so that the last block of a request costs only what it holds.

    Args:
        requests: the block keys of each request.
        input_tokens: the length of each prompt.
        policy: a name in `EVICTION_POLICIES`, or a factory (told the capacity in whole blocks).
        capacity_tokens: `None` is unlimited.
        block_size_tokens: tokens of a full block.

    Raises:
        ValueError: when lengths and blocks disagree, the capacity is negative or the policy unknown.
    """
    keys, lengths = list(map(_plain, requests)), _plain(input_tokens)
    if len(keys) != len(lengths):
        raise ValueError(f"{len(keys)} requests and {len(lengths)} input lengths; one each is needed")
    sizes: list[list[int]] = []
    for number, (request, tokens) in enumerate(zip(keys, lengths, strict=True)):
        if len(request) != blocks_for(tokens, block_size_tokens):
            raise ValueError(
                f"request {number} has {len(request)} blocks for {tokens} tokens;"
                f" blocks of {block_size_tokens} tokens make it {blocks_for(tokens, block_size_tokens)}"
            )
        whole, rest = divmod(tokens, block_size_tokens)
        sizes.append([block_size_tokens] * whole + [rest] * (rest > 0))
    blocks = None if capacity_tokens is None else max(1, capacity_tokens // block_size_tokens)
    return _replay(keys, sizes, policy, capacity_tokens, blocks)


def _plain(numbers: Any) -> Any:
    """A list in place of a numpy array, whose integers take three times as long to look up as Python's."""
    return numbers.tolist() if hasattr(numbers, "tolist") else numbers


def _replay(
    requests: list[Sequence[BlockKey]],
    sizes: Iterable[Iterable[int]],
    policy: str | PolicyFactory,
    capacity: int | None,
    capacity_blocks: int | None,
) -> CacheReplay:
    if capacity is not None and capacity < 0:
        raise ValueError(f"a cache of capacity {capacity}; allowed are 0 and more, and None for unlimited")
    accesses = [len(request) for request in requests]
    chosen = make_policy(policy, max(1, sum(accesses)) if capacity_blocks is None else max(1, capacity_blocks))
    room = float("inf") if capacity is None else capacity
    if isinstance(chosen, Belady):
        chosen.foresee(_that_fit(requests, sizes, room))
    hits, prefix_hits = _run(requests, sizes, chosen, room)
    return CacheReplay(
        accesses_by_request=accesses,
        hits_by_request=hits,
        prefix_hits_by_request=prefix_hits,
    )


def _that_fit(
    requests: list[Sequence[BlockKey]], sizes: Iterable[Iterable[int]], capacity: float
) -> list[BlockKey]:
    """The accesses a policy will hear of: a block larger than the cache is never offered to it."""
    paired = chain.from_iterable(zip(*each, strict=False) for each in zip(requests, sizes, strict=False))
    return [key for key, cost in paired if cost <= capacity]


def _run(
    requests: list[Sequence[BlockKey]], sizes: Iterable[Iterable[int]], policy: EvictionPolicy, capacity: float
) -> tuple[list[int], list[int]]:
    """The inner loop: hits and prefix hits of each request. What `BlockStore` does, without payloads and pins."""
    touch, insert, victim = policy.touch, policy.insert, policy.victim
    held: dict[BlockKey, int] = {}
    free = capacity
    hits: list[int] = []
    prefix_hits: list[int] = []
    for keys, costs in zip(requests, sizes, strict=False):  # the sizes may be endless
        missed, first_miss = 0, len(keys)
        for position, (key, cost) in enumerate(zip(keys, costs, strict=False)):
            if key in held:
                touch(key)
                continue
            first_miss = position if not missed else first_miss
            missed += 1
            if cost > capacity:
                continue  # it can never fit
            while free < cost:
                free += held.pop(victim(key))
            insert(key, position)
            held[key] = cost
            free -= cost
        hits.append(len(keys) - missed)
        prefix_hits.append(first_miss)
    return hits, prefix_hits
