"""Assignments about the cache: prefix keys and hit rates; an eviction policy that beats LRU on hidden traces."""

from functools import partial
from typing import Any, Final

from mooncake_lab.core import BlockKey, blocks_for
from mooncake_lab.course.eviction import EVICTION_LAWS, chats_and_documents, shared_prefix_requests
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.course.grading.task import Assignment, Check, HiddenDraw, RemoteEviction, Task, require
from mooncake_lab.store.replay import replay

_BLOCK_TOKENS: Final = 4
_TRIALS: Final = 50
_CAPACITY_BLOCKS: Final = 300
_GAP_SHARE: Final = 0.2
_TRACES: Final = 2
"""With a single trace, chance would decide about a policy that is near the limit."""


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
        both = f"{first} and {second}, in blocks of {_BLOCK_TOKENS}"
        require(ours[:shared] == theirs[:shared], f"equal first blocks of two prompts have different keys: {both}")
        equal = [i for i in range(shared, len(ours)) if ours[i] == theirs[i]]
        require(
            not equal,
            f"prompts that differ in block {shared} share the key of block {(equal or [0])[0]}: {both}",
        )
    return "two prompts share the keys before their first difference, and no later key"


def _depends_on_all(submission: Submission, seed: str) -> str:
    draw = HiddenDraw(seed)
    block = [draw.randrange(100) for _ in range(_BLOCK_TOKENS)]
    keys = _keys(submission, block * 5)
    require(
        len(set(keys)) == 5,
        f"the block {block}, five times in a row, must have five different keys, because each key depends on all"
        f" earlier tokens; your function returned {len(set(keys))} different ones",
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
    draw = HiddenDraw(seed, "short")
    for _ in range(_TRIALS):  # traces that a remark can show come first
        short = [[draw.randrange(6) for _ in range(draw.randrange(1, 5))] for _ in range(draw.randrange(1, 7))]
        capacity = draw.randrange(1, 5)
        _same_hit_rate(submission, short, capacity, f"for the requests {short}")
    requests = shared_prefix_requests(HiddenDraw(seed), requests=400)
    for capacity in (50, 200, 1000):
        _same_hit_rate(submission, requests, capacity, "on a hidden trace of 400 requests")
    return "the hit rates of short traces and of three capacities are right"


def _same_hit_rate(submission: Submission, requests: list[list[int]], capacity: int, where: str) -> None:
    expected = replay(requests, "lru", capacity).hit_rate
    found = submission.call("lru_hit_rate", requests, capacity, gives=float)
    require(
        abs(found - expected) < 1e-9,
        f"an LRU cache of {capacity} blocks has a hit rate of {expected:.4f} {where}, not {found:.4f}",
    )


KEYS: Final = Assignment(
    "keys",
    (
        Task("Each block has one key", 2, _one_per_block, ("chain-keys",)),
        Task(
            "Two prompts share keys up to their first difference, and no later key",
            3,
            _shared_exactly,
            ("chain-keys",),
        ),
        Task("A key depends on all earlier tokens", 1, _depends_on_all, ("chain-keys",)),
        Task("A match ends at the first missing block", 2, _prefix_only, ("matched-blocks",)),
        Task("The LRU hit rates of a hidden trace are right", 2, _hit_rates, ("lru-hit-rate",)),
    ),
)


def _policy(submission: Submission, capacity_blocks: int) -> RemoteEviction:
    return RemoteEviction(submission, submission.make("MyPolicy", capacity_blocks))


def _laws(said: str, *names: str) -> Check:
    """A check of some laws; what it says where they hold."""

    def check(submission: Submission, _seed: str) -> str:
        try:
            for name in names:
                EVICTION_LAWS[name](partial(_policy, submission))
        except AssertionError as error:
            raise SubmissionError(str(error)) from error
        except (LookupError, ValueError) as error:
            raise SubmissionError(f"the store could not use the policy: {error}") from error
        return said

    return check


def _mean_hit_rates(submission: Submission, seed: str, *rivals: str) -> tuple[float, ...]:
    """The submission's hit rate and those of rivals, each the mean over the hidden traces."""
    sums = [0.0] * (1 + len(rivals))
    for trace in range(_TRACES):
        draw = HiddenDraw(seed, trace)
        requests = [list[BlockKey](request) for request in chats_and_documents(draw)]
        for place, policy in enumerate((partial(_policy, submission), *rivals)):
            sums[place] += replay(requests, policy, _CAPACITY_BLOCKS).hit_rate / _TRACES
    return tuple(sums)


def _beats_lru(submission: Submission, seed: str) -> str:
    mine, lru = _mean_hit_rates(submission, seed, "lru")
    require(mine > lru, f"mean hit rate over {_TRACES} hidden traces: LRU {lru:.4f}, your policy {mine:.4f}")
    return f"mean hit rate over {_TRACES} hidden traces: your policy {mine:.4f}, LRU {lru:.4f}"


def _closes_the_gap(submission: Submission, seed: str) -> str:
    mine, lru, best = _mean_hit_rates(submission, seed, "lru", "belady")
    share = (mine - lru) / (best - lru)
    require(
        share >= _GAP_SHARE,
        f"your policy closes {100 * share:.0f} % of the gap between LRU and the optimum; 20 % are required",
    )
    return f"your policy closes {100 * share:.0f} % of the gap between LRU and the optimum"


EVICTION: Final = Assignment(
    "eviction",
    (
        Task(
            "The policy holds the keys that were inserted",
            1,
            _laws(
                "the policy starts empty and holds only the keys that were inserted, numbers as well as bytes",
                "starts empty",
                "holds exactly the inserted keys",
                "accepts bytes as keys",
            ),
        ),
        Task(
            "The policy never evicts a pinned block",
            2,
            _laws("no victim was pinned", "never evicts a pinned block"),
        ),
        Task(
            "The policy works in a store and is deterministic",
            2,
            _laws(
                "no block was lost or counted twice, and the same calls give the same victims",
                "works behind a store",
                "is deterministic",
            ),
        ),
        Task("The policy has a higher hit rate than LRU on hidden traces", 3, _beats_lru),
        Task("The policy closes a fifth of the gap between LRU and the optimum", 2, _closes_the_gap),
    ),
)
