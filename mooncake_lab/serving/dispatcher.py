"""Follows every request through the live cluster: decide, place, listen, and place again what a death interrupted."""

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.conductor import AdmitAll, ClusterView, Decision, Estimator, Placement, Rejection, decide
from mooncake_lab.core import Request, block_keys
from mooncake_lab.serving import messages
from mooncake_lab.serving.books import Books
from mooncake_lab.serving.journal import Journal
from mooncake_lab.serving.messages import Cancel, Compute, Event, Expect, Generation, Job, Ready
from mooncake_lab.serving.spec import LiveSpec
from mooncake_lab.serving.supervisor import Link
from mooncake_lab.serving.ticket import End, FailedError, RejectedError, Ticket

_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision and what it rests on: `conductor.decide` gives it again."""

    request: Request
    view: ClusterView
    decision: Decision
    is_first: bool
    """Whether admission was asked: a request that was accepted once is accepted."""


@final
class Dispatcher:
    """The living cluster's memory of its requests. Mutable; all methods belong to one event loop.

    Args:
        spec: of the cluster.
        journal: where it writes down what happens.
        decided: told of each decision.
    """

    def __init__(self, spec: LiveSpec, journal: Journal, decided: Callable[[Decided], None]) -> None:
        self.journal = journal
        self.books = Books()
        self.estimate: Estimator | None = None
        self.ready: Ready | None = None
        self.tickets: dict[int, Ticket] = {}
        self._spec = spec
        self._decided = decided
        self._links: dict[str, Link] = {}
        self._ids = itertools.count()
        self._stranded: list[Ticket] = []
        self._ended: OrderedDict[int, Ticket] = OrderedDict()  # whose late news still belong into the log

    # what clients do

    def submit(
        self,
        prompt: npt.NDArray[np.int32],
        asked: Generation,
        *,
        request_id: int | None = None,
        arrival_s: float = 0,
    ) -> Ticket:
        """Accept a request and place it; its tokens come through the ticket.

        Args:
            prompt: token ids, shape (n,).
            asked: what is wanted; its prompt field is filled in here.
            request_id: its name in the log; None takes the next free number.
            arrival_s: for the record, the moment since the run began at which it was to arrive.

        Raises:
            ValueError: when it can never be served.
            RejectedError: when the cluster does not want it now.
        """
        self._check(prompt, asked)
        number = next(self._ids)
        keys = self._keys(prompt)
        request = Request(
            id=number if request_id is None else request_id,
            arrival_s=arrival_s,
            input_tokens=len(prompt),
            block_keys=keys,
            block_size_tokens=self._spec.block_size_tokens,
        )
        ticket = Ticket(id=number, request=request, prompt=prompt, asked=asked)
        self.journal.arrived(ticket, time.monotonic())
        if len(self.tickets) >= self._spec.most_under_way:
            reason = f"{len(self.tickets)} requests are under way; allowed are {self._spec.most_under_way}"
            self._reject(ticket, Rejection(request_id=request.id, stage="frontdoor", reason=reason))
        else:
            self.tickets[number] = ticket
            self._place(ticket)
        if ticket.end is not None and ticket.end.error is not None:
            raise ticket.end.error
        return ticket

    def cancel(self, ticket: Ticket, reason: str = "the client went away") -> None:
        """End a request whose client does not want it any more."""
        if ticket.end is None:
            self._withdraw(ticket)
            self.journal.rejected(ticket, "client", reason, time.monotonic())
            self._close(ticket, End("cancelled"))

    def abandon(self, ticket: Ticket) -> None:
        """Let go of a request that still runs at the horizon; the log does not say that it ended."""
        if ticket.end is None:
            self._withdraw(ticket)
            self._close(ticket, End("cancelled"))

    def retry_after_s(self) -> float:
        """When a refused client may find less of a queue: the shortest backlog, at least a second."""
        now_s = time.monotonic()
        backlogs = [a.backlog_s(now_s) for a in self.books.accounts.values() if a.role != "decode"]
        return max(1.0, float(math.ceil(min(backlogs, default=1.0))))

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about a request now; looking changes nothing."""
        return self.books.view(request, time.monotonic(), self.journal.zero_s)

    def own_keys(self, prompt: npt.NDArray[np.int32]) -> tuple[bytes, ...]:
        """The names that this cluster gives to a prompt's blocks."""
        return self._keys(prompt)

    # what workers do

    def born(self, name: str, link: Link) -> None:
        """A worker lives: whoever waited for one is placed."""
        self._links[name] = link
        self.ready = link.ready
        self.books.open(name, self._spec.roles[name], link.ready.capacity_tokens)
        if self.books.can_serve and self.estimate is not None:
            stranded, self._stranded = self._stranded, []
            for ticket in stranded:
                if ticket.end is None:
                    self._place(ticket, f"placed when {name} was there: ")

    def died(self, name: str, reason: str) -> None:
        """A worker is gone: whoever was on the way through it is placed again, in order of arrival."""
        del self._links[name]
        self.books.close(name)
        for ticket in list(self.tickets.values()):
            placement = ticket.placement
            if placement is not None and (
                placement.decode == name or (placement.prefill == name and not ticket.has_joined)
            ):
                self._place_again(ticket, f"placed again after {name} died: ", reason)

    def heard(self, name: str, event: Event) -> None:
        """A worker said something."""
        match event:
            case messages.Stepped():
                self._stepped(name, event)
            case messages.Joined():
                self._joined(name, event)
            case messages.Prefilled():
                self._prefilled(name, event)
            case messages.Ended():
                self._finished(event)
            case messages.Fetched():
                self._fetched(name, event)
            case messages.Holds():
                self.books.note(name, event)
            case messages.Trouble():
                self._trouble(name, event)
            case _:
                pass  # pongs and measurements are others' to hear

    def _stepped(self, name: str, event: messages.Stepped) -> None:
        for span in event.spans:
            ticket = self._current(span.job)
            if ticket is not None:
                self.journal.prefilled(ticket, name, span)
        decoded: list[Ticket] = []
        for job, token in event.tokens:
            ticket = self._current(job)
            if ticket is None:
                continue
            account = self.books.accounts[name]
            if account.role == "coupled" and not ticket.has_joined:
                ticket.has_joined = True
                account.drop_prompt(job)
            if ticket.has_first:
                decoded.append(ticket)
            else:
                self.journal.first_token(ticket, event.end_s)
            self._show(ticket, token)
            account.add_context(job, 1)
        if decoded:
            self.journal.step(name, event.start_s, event.end_s, decoded)

    def _joined(self, name: str, event: messages.Joined) -> None:
        ticket = self._current(event.job)
        if ticket is None or ticket.placement is None:
            return
        self._log_prefill(ticket, ticket.placement.prefill, event.span)
        for move in event.moves:
            self.journal.moved(
                ticket, ticket.placement.prefill, name,
                start_s=move.start_s, end_s=move.end_s, size_bytes=move.bytes,
            )  # fmt: skip
        ticket.has_joined = True
        self._show_computed(ticket, name, event.first_token, event.at_s)

    def _prefilled(self, name: str, event: messages.Prefilled) -> None:
        job = event.span.job
        if name in self.books.accounts:
            self.books.accounts[name].drop_prompt(job)
        ticket = self._current(job)
        if ticket is None:
            late = self._ended.get(job.ticket)
            if late is not None and late.attempt == job.attempt:
                self._log_prefill(late, name, event.span)
            return
        self._log_prefill(ticket, name, event.span)
        if self._spec.first_shown_by == "prefill" and ticket.placement is not None:
            self._show_computed(ticket, ticket.placement.decode, event.first_token, event.span.end_s)

    def _show_computed(self, ticket: Ticket, instance: str, token: int, at_s: float) -> None:
        """Show the token that prefill computed, once: the first, or after a death the next."""
        if ticket.shown_in_attempt:
            return
        if ticket.has_first:
            self.journal.step(instance, at_s, at_s, [ticket])
        else:
            self.journal.first_token(ticket, at_s)
        self._show(ticket, token)

    def _finished(self, event: messages.Ended) -> None:
        ticket = self._current(event.job)
        if ticket is not None:
            self._complete(ticket, event.at_s, event.reason)

    def _complete(self, ticket: Ticket, at_s: float, reason: str) -> None:
        self._leave_books(ticket)
        self.journal.finished(ticket, at_s)
        self._close(ticket, End(reason))

    def _fetched(self, name: str, event: messages.Fetched) -> None:
        ticket = self._current(event.job)
        if ticket is None or ticket.placement is None or ticket.placement.fetch_from is None:
            return
        source = ticket.placement.fetch_from
        if source in self.books.accounts:
            self.books.accounts[source].sending.discard(event.job)
        self.journal.moved(ticket, source, name, start_s=event.start_s, end_s=event.end_s, size_bytes=event.bytes)

    def _trouble(self, name: str, event: messages.Trouble) -> None:
        ticket = self._current(event.job)
        if ticket is None:
            return
        if event.is_hopeless:
            self._give_up(ticket, f"{name}: {event.reason}")
        else:
            self._place_again(ticket, f"placed again after trouble on {name} ({event.reason}): ", event.reason)

    # placing

    def _place(self, ticket: Ticket, why: str = "") -> None:
        """Ask the Conductor about a request now, and act."""
        if not self.books.can_serve or self.estimate is None:
            self._stranded.append(ticket)
            return
        now_s, is_first = time.monotonic(), ticket.attempt == 0
        view = self.books.view(ticket.request, now_s, self.journal.zero_s)
        decision = decide(
            ticket.request,
            view,
            placement=self._spec.places,
            admission=self._spec.admission if is_first else AdmitAll(),
            estimate=self.estimate,
            slo=self._spec.slo,
        )
        self._decided(Decided(ticket.request, view, decision, is_first))
        if isinstance(decision, Rejection):
            self._reject(ticket, decision, why)
            return
        self.journal.decided(ticket, decision, now_s, why)
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
        )
        believed_s = estimate.prefill_s(request.id, request.input_tokens, placement.reused_tokens)
        prefill, decode = self.books.accounts[placement.prefill], self.books.accounts[placement.decode]
        prefill.add_prompt(job, believed_s)
        decode.add_context(job, len(known))
        if prefill is decode:
            self._links[placement.prefill].send(Compute(job=job, asked=asked))
            return
        source = placement.fetch_from
        if source is not None:
            self.books.accounts[source].sending.add(job)
        size = self._spec.block_size_tokens
        self._links[placement.decode].send(Expect(job=job, asked=asked))
        self._links[placement.prefill].send(
            Compute(
                job=job,
                asked=asked,
                deliver_to=self._links[placement.decode].ready.port,
                fetch_from=None if source is None else self._links[source].ready.port,
                fetch_blocks=-(-placement.reused_tokens // size) if source is not None else 0,
            )
        )

    def _place_again(self, ticket: Ticket, why: str, reason: str) -> None:
        """An attempt came to nothing: its prompt and the tokens shown are prefilled anew, elsewhere or later."""
        self._withdraw(ticket)
        assert self.ready is not None  # noqa: S101  # whoever was placed was placed on a worker
        if ticket.is_complete(self.ready.end_tokens):
            self._complete(ticket, time.monotonic(), "length")
            return
        if ticket.attempt >= self._spec.most_attempts:
            self._give_up(ticket, f"{ticket.attempt} attempts came to nothing, the last because {reason}")
            return
        if len(ticket.tokens) > ticket.in_prompt:
            known = ticket.known_tokens()
            ticket.in_prompt = len(ticket.tokens)
            ticket.request = replace(ticket.request, input_tokens=len(known), block_keys=self._keys(known))
        self._place(ticket, why)

    def _withdraw(self, ticket: Ticket) -> None:
        """Let the workers of an attempt drop it."""
        placement = ticket.placement
        if placement is not None:
            for name in {placement.prefill, placement.decode} & self._links.keys():
                self._links[name].send(Cancel(ticket.job))
        self._leave_books(ticket)

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

    def _give_up(self, ticket: Ticket, reason: str) -> None:
        self._withdraw(ticket)
        self.journal.rejected(ticket, "failed", reason, time.monotonic())
        self._close(ticket, End("failed", FailedError(reason)))

    def _reject(self, ticket: Ticket, rejection: Rejection, why: str = "") -> None:
        self.journal.decided(ticket, rejection, time.monotonic(), why)
        error = RejectedError(rejection.stage, rejection.reason, self.retry_after_s())
        self._close(ticket, End("rejected", error))

    def _close(self, ticket: Ticket, end: End) -> None:
        ticket.end = end
        ticket.news.put_nowait(end)
        self.tickets.pop(ticket.id, None)
        self._ended[ticket.id] = ticket
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _show(self, ticket: Ticket, token: int) -> None:
        ticket.has_first = True
        ticket.shown_in_attempt += 1
        ticket.tokens.append(token)
        ticket.news.put_nowait(token)

    def _log_prefill(self, ticket: Ticket, instance: str, span: messages.Span) -> None:
        if not ticket.is_prefill_logged:
            ticket.is_prefill_logged = True
            self.journal.prefilled(ticket, instance, span)

    def _current(self, job: Job) -> Ticket | None:
        """The request of an attempt, unless it has ended or is tried anew."""
        ticket = self.tickets.get(job.ticket)
        return ticket if ticket is not None and ticket.attempt == job.attempt else None

    def _keys(self, prompt: Sequence[int] | npt.NDArray[np.int32]) -> tuple[bytes, ...]:
        assert self.ready is not None  # noqa: S101  # a cluster takes requests when its workers live
        size, name = self._spec.block_size_tokens, self.ready.fingerprint
        return tuple(block_keys(np.asarray(prompt, dtype=np.int32), size, namespace=name))

    def _check(self, prompt: npt.NDArray[np.int32], asked: Generation) -> None:
        if self.ready is None:
            raise ValueError("the cluster has no worker yet")
        longest, window = len(prompt) + asked.max_new_tokens - 1, self.ready.window
        if len(prompt) < 1 or asked.max_new_tokens < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {asked.max_new_tokens} new ones; at least 1 of each is needed"
            )
        capacity = min(
            (a.capacity_tokens for a in self.books.accounts.values() if a.role != "prefill"), default=window
        )
        if longest > min(window, capacity):
            raise ValueError(
                f"{len(prompt)} prompt tokens and {asked.max_new_tokens} new ones make {longest};"
                f" allowed are {min(window, capacity)}"
            )
        lowest, highest, most = int(prompt.min()), int(prompt.max()), self.ready.shape.vocabulary
        if lowest < 0 or highest >= most:
            raise ValueError(f"the prompt holds tokens {lowest} to {highest}; the model knows 0 to {most - 1}")
