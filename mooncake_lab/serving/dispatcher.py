"""Follows every request through the live cluster: what clients ask, and what workers say of it."""

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt

from mooncake_lab.conductor import ClusterView, Rejection
from mooncake_lab.core import Request
from mooncake_lab.serving import messages
from mooncake_lab.serving.journal import Journal
from mooncake_lab.serving.messages import Event, Generation, Job
from mooncake_lab.serving.placing import Decided, Placer
from mooncake_lab.serving.spec import LiveSpec
from mooncake_lab.serving.supervisor import Link
from mooncake_lab.serving.ticket import End, Ticket


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
        self.placer = Placer(spec, journal, decided)
        self._spec = spec
        self._ids = itertools.count()

    # what clients do

    def submit(
        self,
        prompt: npt.NDArray[np.int32],
        asked: Generation,
        *,
        request_id: int | None = None,
        arrival_s: float = 0,
        session: str | None = None,
        priority: int = 0,
        completion_id: str | None = None,
    ) -> Ticket:
        """Accept a request and place it; its tokens come through the ticket.

        Args:
            prompt: token ids, shape (n,).
            asked: what is wanted; its prompt field is filled in here.
            request_id: its name in the log; None takes the next free number.
            arrival_s: for the record, the moment since the run began at which it was to arrive.
            session: the conversation it belongs to, for policies.
            priority: how urgent it is, for policies.
            completion_id: its name for its client, for the log.

        Raises:
            ValueError: when it can never be served.
            RejectedError: when the cluster does not want it now.
        """
        self._check(prompt, asked)
        number = next(self._ids)
        keys = self.placer.keys(prompt)
        request = Request(
            id=number if request_id is None else request_id,
            arrival_s=arrival_s,
            input_tokens=len(prompt),
            block_keys=keys,
            block_size_tokens=self._spec.block_size_tokens,
            session=session,
            priority=priority,
        )
        ticket = Ticket(id=number, request=request, prompt=prompt, asked=asked, completion_id=completion_id)
        self.journal.arrived(ticket, time.monotonic())
        too_many = self.placer.budget.refusal(ticket)
        if too_many is not None:
            self.placer.reject(ticket, Rejection(request_id=request.id, stage="frontdoor", reason=too_many))
        else:
            self.placer.tickets[number] = ticket
            self.placer.place(ticket)
        if ticket.end is not None and ticket.end.error is not None:
            raise ticket.end.error
        return ticket

    def cancel(self, ticket: Ticket, reason: str = "the client went away", error: Exception | None = None) -> None:
        """End a request whose client does not want it any more, or is to be told of an error."""
        self.placer.end(ticket, "client", reason, End("cancelled", error))

    def finish(self, ticket: Ticket) -> None:
        """End a request whose client has all it wants."""
        if ticket.end is None:
            self.placer.withdraw(ticket)
            self.placer.complete(ticket, time.monotonic(), "stop")

    def abandon(self, ticket: Ticket) -> None:
        """Let go of a request that still runs at the horizon; the log does not say that it ended."""
        if ticket.end is None:
            try:
                self.placer.withdraw(ticket)
            finally:
                self.placer.close(ticket, End("cancelled"))

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about a request now; looking changes nothing."""
        journal = self.journal
        return self.placer.books.view(request, time.monotonic(), journal.zero_s, journal.history)

    # what workers do

    def born(self, name: str, link: Link) -> None:
        """A worker lives: whoever waited for one is placed."""
        self.placer.links[name] = link
        self.placer.ready = link.ready
        self.placer.books.open(name, self._spec.roles[name], link.ready.capacity_tokens)
        self.placer.place_stranded(f"placed when {name} was there: ")

    def died(self, name: str, reason: str) -> None:
        """A worker is gone: whoever was on the way through it is placed again, in order of arrival."""
        del self.placer.links[name]
        self.placer.books.close(name)
        for ticket in list(self.placer.tickets.values()):
            placement = ticket.placement
            if placement is not None and (
                placement.decode == name or (placement.prefill == name and not ticket.has_joined)
            ):
                self.placer.place_again(ticket, f"placed again after {name} died: ", reason)
        self.placer.lost(name)

    def heard(self, name: str, event: Event) -> None:
        """A worker said something."""
        with self._about(_job_of(event)):
            self._hear(name, event)

    def _about(self, job: Job | None) -> contextlib.AbstractContextManager[None]:
        """What goes wrong inside ends the request of this attempt, and no other."""
        ticket = None if job is None else self.placer.current(job)
        return contextlib.nullcontext() if ticket is None else self.placer.ending(ticket)

    def _hear(self, name: str, event: Event) -> None:
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
            case messages.Loaded():
                self._loaded(name, event)
            case messages.Holds():
                self.placer.books.note(name, event)
            case messages.Trouble():
                self._trouble(name, event)
            case messages.Pong():
                self.placer.answered(name, event.number)
            case _:
                pass  # measurements are others' to hear

    def _stepped(self, name: str, event: messages.Stepped) -> None:
        for span in event.spans:
            ticket = self.placer.current(span.job)
            if ticket is not None:
                self._note_reuse(ticket, span)
                self.journal.prefilled(ticket, name, span)
        decoded: list[Ticket] = []
        for job, token in event.tokens:
            ticket = self.placer.current(job)
            if ticket is None:
                continue
            with self.placer.ending(ticket):
                if ticket.has_first:
                    decoded.append(ticket)
                self._decoded(name, ticket, token, event.end_s)
        if decoded:
            self.journal.step(name, event.start_s, event.end_s, decoded)

    def _decoded(self, name: str, ticket: Ticket, token: int, end_s: float) -> None:
        job, account = ticket.job, self.placer.books.accounts[name]
        if account.role == "coupled" and not ticket.has_joined:
            ticket.has_joined = True
            account.drop_prompt(job)
            account.arrive(job, end_s - self.journal.zero_s)
        if not ticket.has_first:
            self.journal.first_token(ticket, end_s)
        self._show(ticket, token)
        account.add_context(job, 1)

    def _joined(self, name: str, event: messages.Joined) -> None:
        ticket = self.placer.current(event.job)
        if ticket is None or ticket.placement is None:
            return
        self._log_prefill(ticket, ticket.placement.prefill, event.span)
        for move in event.moves:
            self.journal.moved(
                ticket, ticket.placement.prefill, name,
                start_s=move.start_s, end_s=move.end_s, size_bytes=move.bytes,
            )  # fmt: skip
        if not self.placer.double_check(ticket, name):
            return
        ticket.has_joined = True
        self.placer.books.accounts[name].arrive(event.job, event.at_s - self.journal.zero_s)
        self._show_computed(ticket, name, event.first_token, event.at_s)

    def _prefilled(self, name: str, event: messages.Prefilled) -> None:
        job = event.span.job
        if name in self.placer.books.accounts:
            self.placer.books.accounts[name].drop_prompt(job)
        ticket = self.placer.current(job)
        if ticket is None:
            late = self.placer.ended(job)
            if late is not None:
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
        ticket = self.placer.current(event.job)
        if ticket is not None:
            self.placer.complete(ticket, event.at_s, event.reason)

    def _fetched(self, name: str, event: messages.Fetched) -> None:
        ticket = self.placer.current(event.job)
        if ticket is None or ticket.placement is None or ticket.placement.fetch_from is None:
            return
        source = ticket.placement.fetch_from
        if source in self.placer.books.accounts:
            self.placer.books.accounts[source].sending.discard(event.job)
        self.journal.moved(ticket, source, name, start_s=event.start_s, end_s=event.end_s, size_bytes=event.bytes)

    def _loaded(self, name: str, event: messages.Loaded) -> None:
        ticket = self.placer.current(event.job)
        if ticket is not None:
            self.journal.moved(
                ticket, f"{name}/ssd", f"{name}/dram",
                start_s=event.start_s, end_s=event.end_s, size_bytes=event.bytes,
            )  # fmt: skip

    def _trouble(self, name: str, event: messages.Trouble) -> None:
        ticket = self.placer.current(event.job)
        if ticket is None:
            return
        if event.is_hopeless:
            self.placer.give_up(ticket, f"{name}: {event.reason}")
        else:
            placement = ticket.placement
            both = () if placement is None else (placement.prefill, placement.decode)
            why = f"placed again after trouble on {name} ({event.reason}): "
            self.placer.place_again(ticket, why, event.reason, suspects=both)

    def _show(self, ticket: Ticket, token: int) -> None:
        ticket.has_first = True
        ticket.shown_in_attempt += 1
        ticket.tokens.append(token)
        ticket.news.put_nowait(token)

    def _log_prefill(self, ticket: Ticket, instance: str, span: messages.Span) -> None:
        if not ticket.is_prefill_logged:
            ticket.is_prefill_logged = True
            self._note_reuse(ticket, span)
            self.journal.prefilled(ticket, instance, span)

    def _note_reuse(self, ticket: Ticket, span: messages.Span) -> None:
        """The first prefill says what was reused: a later one, after a death, finds what the first computed."""
        if ticket.cached_tokens is None:
            ticket.cached_tokens = min(span.reused_tokens, len(ticket.prompt))

    def longest(self) -> int:
        """The most tokens that a prompt and its answer may have together: the window, or an engine's KVCache.

        Raises:
            RuntimeError: when no worker has lived yet.
        """
        ready = self.placer.ready
        if ready is None:
            raise RuntimeError("the cluster has no worker yet")
        rooms = (a.capacity_tokens for a in self.placer.books.accounts.values() if a.role != "prefill")
        return min((ready.window, *rooms))

    def _check(self, prompt: npt.NDArray[np.int32], asked: Generation) -> None:
        if len(prompt) < 1 or asked.max_new_tokens < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {asked.max_new_tokens} new ones; at least 1 each is needed"
            )
        tokens, most = len(prompt) + asked.max_new_tokens - 1, self.longest()  # nobody reads the last one again
        if tokens > most:
            raise ValueError(
                f"{len(prompt)} prompt tokens and {asked.max_new_tokens} new ones are too many;"
                f" together they may be {most + 1}"
            )
        assert self.placer.ready is not None  # noqa: S101  # `longest` has checked
        lowest, highest, known = int(prompt.min()), int(prompt.max()), self.placer.ready.shape.vocabulary
        if lowest < 0 or highest >= known:
            raise ValueError(f"the prompt holds tokens {lowest} to {highest}; the model knows 0 to {known - 1}")


def _job_of(event: Event) -> Job | None:
    """The attempt that an event is about, where it is about one."""
    match event:
        case messages.Prefilled():
            return event.span.job
        case messages.Joined() | messages.Ended() | messages.Fetched() | messages.Loaded() | messages.Trouble():
            return event.job
        case _:
            return None
