"""Assignment: prefix keys and hit rates."""

from typing import Any, Final

from mooncake_lab.chapters.store.replay import replay
from mooncake_lab.core import blocks_for
from mooncake_lab.course.eviction import shared_prefix_requests
from mooncake_lab.course.grading.remote import Submission
from mooncake_lab.course.grading.task import Assignment, HiddenDraw, Task, require

_BLOCK_TOKENS: Final = 4
_TRIALS: Final = 50


def _keys(submission: Submission, tokens: list[int]) -> list[int | bytes | str]:
    """The keys of a prompt. We ask for them twice, because a key that is drawn at random identifies nothing."""
    keys, again = (submission.call("chain_keys", tokens, _BLOCK_TOKENS, gives=list[Any]) for _ in range(2))
    strange = [key for key in keys if not isinstance(key, int | bytes | str) or isinstance(key, bool)]
    require(not strange, f"a key must be an int, a str or bytes; your function returned {strange[:1]}")
    require(keys == again, "the second call with the same prompt returned different keys")
    return keys


def _one_per_block(submission: Submission, seed: str) -> str:
    draw = HiddenDraw(seed)
    for _ in range(_TRIALS):
        tokens = [draw.randrange(100) for _ in range(draw.randrange(1, 40))]
        found, expected = len(_keys(submission, tokens)), blocks_for(len(tokens), _BLOCK_TOKENS)
        require(
            found == expected,
            f"{len(tokens)} tokens in blocks of {_BLOCK_TOKENS} have {expected} keys, not {found}",
        )
    return "every block has a key, also a partial last block"


def _shared_exactly(submission: Submission, seed: str) -> str:
    draw = HiddenDraw(seed)
    for _ in range(_TRIALS):
        first = [draw.randrange(3) for _ in range(24)]
        second = list(first)
        place = draw.randrange(24)
        second[place] = 3 + draw.randrange(3)
        shared = place // _BLOCK_TOKENS
        ours, theirs = _keys(submission, first), _keys(submission, second)
        require(len(ours) == len(theirs) == 6, f"24 tokens have 6 keys, not {len(ours)}")
        require(
            ours[:shared] == theirs[:shared], "two prompts with equal first blocks got different keys for them"
        )
        equal = [i for i in range(shared, len(ours)) if ours[i] == theirs[i]]
        require(not equal, f"prompts that differ in block {shared} share the key of block {(equal or [0])[0]}")
    return "two prompts share the keys before their first difference, and no later key"


def _depends_on_all(submission: Submission, seed: str) -> str:
    draw = HiddenDraw(seed)
    block = [draw.randrange(100) for _ in range(_BLOCK_TOKENS)]
    keys = _keys(submission, block * 5)
    require(
        len(set(keys)) == 5,
        "five equal blocks in a row must have five different keys, because each key depends on all earlier tokens",
    )
    return "equal blocks at different places have different keys"


def _prefix_only(submission: Submission, seed: str) -> str:
    draw = HiddenDraw(seed)
    for _ in range(_TRIALS):
        keys = list(range(draw.randrange(1, 12)))
        held = [key for key in keys if draw.random() < 0.7] + [99]
        expected = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        found = submission.call("matched_blocks", keys, held, gives=int)
        require(
            found == expected,
            f"of the prompt {keys}, a cache that holds {held} provides {expected} blocks, not {found}",
        )
    return "only blocks before the first missing one count"


def _hit_rates(submission: Submission, seed: str) -> str:
    requests = shared_prefix_requests(HiddenDraw(seed), requests=400)
    for capacity in (50, 200, 1000):
        expected = replay(requests, "lru", capacity).hit_rate
        found = submission.call("lru_hit_rate", requests, capacity, gives=float)
        require(
            abs(found - expected) < 1e-9,
            f"an LRU cache of {capacity} blocks has a hit rate of {expected:.4f} here, not {found:.4f}",
        )
    return "the hit rates of three capacities are right"


KEYS: Final = Assignment(
    topic="keys",
    tasks=(
        Task(name="Each block has one key", points=2, check=_one_per_block, cells=("chain-keys",)),
        Task(
            name="Two prompts share keys up to their first difference, and no later key",
            points=3,
            check=_shared_exactly,
            cells=("chain-keys",),
        ),
        Task(name="A key depends on all earlier tokens", points=1, check=_depends_on_all, cells=("chain-keys",)),
        Task(
            name="A match ends at the first missing block",
            points=2,
            check=_prefix_only,
            cells=("matched-blocks",),
        ),
        Task(
            name="The LRU hit rates of a hidden trace are right",
            points=2,
            check=_hit_rates,
            cells=("lru-hit-rate",),
        ),
    ),
)
