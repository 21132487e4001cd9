"""Assignments about the cache: prefix keys and hit rates; an eviction policy that beats LRU on hidden traces."""

from functools import partial
from typing import Any, Final

from mooncake_lab.core import BlockKey, blocks_for
from mooncake_lab.course.eviction import EVICTION_LAWS, chats_and_documents, shared_prefix_requests
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.course.grading.task import (
    Assignment,
    Board,
    Check,
    HiddenDraw,
    OpenResult,
    RemoteEviction,
    Task,
    require,
    scored,
)
from mooncake_lab.store.replay import replay

_TRIALS: Final = 50
_SHORT_PROMPTS: Final = 80
_SHORT_PROMPT_BLOCKS: Final = 50
"""Eighty prompts of fifty blocks have 4,000 keys: with keys of 16 bits, dozens of them are equal by chance."""
_BASES: Final = (31, 33, 37, 131, 256, 257, 1000, 65_599)
"""Of weak hash functions."""
_CAPACITY_BLOCKS: Final = 300
_GAP_SHARE: Final = 0.2
_TRACES: Final = 2
"""With a single trace, chance would decide about a policy that is near the limit."""


def _keys(submission: Submission, tokens: list[int], block_tokens: int) -> list[int | bytes | str]:
    """The keys of a prompt. We ask for them twice, because a key that is drawn at random identifies nothing."""
    keys, again = (submission.call("chain_keys", tokens, block_tokens, gives=list[Any]) for _ in range(2))
    strange = [key for key in keys if not isinstance(key, int | bytes | str) or isinstance(key, bool)]
    require(not strange, f"a key must be an int, a str or bytes; your function returned {strange[:1]}")
    require(keys == again, "the second call with the same prompt returned different keys")
    return keys


def _one_per_block(submission: Submission, seed: str) -> str:
    """Each block has a key, and the key of the first block names its tokens, their order and their number."""
    draw = HiddenDraw(seed)
    for number in range(_TRIALS):
        size = 2 + number % 6
        tokens = [draw.randrange(100) for _ in range(draw.randrange(1, 40))]
        found, expected = len(_keys(submission, tokens, size)), blocks_for(len(tokens), size)
        require(found == expected, f"{len(tokens)} tokens in blocks of {size} have {expected} keys, not {found}")
        block = draw.sample(range(1, 100), size)
        other, kind = (
            ([token + 100 for token in block], "other tokens"),
            (block[::-1], "the same tokens in another order"),
            (block[:-1], "one token less"),
            ([*block, 0], "one token more"),
        )[number % 4]
        ours, theirs = (_keys(submission, each, size + 1) for each in (block, other))
        require(ours != theirs, f"the blocks {block} and {other} have the same key; the second has {kind}")
    return "every block has a key, also a partial last block, and different blocks have different keys"


def _shared_exactly(submission: Submission, seed: str) -> str:
    draw = HiddenDraw(seed)
    for number in range(_TRIALS):
        size = 2 + number % 3
        first = [draw.randrange(3, 6) for _ in range(6 * size)]
        second = _change(first, size, number, draw)
        shared = next(i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]) // size
        ours, theirs = (_keys(submission, each, size) for each in (first, second))
        require(
            len(ours) == len(theirs) == 6, f"{6 * size} tokens in blocks of {size} have 6 keys, not {len(ours)}"
        )
        both = f"{first} and {second}, in blocks of {size}"
        require(ours[:shared] == theirs[:shared], f"equal first blocks of two prompts have different keys: {both}")
        equal = [i for i in range(shared, len(ours)) if ours[i] == theirs[i]]
        require(
            not equal,
            f"prompts that differ in block {shared} share the key of block {(equal or [0])[0]}: {both}",
        )
    blocks = [[draw.randrange(10**6) for _ in range(_SHORT_PROMPT_BLOCKS)] for _ in range(_SHORT_PROMPTS)]
    keys = [key for prompt in blocks for key in _keys(submission, prompt, 1)]
    lost = len(keys) - len(set(keys))
    require(
        not lost, f"{len(keys):,} different prefixes share {lost} keys by chance; use keys of at least 64 bits"
    )
    return "two prompts share the keys before their first difference, and no later key"


def _change(first: list[int], size: int, number: int, draw: HiddenDraw) -> list[int]:
    """Make another prompt of a prompt of tokens from 3 to 5; the kinds of differences take turns on every seed."""
    second, place = list(first), draw.randrange(len(first) - 1)
    block = draw.randrange(5) * size
    match number % 6:
        case 0:  # one token
            second[place] += 3
        case 1:  # two tokens, with the same sum
            second[place] += 3
            second[place + 1] -= 3
        case 2:  # the same tokens of a block in another order
            first[block : block + 2], second[block : block + 2] = (9, 8), (8, 9)
        case 3:  # two blocks in another order
            first[block] = 9
            here, there = first[block : block + size], first[block + size : block + 2 * size]
            second[block : block + 2 * size] = [*there, *here]
        case 4:  # two tokens that a polynomial of a small base takes for the same
            first[place + 1] += _BASES[number // 6 % len(_BASES)]
            second[place] += 1
        case _:  # the last token alone
            second[-1] += 3
    return second


def _depends_on_all(submission: Submission, seed: str) -> str:
    """Equal blocks after equal tokens in another order, and at different places, have different keys."""
    draw = HiddenDraw(seed)
    block = draw.sample(range(100), 4)
    keys = _keys(submission, block * 5, 4)
    require(
        len(set(keys)) == 5,
        f"the block {block}, five times in a row, must have five different keys, because each key depends on all"
        f" earlier tokens; your function returned {len(set(keys))} different ones",
    )
    last = [draw.randrange(100) for _ in range(4)]
    other, third = draw.sample(range(100, 200), 4), draw.sample(range(200, 300), 4)
    for earlier in ([*other, *block, *third], [*block[::-1], *other, *third], [*third, *other, *block]):
        ours, theirs = (
            _keys(submission, [*before, *last], 4)[-1:] for before in ([*block, *other, *third], earlier)
        )
        require(
            ours != theirs,
            f"the block {last} has the same key after {[*block, *other, *third]} and after {earlier}; a key"
            " depends on all earlier tokens and on their order",
        )
    return "a key depends on all earlier tokens and on their order"


def _prefix_only(submission: Submission, seed: str) -> str:
    draw = HiddenDraw(seed)
    for number in range(_TRIALS):
        keys = draw.sample(range(1000), draw.randrange(0 if number < 5 else 2, 12))
        match number % 4:
            case 0:
                held = list(keys)
            case 1:  # only the first is missing
                held = keys[1:]
            case _:
                held = [key for key in keys if draw.random() < 0.7]
        held = draw.sample([*held, *range(1000, 1003)], len(held) + 3)  # in no order, among other keys
        expected = next((i for i, key in enumerate(keys) if key not in held), len(keys))
        found = submission.call("matched_blocks", keys, held, gives=int)
        require(
            found == expected,
            f"of the prompt {keys}, a cache that holds {held} provides {expected} blocks, not {found}",
        )
    return "only blocks before the first missing one count, in whatever order a cache lists what it holds"


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
        Task("Each block has one key, which names its tokens", 2, _one_per_block, ("chain-keys",)),
        Task(
            "Two prompts share keys up to their first difference, and no later key",
            3,
            _shared_exactly,
            ("chain-keys",),
        ),
        Task("A key depends on all earlier tokens and their order", 1, _depends_on_all, ("chain-keys",)),
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


def _closes_the_gap(submission: Submission, seed: str) -> OpenResult:
    mine, lru, best = _mean_hit_rates(submission, seed, "lru", "belady")
    share = (mine - lru) / (best - lru)
    said = f"your policy closes {100 * share:.0f} % of the gap between LRU and the optimum"
    return scored(share >= _GAP_SHARE, f"{said}; {100 * _GAP_SHARE:.0f} % are required", share)


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
        Task(
            "The policy closes a fifth of the gap between LRU and the optimum",
            2,
            _closes_the_gap,
            board=Board("share of the gap in hit rate between LRU and the optimum (Belady)", optimum=1.0),
        ),
    ),
)
