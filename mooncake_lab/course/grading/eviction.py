"""Assignment: an eviction policy that beats LRU on a trace its author has not seen."""

from functools import partial
from typing import Final

from mooncake_lab.chapters.store.replay import replay
from mooncake_lab.core import BlockKey
from mooncake_lab.course import eviction as laws
from mooncake_lab.course.grading.proxies import RemoteEviction
from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.course.grading.task import Assignment, HiddenDraw, Task, require

_CAPACITY_BLOCKS: Final = 300
_GAP_SHARE: Final = 0.2
_TRACES: Final = 2
"""With a single trace, chance would decide about a policy that is near the limit."""


def _policy(submission: Submission, capacity_blocks: int) -> RemoteEviction:
    return RemoteEviction(submission, submission.make("MyPolicy", capacity_blocks))


def _laws(names: tuple[str, ...], said: str, submission: Submission, seed: str) -> str:
    del seed
    try:
        for name in names:
            laws.EVICTION_LAWS[name](partial(_policy, submission))
    except AssertionError as error:
        raise SubmissionError(str(error)) from error
    except (KeyError, LookupError, ValueError) as error:
        raise SubmissionError(f"the store could not use the policy: {error}") from error
    return said


def _mean_hit_rates(submission: Submission, seed: str, *rivals: str) -> tuple[float, ...]:
    """The submission's hit rate and those of rivals, each the mean over the hidden traces."""
    sums = [0.0] * (1 + len(rivals))
    for trace in range(_TRACES):
        draw = HiddenDraw(seed, trace)
        requests = [list[BlockKey](request) for request in laws.chats_and_documents(draw)]
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
    topic="eviction",
    tasks=(
        Task(
            name="The policy holds the keys that were inserted",
            points=1,
            check=partial(
                _laws,
                ("starts empty", "holds exactly the inserted keys", "accepts bytes as keys"),
                "the policy starts empty and holds only the keys that were inserted, numbers as well as bytes",
            ),
        ),
        Task(
            name="The policy never evicts a pinned block",
            points=2,
            check=partial(_laws, ("never evicts a pinned block",), "no victim was pinned"),
        ),
        Task(
            name="The policy works in a store and is deterministic",
            points=2,
            check=partial(
                _laws,
                ("works behind a store", "is deterministic"),
                "no block was lost or counted twice, and the same calls give the same victims",
            ),
        ),
        Task(name="The policy has a higher hit rate than LRU on hidden traces", points=3, check=_beats_lru),
        Task(
            name="The policy closes a fifth of the gap between LRU and the optimum",
            points=2,
            check=_closes_the_gap,
        ),
    ),
)
