"""Sessions: turns whose clients wait for answers, think or call a tool, and ask again (a closed loop).

A session is data, and clients send its turns: `simulation.SimulatedClients` in virtual time, those of
`serving.LiveCluster.play` in real time. Each turn is a request as a trace has it. `wait_for` names the turns whose
answers its client has before it sends the turn, and `delay_s` is the time between the last of these answers and
the turn. Forks and sub-agents are turns that wait for the same turn, or for several. A trace without sessions is a
set of sessions of one turn.

The prompt of a turn that goes on contains the prompt and the answer of the turn before it. Answers have as many
tokens as in the trace. A client whose turn is not answered ends there: no turn that waits for it is sent.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mooncake_lab.core import Request, TracedRequest, answer_keys, blocks_for, keyed_uniform

BUSY_STAGES = frozenset({"frontdoor", "admission", "decode", "batching"})
"""Stages of a rejection for load, HTTP 429: its client may send the request again."""


@dataclass(frozen=True, slots=True)
class ClientSession:
    """Turns that wait for one another, in order of their recorded arrivals.

    Raises:
        ValueError: when there is no turn, or a turn waits for none that comes before it.
    """

    turns: tuple[TracedRequest, ...]

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("a session of 0 turns; at least one is needed")
        before = set[int]()
        for turn in self.turns:
            for waits in turn.request.wait_for:
                if waits not in before:
                    raise ValueError(f"turn {turn.request.id} waits for {waits}; allowed are turns before it")
            before.add(turn.request.id)

    @property
    def begins_s(self) -> float:
        """When its first turn comes, where sessions begin at their recorded times."""
        return self.turns[0].request.arrival_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRules:
    """How clients behave that are refused or wait for long.

    Raises:
        ValueError: when a number of retries is negative, or a patience is not positive.
    """

    retries: int = 0
    """How often a turn that was refused for load (HTTP 429) is sent again, each time after `Retry-After`."""
    first_token_patience_s: float = math.inf
    """How long a client waits for the first token before it leaves, each time that it sends the turn."""
    answer_patience_s: float = math.inf
    """How long it waits for the whole answer."""

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"ClientRules.retries is {self.retries}; allowed are numbers from 0")
        for name in ("first_token_patience_s", "answer_patience_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"ClientRules.{name} is {getattr(self, name)!r}; a positive time is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """How a request ended for its client."""

    request: Request
    """As it arrived."""
    at_s: float
    output_tokens: int = 0
    """Tokens of the answer; 0 where the request was rejected."""
    stage: str = ""
    """The stage of its rejection; empty where it has its answer."""
    reason: str = ""
    retry_after_s: float | None = None
    """When a client may try again, after a refusal for load."""

    @property
    def is_answered(self) -> bool:
        """Whether the client has the whole answer."""
        return not self.stage


def sessions_of(requests: Iterable[TracedRequest]) -> list[ClientSession]:
    """The sessions of a trace, in order of their first turns.

    A turn waits for what its `wait_for` names, or else for the turn before it in its session. Turns that wait for
    one another belong to one session here, whatever their names. The blocks that an answer fills get the keys of
    `answer_keys`, under which a cluster that keeps answers stores them.
    """
    turns = dict[int, TracedRequest]()
    roots = dict[int, int]()  # a forest of turns: each session is a tree
    last_of = dict[str, int]()

    def root(turn: int) -> int:
        while roots[turn] != turn:
            roots[turn] = roots[roots[turn]]
            turn = roots[turn]
        return turn

    for traced in requests:
        request = traced.request
        waits = tuple(each for each in request.wait_for if each in turns)
        before = None if request.session is None else last_of.get(request.session)
        if not waits and before is not None:
            waits = (before,)
        if request.session is not None:
            last_of[request.session] = request.id
        turn = replace(traced, request=replace(request, wait_for=waits))
        turns[request.id], roots[request.id] = turn, request.id
        for each in (*waits, *(() if before is None else (before,))):
            roots[root(request.id)] = root(each)
    grouped = dict[int, list[TracedRequest]]()
    for turn in turns.values():
        grouped.setdefault(root(turn.request.id), []).append(turn)
    return [ClientSession(_with_answers(group)) for group in grouped.values()]


def _with_answers(turns: Sequence[TracedRequest]) -> tuple[TracedRequest, ...]:
    """The turns, with the keys of answers in the prompts that contain them."""
    recorded = {turn.request.id: turn for turn in turns}
    named = dict[int, TracedRequest]()
    for turn in turns:
        before = goes_on_from(turn, [recorded[each] for each in turn.request.wait_for])
        named[turn.request.id] = turn if before is None else _going_on(turn, named[before.request.id])
    return tuple(named.values())


def goes_on_from(turn: TracedRequest, waited_for: Sequence[TracedRequest]) -> TracedRequest | None:
    """The turn whose prompt and answer this one's prompt begins with; None where its context is its own."""
    request = turn.request
    for before in waited_for:
        whole = before.request.input_tokens // request.block_size_tokens
        is_longer = before.request.input_tokens + before.output_tokens <= request.input_tokens
        if is_longer and before.request.block_keys[:whole] == request.block_keys[:whole]:
            return before
    return None


def _going_on(turn: TracedRequest, before: TracedRequest) -> TracedRequest:
    """The turn with the keys of the turn before it, and of that turn's answer, in its prompt."""
    request, size = turn.request, turn.request.block_size_tokens
    given = answer_keys(before.request.block_keys, before.request.input_tokens, before.output_tokens, size)
    whole = (before.request.input_tokens + before.output_tokens) // size
    return replace(turn, request=replace(request, block_keys=(*given[:whole], *request.block_keys[whole:])))


def chat_sessions(
    sessions: int,
    turns: int,
    *,
    first_tokens: int = 1000,
    new_tokens: int = 200,
    answer_tokens: int = 150,
    mean_think_s: float = 20.0,
    sessions_per_s: float = 1.0,
    block_size_tokens: int = 512,
    seed: int = 0,
) -> list[ClientSession]:
    """Chats of equal lengths: sessions begin at random moments, and clients think for random times (both Poisson).

    Args:
        sessions: how many there are.
        turns: of each.
        first_tokens: of the first prompt.
        new_tokens: that each later turn adds to prompt and answer.
        answer_tokens: of each answer.
        mean_think_s: between an answer and the next turn.
        sessions_per_s: that begin.
        block_size_tokens: tokens per block.
        seed: of all times.
    """
    made, begins_s, recorded = list[TracedRequest](), 0.0, first_tokens
    for session in range(sessions):
        begins_s += -math.log1p(-keyed_uniform(seed, "begin", session)) / sessions_per_s
        recorded = first_tokens
        for turn in range(turns):
            think_s = -math.log1p(-keyed_uniform(seed, "think", session, turn)) * mean_think_s
            blocks = blocks_for(recorded, block_size_tokens)
            ends = [*(block_size_tokens * (k + 1) for k in range(blocks - 1)), recorded]
            request = Request(
                id=session * turns + turn,
                arrival_s=begins_s,
                input_tokens=recorded,
                block_keys=tuple((session << 32) + end for end in ends),
                block_size_tokens=block_size_tokens,
                session=str(session),
                delay_s=think_s if turn else None,
            )
            made.append(TracedRequest(request, answer_tokens))
            recorded += answer_tokens + new_tokens
    return sessions_of(made)
