"""The run log of a live cluster: the records of the simulator, on the clock of the machine."""

import time
from collections.abc import Callable
from typing import Final, final

from mooncake_lab.conductor import Placement
from mooncake_lab.conductor.history import History
from mooncake_lab.core import (
    Arrived,
    DecodeStretch,
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
    Record,
    Rejected,
)
from mooncake_lab.serving.messages import Span
from mooncake_lab.serving.ticket import Ticket

_RANKS: Final = (Arrived, Placed, Prefilled, Moved, FirstToken, DecodeStretch, Finished, Rejected)
"""The order of records of one moment."""


@final
class Journal:
    """Writes down what happened, as workers tell it. Mutable: it grows.

    Args:
        zero_s: the reading of the monotonic clock that is time 0.
        write: gets each record, in the order in which the cluster heard of it.
    """

    def __init__(self, zero_s: float, write: Callable[[Record], None]) -> None:
        self.zero_s = zero_s
        self.history = History()
        """What the records teach, for the Conductor's views."""
        self._tell = write

    def restart(self, zero_s: float) -> None:
        """A new run begins, and what is learned begins anew."""
        self.zero_s = zero_s
        self.history = History()

    def _write(self, record: Record) -> None:
        self.history.note(record)
        self._tell(record)

    def arrived(self, ticket: Ticket, at_s: float) -> None:
        """A request reached the cluster."""
        request = ticket.request
        self._write(
            Arrived(
                at_s=at_s - self.zero_s,
                request_id=request.id,
                input_tokens=request.input_tokens,
                completion_id=ticket.completion_id,
                wall_s=None if ticket.completion_id is None else time.time(),
            )
        )

    def placed(self, ticket: Ticket, decision: Placement, at_s: float, why: str) -> None:
        """The Conductor chose workers; `why` stands before its reason."""
        self._write(
            Placed(
                at_s=at_s - self.zero_s,
                request_id=ticket.request.id,
                prefill_instance=decision.prefill,
                decode_instance=decision.decode,
                reused_tokens=decision.reused_tokens,
                fetched_tokens=decision.fetched_tokens,
                reason=why + decision.reason,
            )
        )

    def rejected(self, ticket: Ticket, stage: str, reason: str, at_s: float) -> None:
        """A request is not served, or no longer."""
        self._write(Rejected(at_s=at_s - self.zero_s, request_id=ticket.request.id, stage=stage, reason=reason))

    def prefilled(self, ticket: Ticket, instance: str, span: Span) -> None:
        """A prompt, or a piece of it, was computed."""
        self._write(
            Prefilled(
                at_s=span.end_s - self.zero_s,
                request_id=ticket.request.id,
                instance=instance,
                start_s=span.start_s - self.zero_s,
                computed_tokens=span.computed_tokens,
                reused_tokens=span.reused_tokens,
            )
        )

    def moved(
        self, ticket: Ticket, source: str, destination: str, *, start_s: float, end_s: float, size_bytes: int
    ) -> None:
        """KVCache arrived somewhere."""
        self._write(
            Moved(
                at_s=end_s - self.zero_s,
                request_id=ticket.request.id,
                source=source,
                destination=destination,
                start_s=start_s - self.zero_s,
                bytes=size_bytes,
            )
        )

    def first_token(self, ticket: Ticket, at_s: float) -> None:
        """A client received its first token."""
        self._write(FirstToken(at_s=at_s - self.zero_s, request_id=ticket.request.id))

    def step(self, instance: str, start_s: float, end_s: float, tickets: list[Ticket]) -> None:
        """One decode step of a batch; of no length where a token came without one."""
        self._write(
            DecodeStretch(
                at_s=end_s - self.zero_s,
                instance=instance,
                start_s=start_s - self.zero_s,
                steps=1,
                first_step_s=end_s - start_s,
                step_growth_s=0.0,
                request_ids=tuple(ticket.request.id for ticket in tickets),
            )
        )

    def finished(self, ticket: Ticket, at_s: float) -> None:
        """A client has all its tokens."""
        self._write(
            Finished(at_s=at_s - self.zero_s, request_id=ticket.request.id, output_tokens=len(ticket.tokens))
        )


def in_order(records: list[Record]) -> list[Record]:
    """Records by time: each worker tells its own in order, but the cluster hears them interleaved."""
    return sorted(records, key=lambda record: (record.at_s, _RANKS.index(type(record))))
