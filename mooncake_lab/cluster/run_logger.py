"""Writes the run log of a cluster, and learns from it what views show of the past."""

from collections.abc import Callable
from typing import final

from mooncake_lab.cluster import events
from mooncake_lab.conductor import History, Placement
from mooncake_lab.core import (
    Arrived,
    CacheChanged,
    DecodeStretch,
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
    Record,
    Rejected,
    RunEnded,
)


@final
class RunLogger:
    """One method for each record. Mutable: history grows with the log.

    Args:
        write: gets each record.
    """

    def __init__(self, write: Callable[[Record], None]) -> None:
        self.history = History()
        self._write = write

    def _learn(self, record: Arrived | FirstToken | Finished | Rejected) -> None:
        self._write(record)
        self.history.note(record)

    def arrived(self, event: events.RequestArrived) -> None:
        """A request reached the cluster."""
        self._learn(
            Arrived(
                at_s=event.at_s,
                request_id=event.request.id,
                input_tokens=event.request.input_tokens,
                completion_id=event.completion_id,
                wall_s=event.wall_s,
            )
        )

    def placed(self, placement: Placement, at_s: float, why: str) -> None:
        """The Conductor chose workers; `why` stands before its reason."""
        self._write(
            Placed(
                at_s=at_s,
                request_id=placement.request_id,
                prefill_instance=placement.prefill,
                decode_instance=placement.decode,
                reused_tokens=placement.reused_tokens,
                fetched_tokens=placement.fetched_tokens,
                reason=why + placement.reason,
            )
        )

    def rejected(self, request_id: int, stage: str, reason: str, at_s: float) -> None:
        """A request is not served, or no longer."""
        self._learn(Rejected(at_s=at_s, request_id=request_id, stage=stage, reason=reason))

    def prefilled(self, event: events.PrefillDone | events.ChunkDone) -> None:
        """A prompt was computed, or a piece of one."""
        self._write(
            Prefilled(
                at_s=event.at_s,
                request_id=event.attempt.request_id,
                instance=event.worker,
                start_s=event.start_s,
                computed_tokens=event.computed_tokens,
                reused_tokens=event.reused_tokens,
            )
        )

    def moved(
        self,
        event: events.PrefixFetched | events.TierRead | events.KVPartArrived | events.KVArrived,
        source: str,
        destination: str,
    ) -> None:
        """KVCache arrived somewhere."""
        self._write(
            Moved(
                at_s=event.at_s,
                request_id=event.attempt.request_id,
                source=source,
                destination=destination,
                start_s=event.start_s,
                bytes=event.bytes,
            )
        )

    def first_token(self, request_id: int, at_s: float) -> None:
        """A client received its first token."""
        self._learn(FirstToken(at_s=at_s, request_id=request_id))

    def next_token(self, request_id: int, worker: str, at_s: float) -> None:
        """A client received a token that prefill computed after a failure: a decode step of no length."""
        self._write(
            DecodeStretch(
                at_s=at_s,
                instance=worker,
                start_s=at_s,
                steps=1,
                first_step_s=0.0,
                step_growth_s=0.0,
                request_ids=(request_id,),
            )
        )

    def stepped(self, event: events.StepDone, request_ids: tuple[int, ...]) -> None:
        """Decode steps ended, each with one token for each of these requests."""
        self._write(
            DecodeStretch(
                at_s=event.at_s,
                instance=event.worker,
                start_s=event.start_s,
                steps=event.steps,
                first_step_s=event.first_step_s,
                step_growth_s=event.step_growth_s,
                request_ids=request_ids,
            )
        )

    def finished(self, request_id: int, output_tokens: int, at_s: float) -> None:
        """A client has all its tokens."""
        self._learn(Finished(at_s=at_s, request_id=request_id, output_tokens=output_tokens))

    def cache_changed(self, event: CacheChanged) -> None:
        """Blocks came to a cache, and others left it."""
        self._write(event)

    def run_ended(self, at_s: float, tokens: dict[int, int]) -> None:
        """The log is cut."""
        self._write(RunEnded(at_s=at_s, tokens=tokens))
