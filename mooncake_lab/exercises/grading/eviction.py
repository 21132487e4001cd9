"""Assignment: an eviction policy that beats LRU on a trace its author has not seen."""

from functools import partial
from typing import Final

from mooncake_lab.core import BlockKey
from mooncake_lab.exercises import eviction as laws
from mooncake_lab.exercises.grading.hidden import HiddenDraw
from mooncake_lab.exercises.grading.proxies import RemoteEviction
from mooncake_lab.exercises.grading.remote import Submission, SubmissionError
from mooncake_lab.exercises.grading.task import Assignment, Task, require
from mooncake_lab.store import replay

_CAPACITY_BLOCKS: Final = 300
_GAP_SHARE: Final = 0.2
_TRACES: Final = 2
"""One alone would decide by chance about a policy that is near a limit."""


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
        raise SubmissionError(f"the store could not work with it: {error}") from error
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
    require(mine > lru, f"on {_TRACES} hidden traces LRU reaches {lru:.4f}; yours reaches {mine:.4f}")
    return f"{mine:.4f} on {_TRACES} hidden traces, where LRU has {lru:.4f}"


def _closes_the_gap(submission: Submission, seed: str) -> str:
    mine, lru, best = _mean_hit_rates(submission, seed, "lru", "belady")
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
            name="It holds what it was given",
            points=1,
            check=partial(
                _laws,
                ("starts empty", "holds what it was given", "knows bytes"),
                "it starts empty and holds exactly the keys it was given, be they numbers or bytes",
            ),
        ),
        Task(
            name="It spares the pinned",
            points=2,
            check=partial(_laws, ("spares the pinned",), "a pinned block is never the victim"),
        ),
        Task(
            name="It serves a store, and replays",
            points=2,
            check=partial(
                _laws,
                ("serves a store", "is deterministic"),
                "no block was lost or counted twice, and the same calls give the same victims",
            ),
        ),
        Task(name="It beats LRU on hidden traces", points=3, check=_beats_lru),
        Task(name="It closes a fifth of the gap to the optimum", points=2, check=_closes_the_gap),
    ),
)
"""Ten points."""
