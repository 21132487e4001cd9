"""Clients in virtual time: simpy processes that wait for answers, think, and ask again."""

from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Final, TypeAlias, final

import simpy

from mooncake_lab.core import TracedRequest
from mooncake_lab.simulation.clock import delay_until
from mooncake_lab.simulation.cluster import Cluster
from mooncake_lab.workload.sessions import ClientRules, ClientSession, RequestOutcome

Process: TypeAlias = Generator[simpy.Event, Any, None]
_NO_RULES: Final = ClientRules()


@final
class SimulatedClients:
    """The clients of a cluster, from the moment at which this is made. Mutable: it knows what they have sent.

    Args:
        cluster: that serves them.
        sessions: what they send; ids of turns are unique.
        rules: how they behave.
        concurrency: how many sessions are played at once: the next one begins when one ends. None begins each at
            its recorded time.

    Raises:
        ValueError: when the concurrency is below 1.
    """

    def __init__(
        self,
        cluster: Cluster,
        sessions: Iterable[ClientSession],
        rules: ClientRules = _NO_RULES,
        *,
        concurrency: int | None = None,
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"{concurrency} sessions at once; at least 1 is needed")
        self.sent: list[TracedRequest] = []
        """Each request as it arrived, retries included: the same traffic in an open loop."""
        self.served: dict[int, RequestOutcome] = {}
        """How each turn ended at last, by the id of the turn."""
        self.not_sent = 0
        """Turns that were not sent, because a turn that they wait for was not answered."""
        self._cluster = cluster
        self._env = cluster.env
        self._rules = rules
        self._waiting = deque(sessions)
        self._next_id = 1 + max((turn.request.id for each in self._waiting for turn in each.turns), default=-1)
        if concurrency is None:
            for session in self._waiting:
                self._env.process(self._at_its_time(session))
        else:
            for _ in range(min(concurrency, len(self._waiting))):
                self._env.process(self._one_after_the_other())

    def _at_its_time(self, session: ClientSession) -> Process:
        yield from self._until(session.begins_s)
        yield from self._session(session)

    def _one_after_the_other(self) -> Process:
        while self._waiting:
            yield from self._session(self._waiting.popleft())

    def _session(self, session: ClientSession) -> Process:
        """Play a session from now on, and wait until all its turns have ended."""
        answers, offset_s = dict[int, simpy.Event](), self._env.now - session.begins_s
        for turn in session.turns:
            answers[turn.request.id] = self._env.process(self._turn(turn, answers, offset_s))
        yield from answers.values()

    def _turn(self, turn: TracedRequest, answers: dict[int, simpy.Event], offset_s: float) -> Process:
        """Wait for the answers that the turn needs, think, and send it, again after a refusal for load."""
        request, env, rules = turn.request, self._env, self._rules
        for waits in request.wait_for:
            yield answers[waits]
        if not all(waits in self.served and self.served[waits].is_answered for waits in request.wait_for):
            self.not_sent += 1
            return
        if request.wait_for and request.delay_s is not None:
            yield env.timeout(request.delay_s)
        else:  # at its recorded time, where that is to come
            yield from self._until(request.arrival_s + offset_s)
        served: RequestOutcome = yield self._send(turn)
        for _ in range(rules.retries):
            if served.retry_after_s is None:
                break
            yield env.timeout(served.retry_after_s)
            turn = replace(turn, request=replace(request, id=self._next_id, retry_of=turn.request.id))
            self._next_id += 1
            served = yield self._send(turn)
        self.served[request.id] = served

    def _until(self, at_s: float) -> Process:
        while self._env.now < at_s:
            yield self._env.timeout(delay_until(at_s, self._env.now))

    def _send(self, turn: TracedRequest) -> simpy.Event:
        """Submit a turn; its client leaves when its patience is over."""
        turn = replace(turn, request=replace(turn.request, arrival_s=self._env.now))
        self.sent.append(turn)
        ended, request_id = self._cluster.submit(turn), turn.request.id
        for patience_s, what in (
            (self._rules.first_token_patience_s, "first token"),
            (self._rules.answer_patience_s, "answer"),
        ):
            if patience_s < inf:
                over = self._env.timeout(patience_s)
                over.callbacks.append(partial(self._patience_is_over, request_id, what, patience_s))
        return ended

    def _patience_is_over(self, request_id: int, what: str, patience_s: float, _: simpy.Event) -> None:
        in_flight = self._cluster.coordinator.requests.get(request_id)
        if in_flight is not None and (what == "answer" or not in_flight.shown_now()):
            self._cluster.cancel(request_id, f"the client waited {patience_s:g} s for its {what}")
