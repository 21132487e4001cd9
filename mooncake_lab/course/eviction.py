"""Checks the contract of an eviction policy, ours or a student's."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Final

from mooncake_lab.core import BlockKey
from mooncake_lab.course import PolicyFindings, contract, examine, require
from mooncake_lab.store import (
    BlockStore,
    EvictionPolicy,
    NothingToEvictError,
    PolicyFactory,
    Refused,
)
from mooncake_lab.store.eviction import Belady
from mooncake_lab.store.replay import Requests, replay

_CAPACITY_BLOCKS = 8
_LARGER_CAPACITY_BLOCKS = 100
_WORKLOAD_CAPACITY_BLOCKS = 300
_SESSIONS = 120
"""Conversations at any time."""


def shared_prefix_requests(seed: int | random.Random = 0, *, requests: int = 1500) -> list[list[int]]:
    """A small workload: conversations that grow by a turn each time, some far more popular than others.

    The seed may be the draws themselves.
    """
    draw = _draws(seed)
    histories: list[list[int]] = [[0] for _ in range(_SESSIONS)]
    next_id = 1
    found: list[list[int]] = []
    for _ in range(requests):
        session = min(int(draw.paretovariate(0.6)) - 1, _SESSIONS - 1)
        turn = range(next_id, next_id + draw.randint(1, 3))
        next_id = turn.stop
        histories[session] = [*histories[session], *turn]
        found.append(histories[session])
        if len(histories[session]) > 24:
            histories[session] = [0]  # the user starts a new chat
    return found


def chats_and_documents(seed: int | random.Random = 0) -> list[list[int]]:
    """900 requests of conversations, and between them long documents that no later request contains.

    LRU does badly on these requests. The keys are drawn at random, so that a key does not tell what its block is
    of; otherwise a policy could evict documents by their keys.
    """
    draw = _draws(seed)
    fresh = count(1_000_000)
    found: list[list[int]] = []
    for chat in shared_prefix_requests(seed, requests=900):
        found.append(chat)
        if draw.random() < 0.5:
            found.append([0, *islice(fresh, draw.randint(8, 40))])
    keys = dict[int, int]()
    drawn = draw.sample(range(10**9), len(set(chain.from_iterable(found))))
    for key in chain.from_iterable(found):
        keys.setdefault(key, drawn[len(keys)])
    return [[keys[key] for key in request] for request in found]


def starts_empty(factory: PolicyFactory) -> None:
    """A fresh policy holds nothing, and has no victim."""
    policy = factory(_CAPACITY_BLOCKS)
    require(len(policy) == 0, f"`len` of a new policy is {len(policy)} instead of 0")
    require(0 not in policy, "`0 in policy` is true for a new policy")
    _refuses(policy, frozenset())


def holds_exactly_the_inserted_keys(factory: PolicyFactory) -> None:
    """It holds exactly the keys inserted and not since evicted or removed; each victim is one of them."""
    _drive(factory, _accesses(1), removals=True)


def accepts_bytes_as_keys(factory: PolicyFactory) -> None:
    """Keys may be hashes (bytes) as well as numbers."""
    _drive(factory, [b"block %d" % key for key in _accesses(2)], removals=False)


def never_evicts_a_pinned_block(factory: PolicyFactory) -> None:
    """A spared key is never the victim, and if all keys are spared the policy raises NothingToEvictError."""
    accesses = list(range(_CAPACITY_BLOCKS))
    for kept in accesses:
        policy = _told(factory, accesses)
        for key in accesses:
            policy.insert(key, key)
        _refuses(policy, frozenset(accesses))
        victim = policy.victim(None, frozenset(accesses) - {kept})
        require(victim == kept, f"only key {kept} was not spared, but the victim was {victim!r}")


def is_deterministic(factory: PolicyFactory) -> None:
    """The same calls give the same victims."""
    first, second = (_drive(factory, _accesses(3), removals=True) for _ in range(2))
    require(first == second, "two new policies got the same calls but chose different victims")


def works_behind_a_store(factory: PolicyFactory) -> None:
    """Behind a store with pins, removals and blocks of different sizes, no block is lost or counted twice."""
    accesses = _accesses(4)
    store: BlockStore[None] = BlockStore(4 * _CAPACITY_BLOCKS, _told(factory, accesses))
    draw = random.Random(4)  # noqa: S311  # a workload, not a secret
    pinned: list[BlockKey] = []
    for key in accesses:
        outcome = store.put(key, None, size_bytes=1 + key % 4, position=key % 5)
        require(not isinstance(outcome, Refused), f"the store had room but refused a block: {outcome}")
        store.check()
        if draw.random() < 0.3:
            store.pin(key)
            pinned.append(key)
        if len(pinned) > _CAPACITY_BLOCKS // 2:
            store.unpin(pinned.pop(0))
        if key not in pinned and draw.random() < 0.2:
            store.remove(key)
        store.check()


def agrees_with_its_store_over_a_workload(factory: PolicyFactory) -> None:
    """Over thousands of accesses of conversations the policy holds the same keys as its store."""
    requests = shared_prefix_requests(6, requests=400)
    accesses = list(chain.from_iterable(requests))
    store: BlockStore[None] = BlockStore(
        _LARGER_CAPACITY_BLOCKS, _told(factory, accesses, _LARGER_CAPACITY_BLOCKS)
    )
    for request in requests:
        for position, key in enumerate(request):
            store.put(key, None, size_bytes=1, position=position)
        store.check()


EVICTION_LAWS: Final = contract(
    starts_empty,
    holds_exactly_the_inserted_keys,
    accepts_bytes_as_keys,
    never_evicts_a_pinned_block,
    is_deterministic,
    works_behind_a_store,
    agrees_with_its_store_over_a_workload,
)
"""The contract of `EvictionPolicy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport(PolicyFindings):
    """What `check_policy` found."""

    hit_rate: float | None
    """On the workload; `None` when the policy could not be replayed."""
    lru_hit_rate: float
    belady_hit_rate: float

    def __str__(self) -> str:
        ours = "none" if self.hit_rate is None else f"{self.hit_rate:.3f}"
        return self.told(
            EVICTION_LAWS,
            f"block hit rate {ours}; LRU has {self.lru_hit_rate:.3f}, the optimum {self.belady_hit_rate:.3f}",
        )


def check_policy(
    factory: PolicyFactory, requests: Requests | None = None, capacity_blocks: int = _WORKLOAD_CAPACITY_BLOCKS
) -> PolicyReport:
    """Run a policy through the contract, and compare its hit rate on a workload with LRU and the optimum.

    Args:
        factory: makes a fresh policy for a number of blocks, e.g. `lambda capacity_blocks: MyPolicy()`.
        requests: block keys of each request; `None` takes `shared_prefix_requests()`.
        capacity_blocks: the size of the cache on that workload.
    """
    workload = shared_prefix_requests() if requests is None else requests

    def hit_rate(policy: PolicyFactory | str) -> float:
        return replay(workload, policy, capacity_blocks).hit_rate

    broken, ours = examine(EVICTION_LAWS, factory, lambda: hit_rate(factory), "works behind a store")
    return PolicyReport(
        broken=broken, hit_rate=ours, lru_hit_rate=hit_rate("lru"), belady_hit_rate=hit_rate("belady")
    )


def _draws(seed: int | random.Random) -> random.Random:
    return seed if isinstance(seed, random.Random) else random.Random(seed)  # noqa: S311  # a workload


def _accesses(seed: int) -> list[int]:
    draw = random.Random(seed)  # noqa: S311  # a workload, not a secret
    return [int(draw.paretovariate(0.7)) % 40 for _ in range(400)]


def _told(
    factory: PolicyFactory, accesses: Sequence[BlockKey], capacity_blocks: int = _CAPACITY_BLOCKS
) -> EvictionPolicy:
    policy = factory(capacity_blocks)
    if isinstance(policy, Belady):
        policy.foresee(accesses)
    return policy


def _refuses(policy: EvictionPolicy, spared: frozenset[BlockKey]) -> None:
    try:
        victim = policy.victim(None, spared)
    except NothingToEvictError:
        return
    raise AssertionError(
        f"no block could be evicted, but the victim was {victim!r} instead of a NothingToEvictError"
    )


def _drive(factory: PolicyFactory, accesses: Sequence[BlockKey], *, removals: bool) -> list[BlockKey]:
    """Run a policy, compare it with a plain set of keys after each access, and return its victims."""
    policy = _told(factory, accesses)
    held: set[BlockKey] = set()
    victims: list[BlockKey] = []
    for step, key in enumerate(accesses):
        if key in held:
            policy.touch(key)
        else:
            if len(held) == _CAPACITY_BLOCKS:
                victim = policy.victim(key)
                require(victim in held, f"the victim {victim!r} was not held")
                held.remove(victim)
                victims.append(victim)
            policy.insert(key, step % 5)
            held.add(key)
        if removals and step % 11 == 0:
            policy.remove(key)
            held.remove(key)
        require(
            len(policy) == len(held), f"`len` of the policy is {len(policy)}, but it should hold {len(held)} keys"
        )
        wrong = [known for known in set(accesses) if (known in policy) != (known in held)]
        require(not wrong, f"`key in policy` gives the wrong answer for the keys {wrong[:3]}")
    return victims
