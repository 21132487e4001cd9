"""What every run log must obey: nothing is lost (I1), causes precede effects (I2), caches add up (I3)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from mooncake_lab.core import (
    Arrived,
    BlockKey,
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

TOLERANCE_S = 1e-6
"""Times a log may differ by: far below a decode step, far above the rounding of an hour in seconds."""

_TOLD_LATER: Final = frozenset({"client", "failed"})
"""Stages of a rejection that no worker of the request decides or waits for: they are told afterwards."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One place where a log breaks an invariant."""

    invariant: Literal["I1", "I2", "I3"]
    request_id: int | None
    sentence: str


@dataclass(slots=True)
class _Life:
    """What is known of a request so far; mutable because a log is read once, front to back."""

    arrived_s: float
    placed_s: float | None = None
    prefill_start_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    tokens: int = 0
    ended: str | None = None
    work_ends_s: float = math.inf
    """After that no work for it begins."""
    is_placed_again: bool = False
    """Whether it was placed and has received no token since."""

    def forbids(self, record: Record) -> bool:
        """Whether the end of the request rules out this record; work that began before the end may be recorded."""
        if isinstance(record, (Prefilled, Moved)):
            return record.start_s > self.work_ends_s + TOLERANCE_S
        return self.ended is not None


@dataclass(slots=True)
class _Checker:
    """Reads a log once; mutable for the same reason."""

    lives: dict[int, _Life] = field(default_factory=dict[int, _Life])
    caches: dict[str, set[BlockKey]] = field(default_factory=dict[str, set[BlockKey]])
    now_s: float = -math.inf
    late: list[Violation] = field(default_factory=list[Violation])
    """Iterations after a later record; the end of a run cuts the stretches of those under way."""

    def read(self, record: Record) -> Iterator[Violation]:
        if isinstance(record, RunEnded):
            self.late.clear()
        elif not isinstance(record, (DecodeStretch, Prefilled)):
            yield from self.end()
        yield from self._clock(record)
        if isinstance(record, Arrived):
            yield from self._arrived(record)
            return
        if isinstance(record, CacheChanged):
            yield from self._cached(record)
            return
        if isinstance(record, RunEnded):
            yield from self._run_ended(record)
            return
        ids = record.request_ids if isinstance(record, DecodeStretch) else (record.request_id,)
        for request_id in ids:
            life = self.lives.get(request_id)
            if life is None:
                yield Violation("I1", request_id, f"{_name(record)} at {record.at_s} s without having arrived")
            elif life.forbids(record):
                yield Violation("I1", request_id, f"{_name(record)} at {record.at_s} s after it was {life.ended}")
            else:
                yield from self._step(record, request_id, life)

    def end(self) -> Iterator[Violation]:
        """No end of a run explains the late iterations."""
        yield from self.late
        self.late.clear()

    def _clock(self, record: Record) -> Iterator[Violation]:
        if not math.isfinite(record.at_s):
            yield Violation("I2", None, f"{_name(record)} at {record.at_s} s, which is not a time")
            return
        if record.at_s < self.now_s - TOLERANCE_S:
            late = Violation("I2", None, f"{_name(record)} at {record.at_s} s after a record at {self.now_s} s")
            if isinstance(record, (DecodeStretch, Prefilled)):
                self.late.append(late)
            else:
                yield late
        self.now_s = max(self.now_s, record.at_s)
        if isinstance(record, (Prefilled, Moved, DecodeStretch)) and record.start_s > record.at_s + TOLERANCE_S:
            yield Violation("I2", None, f"{_name(record)} ends at {record.at_s} s, starts at {record.start_s} s")
        if isinstance(record, DecodeStretch):
            yield from _stretch(record)

    def _arrived(self, record: Arrived) -> Iterator[Violation]:
        if record.request_id in self.lives:
            yield Violation("I1", record.request_id, f"arrives again at {record.at_s} s")
        else:
            self.lives[record.request_id] = _Life(record.at_s)

    def _cached(self, record: CacheChanged) -> Iterator[Violation]:
        held, where = self.caches.setdefault(record.instance, set()), f"{record.instance} at {record.at_s} s"
        if twice := len(record.added) - len(set(record.added) - held):
            yield Violation("I3", None, f"{twice} blocks come to {where} that are there already")
        held.update(record.added)
        if unknown := set(record.removed) - held:
            yield Violation("I3", None, f"{len(unknown)} blocks leave {where} that are not there")
        held.difference_update(record.removed)

    def _run_ended(self, record: RunEnded) -> Iterator[Violation]:
        read = {request_id: life.tokens for request_id, life in self.lives.items() if life.ended is None}
        for request_id in sorted(read.keys() | record.tokens.keys()):
            had, logged = record.tokens.get(request_id, 0), read.get(request_id, 0)
            if had != logged:
                sentence = f"has received {had} tokens when the run ends at {record.at_s} s, the log has {logged}"
                yield Violation("I1", request_id, sentence)

    def _step(self, record: Record, request_id: int, life: _Life) -> Iterator[Violation]:
        match record:
            case Placed():
                life.is_placed_again = life.placed_s is not None
                if life.placed_s is None:  # placed again after a death, work that began before may still end
                    life.placed_s = record.at_s
            case Rejected():
                life.ended = "rejected"
                life.work_ends_s = math.inf if record.stage in _TOLD_LATER else record.at_s
            case Prefilled():
                yield from _after("prefill starts", record.start_s, life.placed_s, "it is placed", request_id)
                if life.prefill_start_s is None:  # later spans may follow the first token, after a preemption
                    life.prefill_start_s = record.start_s
            case Moved():
                yield from _after("a move starts", record.start_s, life.arrived_s, "it arrives", request_id)
            case FirstToken():
                yield from _first_token(record, life)
            case DecodeStretch():
                yield from _after("decode starts", record.start_s, life.last_token_s, "its last token", request_id)
                life.last_token_s, life.tokens = record.at_s, life.tokens + record.steps
                life.is_placed_again = False
            case Finished():
                yield from _finished(record, life)
            case _:
                pass


def check_log(records: Iterable[Record]) -> tuple[Violation, ...]:
    """Where a log breaks invariants I1, I2 and I3; empty when it keeps them.

    I1: every request arrives once, and after that is finished once, rejected once, or running when the log
    ends; nothing happens to a request that never arrived, and nothing begins for one that has ended, but for a
    prompt that its worker begins before it is told that the client left or that the attempt failed; a finished
    request received as many tokens as its record says, and one that runs at the horizon as many as the
    record of the run's end says. I2: arrival <= placed <= prefill start <= first
    token <= each decode stretch <= finish; records come in order of time, but for the iterations that the end of a
    run cuts; what lasts ends when its steps add up to. I3: blocks come to caches where they are not, and leave
    where they are.
    """
    checker = _Checker()
    found = [violation for record in records for violation in checker.read(record)]
    return (*found, *checker.end())


def _stretch(record: DecodeStretch) -> Iterator[Violation]:
    k = record.steps - 1
    lasts = record.steps * record.first_step_s + k * (k + 1) / 2 * record.step_growth_s
    if record.steps < 1 or min(record.first_step_s, record.first_step_s + k * record.step_growth_s) < 0:
        yield Violation("I2", None, f"a decode stretch at {record.at_s} s has no step, or one of negative length")
    elif abs(record.start_s + lasts - record.at_s) > TOLERANCE_S:
        yield Violation(
            "I2", None, f"a decode stretch ends at {record.at_s} s, its steps at {record.start_s + lasts} s"
        )


def _first_token(record: FirstToken, life: _Life) -> Iterator[Violation]:
    if life.first_token_s is not None:
        yield Violation("I1", record.request_id, f"receives a second first token at {record.at_s} s")
        return
    yield from _after(
        "first token comes", record.at_s, life.prefill_start_s, "a prefill starts", record.request_id
    )
    life.first_token_s = life.last_token_s = record.at_s
    life.is_placed_again = False
    life.tokens += 1


def _finished(record: Finished, life: _Life) -> Iterator[Violation]:
    life.ended = "finished"
    life.work_ends_s = math.inf if life.is_placed_again else record.at_s  # its client stopped: told afterwards
    yield from _after("it finishes", record.at_s, life.last_token_s, "its last token", record.request_id)
    if record.output_tokens != life.tokens:
        yield Violation(
            "I1", record.request_id, f"finishes with {record.output_tokens} tokens but received {life.tokens}"
        )


def _after(what: str, at_s: float, cause_s: float | None, cause: str, request_id: int) -> Iterator[Violation]:
    if cause_s is None:
        yield Violation("I2", request_id, f"{what} at {at_s} s without {cause}")
    elif at_s < cause_s - TOLERANCE_S:
        yield Violation("I2", request_id, f"{what} at {at_s} s, before {cause} at {cause_s} s")


def _name(record: Record) -> str:
    return type(record).__name__.lower()
