"""The assignment about a store that loses machines: each node a confined process, the grader their network."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Final, Self

from mooncake_lab.course.grading.remote import Submission, SubmissionError
from mooncake_lab.course.grading.task import (
    Assignment,
    Board,
    HiddenDraw,
    OpenResult,
    RemoteNode,
    Task,
    require,
    scored,
)
from mooncake_lab.course.store import (
    NODES,
    ClientStep,
    Fates,
    RunOutcome,
    faulty,
    few_keys,
    many_keys,
    puts_and_gets,
    run_schedule,
    shortest,
    usual,
)

_SCHEDULES: Final = 6
"""On a bad network; a single one may miss a mistake."""
_CALM_SCHEDULES: Final = 8
_KEYS: Final = 40
_MANY_KEYS: Final = 120
_CONFIRMED: Final = 0.98
"""Of puts and removals on a bad network, the least share that is confirmed in time."""
_FOUND_AT_LEAST: Final = 0.5
"""Of the blocks on a bad network: a store that finds nothing answers nothing wrong."""
FOUND_AFTER_ONE, FOUND_AFTER_TWO = 0.85, 0.97
MOVED, MOVED_BEST = 1.5, 1.1
"""Blocks between nodes, per put and get."""
_EVERYWHERE: Final = 2.0
"""What is moved if every node gets a copy of every block, and every second block is read."""


@dataclass(slots=True)
class Machines:
    """Processes of one submission, one for each node, as a context manager; mutable because they end."""

    submission: Submission
    """The process of the first node."""
    draw: HiddenDraw
    _others: ExitStack = field(default_factory=ExitStack)
    _of: Mapping[str, Submission] = field(default_factory=dict[str, Submission])

    def __enter__(self) -> Self:
        others = (self._others.enter_context(self.submission.another(len(NODES))) for _ in NODES[1:])
        self._of = dict(zip(NODES, (self.submission, *others), strict=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._others.close()

    def node(self, name: str) -> RemoteNode:
        """A new node in its process."""
        return RemoteNode(self._of[name], self._of[name].make("MyNode", name, list(NODES)))

    def run(self, steps: Sequence[ClientStep], fates: Fates = usual) -> RunOutcome:
        """A run without a wrong answer.

        Raises:
            SubmissionError: when an answer is wrong, with the shortest schedule that was found.
        """
        try:
            outcome = run_schedule(self.node, steps, fates)
            if not outcome.failure:
                return outcome
            schedule, failure = shortest(self.node, steps, outcome, self.draw)
        except (ValueError, TypeError) as error:
            raise SubmissionError(f"the network could not carry a message: {error}") from error
        raise SubmissionError(f"{failure}, in the schedule: {schedule}")


def _share(outcomes: Sequence[RunOutcome], *kinds: str) -> float:
    asked, answered = (
        sum(each.get(kind, 0) for outcome in outcomes for each in (getattr(outcome, name),) for kind in kinds)
        for name in ("asked", "answered")
    )
    return answered / asked if asked else 1.0


def _works(submission: Submission, seed: str) -> str:
    draw = HiddenDraw(seed)
    with Machines(submission, draw) as machines:
        outcomes = [machines.run(few_keys(draw)) for _ in range(_CALM_SCHEDULES)]
        outcomes.append(machines.run(many_keys(draw, _KEYS)))
    confirmed, found = _share(outcomes, "put", "remove"), _share(outcomes, "get")
    require(confirmed == 1, f"without failures {confirmed:.1%} of puts and removals are confirmed")
    require(found == 1, f"without failures {found:.1%} of the blocks are found")
    return "without failures, every node finds every block, and none that was removed"


def _stays_right(stops: int, submission: Submission, seed: str) -> str:
    """No wrong answer on a bad network, by a store that still does something."""
    draw, outcomes = HiddenDraw(seed), list[RunOutcome]()
    with Machines(submission, draw) as machines:
        for _ in range(_SCHEDULES):
            outcomes.append(machines.run(few_keys(draw, stops=stops), faulty(draw)))
    confirmed, found = _share(outcomes, "put", "remove"), _share(outcomes, "get")
    require(
        confirmed >= _CONFIRMED,
        f"{confirmed:.1%} of puts and removals are confirmed in time; at least {_CONFIRMED:.0%} are required",
    )
    require(
        found >= _FOUND_AT_LEAST, f"only {found:.1%} of the blocks are found; a store has to find at least half"
    )
    return (
        f"in {_SCHEDULES} schedules no answer was wrong, and {confirmed:.1%} of puts and removals were confirmed"
    )


def _finds(stops: int, least: float, submission: Submission, seed: str) -> str:
    """Every machine, or every pair of machines, is lost in one run, so that no choice of nodes is lucky."""
    draw = HiddenDraw(seed)
    with Machines(submission, draw) as machines:
        lost = [draw.sample(nodes, stops) for nodes in combinations(NODES, stops)]
        found = _share([machines.run(many_keys(draw, _KEYS, *nodes)) for nodes in lost], "get")
    said = f"after {stops} of {len(NODES)} machines are lost, {found:.1%} of the blocks are found"
    require(found >= least, f"{said}; at least {least:.0%} are required")
    return said


def _moves(most: float, submission: Submission, seed: str) -> OpenResult:
    draw = HiddenDraw(seed)
    with Machines(submission, draw) as machines:
        outcome = machines.run(puts_and_gets(draw, _MANY_KEYS))
    found, moved = outcome.share("get"), outcome.moved_blocks
    require(found == 1, f"only {found:.1%} of the blocks are found without failures")
    said = f"nodes send each other {moved:.2f} blocks per put and get; at most {most:g} are allowed"
    return scored(moved <= most, said, 1 - moved / _EVERYWHERE)


STORE: Final = Assignment(
    "store",
    (
        Task("Without failures, every node finds every block", 1, _works),
        Task("Lost, repeated and late messages cause no wrong answer", 2, partial(_stays_right, 0)),
        Task("Nor do they while a machine is lost", 2, partial(_stays_right, 1)),
        Task("After a machine is lost, its blocks are found", 2, partial(_finds, 1, FOUND_AFTER_ONE)),
        Task("After a second machine is lost, too", 1, partial(_finds, 2, FOUND_AFTER_TWO)),
        Task(f"Nodes send each other at most {MOVED:g} blocks per put and get", 1, partial(_moves, MOVED)),
        Task(
            f"Nodes send each other at most {MOVED_BEST:g} blocks per put and get",
            1,
            partial(_moves, MOVED_BEST),
            board=Board("share of the bytes between nodes that is saved, compared with a copy on every node"),
        ),
    ),
)
