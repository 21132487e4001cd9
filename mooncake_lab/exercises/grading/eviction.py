"""Assignment: an eviction policy that beats LRU on a trace its author has not seen."""

from functools import partial
from typing import Final

from mooncake_lab.core import BlockKey
from mooncake_lab.exercises import eviction as laws
from mooncake_lab.exercises.grading.proxies import RemoteEviction
from mooncake_lab.exercises.grading.remote import Submission, SubmissionError
from mooncake_lab.exercises.grading.task import Assignment, Task, require
from mooncake_lab.store import replay

_CAPACITY_BLOCKS: Final = 300
_GAP_SHARE: Final = 0.2


def _policy(submission: Submission, capacity_blocks: int) -> RemoteEviction:
    return RemoteEviction(submission, submission.make("MyPolicy", capacity_blocks))


def _law(name: str, said: str, submission: Submission, seed: int) -> str:
    del seed
    try:
        laws.EVICTION_LAWS[name](partial(_policy, submission))
    except AssertionError as error:
        raise SubmissionError(str(error)) from error
    except (KeyError, LookupError, ValueError) as error:
        raise SubmissionError(f"the store could not work with it: {error}") from error
    return said


def _workload(seed: int) -> list[list[BlockKey]]:
    return [list[BlockKey](request) for request in laws.chats_and_documents(1000 + seed)]


def _beats_lru(submission: Submission, seed: int) -> str:
    requests = _workload(seed)
    lru = replay(requests, "lru", _CAPACITY_BLOCKS).hit_rate
    mine = replay(requests, partial(_policy, submission), _CAPACITY_BLOCKS).hit_rate
    require(mine > lru, f"on the hidden trace LRU reaches {lru:.4f}; yours reaches {mine:.4f}")
    return f"{mine:.4f} on the hidden trace, where LRU has {lru:.4f}"


def _closes_the_gap(submission: Submission, seed: int) -> str:
    requests = _workload(seed)
    lru = replay(requests, "lru", _CAPACITY_BLOCKS).hit_rate
    best = replay(requests, "belady", _CAPACITY_BLOCKS).hit_rate
    mine = replay(requests, partial(_policy, submission), _CAPACITY_BLOCKS).hit_rate
    share = (mine - lru) / (best - lru)
    require(
        share >= _GAP_SHARE,
        f"you closed {100 * share:.0f} % of the gap between LRU and the optimum; 20 % are asked",
    )
    return f"{100 * share:.0f} % of the gap between LRU and the optimum is closed"


EVICTION: Final = Assignment(
    topic="eviction",
    title="An eviction policy that beats LRU",
    chapter="07_store",
    tasks=(
        Task(
            name="It starts empty", points=1, check=partial(_law, "starts empty", "a fresh policy holds nothing")
        ),
        Task(
            name="It spares the pinned",
            points=2,
            check=partial(_law, "spares the pinned", "a pinned block is never the victim"),
        ),
        Task(
            name="It serves a store",
            points=2,
            check=partial(_law, "serves a store", "no block was lost or counted twice"),
        ),
        Task(name="It beats LRU on a hidden trace", points=3, check=_beats_lru),
        Task(name="It closes a fifth of the gap to the optimum", points=2, check=_closes_the_gap),
    ),
)
"""Ten points."""
