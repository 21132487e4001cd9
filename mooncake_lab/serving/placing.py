"""Placing: ask the Conductor where a request goes, tell the workers, and ask again when an attempt fails."""

import contextlib
import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, final

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.conductor import (
    AdmitAll,
    ClusterView,
    Decision,
    Estimator,
    Placement,
    Rejection,
    ServedView,
    decide,
)
from mooncake_lab.core import Request, block_keys
from mooncake_lab.serving.books import Books
from mooncake_lab.serving.budget import Budget
from mooncake_lab.serving.journal import Journal
from mooncake_lab.serving.messages import Cancel, Compute, Expect, Job, Ping, Ready
from mooncake_lab.serving.spec import LiveSpec
from mooncake_lab.serving.ticket import End, FailedError, RejectedError, Ticket

if TYPE_CHECKING:
    from mooncake_lab.serving.supervisor import Link

_LOG: Final = logging.getLogger(__name__)
_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision and what it rests on: `conductor.decide` gives it again."""

    request: Request
    view: ClusterView
    decision: Decision
    is_first: bool
    """Whether admission was asked: a request that was accepted once is accepted."""


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A request that waits to know who lives."""

    ticket: Ticket
    why: str
    suspects: set[str]


@final
class Placer:
    """The requests under way, and where they are. Mutable; all methods belong to one event loop.

    Args:
        spec: of the cluster.
        journal: where it writes down what happens.
        decided: told of each decision.
    """

    def __init__(self, spec: LiveSpec, journal: Journal, decided: Callable[[Decided], None]) -> None:
        self.journal = journal
        self.books = Books()
        self.links: dict[str, Link] = {}
        self.estimate: Estimator | None = None
        self.ready: Ready | None = None
        self.tickets: dict[int, Ticket] = {}
        self.budget = Budget(spec, self.tickets, self.books)
        self._spec = spec
        self._decided = decided
        self._stranded: list[Ticket] = []
        self._doubts: dict[int, _Doubt] = {}
        self._pings = itertools.count(-1, -1)  # the supervisor's own count up
        self._ended: OrderedDict[int, Ticket] = OrderedDict()

    def current(self, job: Job) -> Ticket | None:
        """The request of an attempt, unless it has ended or is tried anew."""
        ticket = self.tickets.get(job.ticket)
        is_current = ticket is not None and ticket.placement is not None and ticket.attempt == job.attempt
        return ticket if is_current else None

    def ended(self, job: Job) -> Ticket | None:
        """The request that ended with this attempt lately: late news of it still belong into the log."""
        ticket = self._ended.get(job.ticket)
        return ticket if ticket is not None and ticket.attempt == job.attempt else None

    def place_stranded(self, why: str) -> None:
        """Place whoever waited for a worker, if now there is one."""
        if self.books.can_serve and self.estimate is not None:
            stranded, self._stranded = self._stranded, []
            for ticket in stranded:
                if ticket.end is None:
                    self.place(ticket, why)

    def place(self, ticket: Ticket, why: str = "") -> None:
        """Ask the Conductor about a request now, and act; a request that fails on the way ends, and no other."""
        with self.ending(ticket):
            self._place(ticket, why)

    @contextlib.contextmanager
    def ending(self, ticket: Ticket) -> Generator[None]:
        """What goes wrong inside ends this request, with an error for its client, and nothing else."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it is, other requests go on
            _LOG.exception("request %d cannot be served", ticket.request.id)
            self.give_up(ticket, f"the request cannot be served: {error!r}")

    def _place(self, ticket: Ticket, why: str) -> None:
        if not self.books.can_serve or self.estimate is None:
            self._stranded.append(ticket)
            return
        now_s, is_first = time.monotonic(), ticket.attempt == 0
        view = self.books.view(ticket.request, now_s, self.journal.zero_s, self.journal.history)
        try:
            decision = decide(
                ticket.request,
                view,
                placement=self._spec.places,
                admission=self._spec.admission if is_first else AdmitAll(),
                estimate=self.estimate,
                slo=self._spec.slo,
            )
        except Exception as error:  # noqa: BLE001  # a policy of the user's own fails its request, not the cluster
            self.give_up(ticket, f"the placement or admission policy failed: {error!r}")
            return
        strange = _unknown(decision, self.links)
        if strange:
            self.give_up(ticket, f"the placement policy names worker {strange[0]!r}, which does not live")
            return
        self._decided(Decided(ticket.request, view, decision, is_first))
        if isinstance(decision, Rejection):
            self.reject(ticket, decision, why)
            return
        self.journal.placed(ticket, decision, now_s, why)
        ticket.attempt += 1
        ticket.placement = decision
        ticket.shown_in_attempt = 0
        ticket.has_joined = ticket.is_prefill_logged = False
        self._send(ticket, decision, self.estimate)

    def _send(self, ticket: Ticket, placement: Placement, estimate: Estimator) -> None:
        job, request = ticket.job, ticket.request
        known = ticket.known_tokens()
        asked = msgspec.structs.replace(
            ticket.asked,
            prompt=known.astype("<i4").tobytes(),
            max_new_tokens=ticket.asked.max_new_tokens - len(ticket.tokens),
            min_new_tokens=max(0, ticket.asked.min_new_tokens - len(ticket.tokens)),
        )
        believed_s = estimate.prefill_s(request.id, request.input_tokens, placement.reused_tokens)
        prefill, decode = self.books.accounts[placement.prefill], self.books.accounts[placement.decode]
        prefill.add_prompt(job, believed_s)
        starts_s = time.monotonic() - self.journal.zero_s + placement.expected_ttft_s
        decode.expect(job, len(known), ServedView(request.id, request.input_tokens, starts_s))
        if prefill is decode:
            self.links[placement.prefill].send(Compute(job=job, asked=asked))
            return
        source = placement.fetch_from
        if source is not None:
            self.books.accounts[source].sending.add(job)
        size = self._spec.block_size_tokens
        self.links[placement.decode].send(Expect(job=job, asked=asked))
        self.links[placement.prefill].send(
            Compute(
                job=job,
                asked=asked,
                deliver_to=self.links[placement.decode].ready.port,
                fetch_from=None if source is None else self.links[source].ready.port,
                fetch_blocks=-(-placement.reused_tokens // size) if source is not None else 0,
            )
        )

    def place_again(self, ticket: Ticket, why: str, reason: str, *, suspects: Collection[str] = ()) -> None:
        """An attempt came to nothing: its prompt and the tokens shown are prefilled anew, elsewhere or later.

        Args:
            ticket: whose attempt it was.
            why: for the log.
            reason: what went wrong.
            suspects: workers that may be dying. Nothing is placed until each has answered a ping or is known to be
                dead: a dead worker's peers notice before its parent does, and would fail every attempt till then.
        """
        with self.ending(ticket):
            self._place_again(ticket, why, reason, suspects)

    def _place_again(self, ticket: Ticket, why: str, reason: str, suspects: Collection[str]) -> None:
        self.withdraw(ticket)
        assert self.ready is not None  # noqa: S101  # whoever was placed was placed on a worker
        reason_to_end = ticket.complete_by(self.ready.end_tokens)
        if reason_to_end is not None:
            self.complete(ticket, time.monotonic(), reason_to_end)
            return
        if ticket.attempt >= self._spec.most_attempts:
            self.give_up(ticket, f"{ticket.attempt} attempts came to nothing, the last because {reason}")
            return
        if len(ticket.tokens) > ticket.in_prompt:
            known = ticket.known_tokens()
            ticket.in_prompt = len(ticket.tokens)
            ticket.request = replace(ticket.request, input_tokens=len(known), block_keys=self.keys(known))
        doubt = _Doubt(ticket, why, {name for name in suspects if name in self.links})
        if doubt.suspects:
            number = next(self._pings)
            self._doubts[number] = doubt
            for name in doubt.suspects:
                self.links[name].send(Ping(number))
        else:
            self._place(ticket, why)

    def answered(self, name: str, number: int) -> None:
        """A worker answered a ping: it lives."""
        if number in self._doubts:
            self._clear(number, name)

    def lost(self, name: str) -> None:
        """A worker is dead: nobody waits for its answer."""
        for number in list(self._doubts):
            self._clear(number, name)

    def _clear(self, number: int, name: str) -> None:
        doubt = self._doubts[number]
        doubt.suspects.discard(name)
        if not doubt.suspects:
            del self._doubts[number]
            if doubt.ticket.end is None:
                self.place(doubt.ticket, doubt.why)

    def complete(self, ticket: Ticket, at_s: float, reason: str) -> None:
        """A request has all its tokens."""
        try:
            self._leave_books(ticket)
            self.journal.finished(ticket, at_s)
        finally:
            self.close(ticket, End(reason))

    def give_up(self, ticket: Ticket, reason: str) -> None:
        """An accepted request cannot be served."""
        self.end(ticket, "failed", reason, End("failed", FailedError(reason)))

    def end(self, ticket: Ticket, stage: str, reason: str, end: End) -> None:
        """End a request before its last token: for its workers, in the log, and in any case for its client."""
        if ticket.end is not None:
            return
        try:
            self.withdraw(ticket)
            self.journal.rejected(ticket, stage, reason, time.monotonic())
        finally:
            self.close(ticket, end)

    def reject(self, ticket: Ticket, rejection: Rejection, why: str = "") -> None:
        """Refuse a request."""
        error = RejectedError(rejection.stage, rejection.reason, self._retry_after_s(ticket))
        self.end(ticket, rejection.stage, why + rejection.reason, End("rejected", error))

    def double_check(self, ticket: Ticket, instance: str) -> bool:
        """Whether a decode worker still takes a request whose KVCache has just arrived (arXiv §3, step 4)."""
        if ticket.has_first or ticket.attempt > 1 or self.estimate is None:
            return True  # its client was told that it is served
        view = self.books.accounts[instance].decode_view(without=ticket.job)
        refusal = self._spec.admission.double_check(
            ticket.request, view, estimate=self.estimate, slo=self._spec.slo
        )
        if refusal is not None:
            self.reject(ticket, refusal)
        return refusal is None

    def withdraw(self, ticket: Ticket) -> None:
        """Let the workers of an attempt drop it."""
        placement = ticket.placement
        try:
            if placement is not None:
                for name in {placement.prefill, placement.decode} & self.links.keys():
                    self.links[name].send(Cancel(ticket.job))
        finally:
            self._leave_books(ticket)

    def close(self, ticket: Ticket, end: End) -> None:
        """Tell the client that a request has ended, and let go of it."""
        ticket.end = end
        ticket.news.put_nowait(end)
        was_under_way = self.tickets.pop(ticket.id, None) is not None
        if ticket in self._stranded:
            self._stranded.remove(ticket)
        self._ended[ticket.id] = ticket
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        if was_under_way:
            self.budget.note_end(ticket, time.monotonic())

    def forget_ended(self) -> None:
        """What workers still say of requests that have ended is not to be heard any more."""
        self._ended.clear()

    def _leave_books(self, ticket: Ticket) -> None:
        placement = ticket.placement
        if placement is None:
            return
        for name in {placement.prefill, placement.decode, placement.fetch_from}:
            account = self.books.accounts.get(name) if name is not None else None
            if account is not None:
                account.drop_prompt(ticket.job)
                account.drop_context(ticket.job)
                account.sending.discard(ticket.job)
        ticket.placement = None

    def _retry_after_s(self, ticket: Ticket) -> float:
        """When a refused client may find room, and less of a queue than now."""
        now_s = time.monotonic()
        backlogs = [a.backlog_s(now_s) for a in self.books.accounts.values() if a.role != "decode"]
        shortest_s = float(math.ceil(min(backlogs, default=0.0)))
        return max(shortest_s, self.budget.retry_after_s(ticket, now_s, self.estimate))

    def keys(self, prompt: npt.NDArray[np.int32]) -> tuple[bytes, ...]:
        """The names that this cluster gives to a prompt's blocks."""
        assert self.ready is not None  # noqa: S101  # a cluster takes requests when its workers live
        size, name = self._spec.block_size_tokens, self.ready.fingerprint
        return tuple(block_keys(np.asarray(prompt, dtype=np.int32), size, namespace=name))


def _unknown(decision: Placement | Rejection, living: Collection[str]) -> list[str]:
    """Workers that a decision names and that there are not."""
    if isinstance(decision, Rejection):
        return []
    named = (decision.prefill, decision.decode, decision.fetch_from)
    return [name for name in named if name is not None and name not in living]
