"""The whole calibration: rounds of probes and of held-out runs in turn, then one fit, and what it predicts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mooncake_lab.calibrate.fit import Fitted, fitted
from mooncake_lab.calibrate.observations import CalibrationError, Reply, ServedModel
from mooncake_lab.calibrate.prediction import ServedRun, at_one_rate
from mooncake_lab.calibrate.probes import Prober, Rows
from mooncake_lab.calibrate.settings import ServerSettings
from mooncake_lab.calibrate.workload import HeldOut

_LATE_S: Final = 0.05
"""A request that is sent so much after its time is worth a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlan:
    """How a server is calibrated.

    Raises:
        CalibrationError: when a number is out of range.
    """

    shares: tuple[float, ...] = (0.3, 0.5, 0.7, 0.85, 1.1)
    """Rates of the held-out runs, as shares of the measured saturation."""
    repetitions: int = 3
    most_lanes: int = 16
    """The largest crowd, and the clients that saturate the server."""
    seed: int = 0
    """Of arrivals and intervals."""
    salt: int = 0
    """Of the tokens of prompts."""

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share <= 10 for share in self.shares):
            raise CalibrationError(f"rates are {self.shares}; allowed are shares of saturation above 0, up to 10")
        if self.repetitions < 1 or self.most_lanes < 1:
            raise CalibrationError(
                f"{self.repetitions} repetitions and {self.most_lanes} clients; at least 1 of each is needed"
            )


@dataclass(slots=True, kw_only=True)
class Observed:
    """All that was seen of a server. Mutable: an interrupted calibration keeps what it has."""

    rows: Rows = field(default_factory=Rows)
    saturation_per_s: float | None = None
    held_out: list[ServedRun] = field(default_factory=list[ServedRun])
    resets_cache: bool | None = None
    """Whether the server can be told to empty its cache of prefixes."""
    ended_by: str | None = None
    """Why the measuring ended before its time: an interruption, or what the server said last."""


Told = Callable[[str, Reply | None, int], None]
"""Told the phase that begins, with the requests that it has; and each reply, with 0."""


def observe(
    server: ServedModel, settings: ServerSettings, held_out: HeldOut, plan: StudyPlan, told: Told, seen: Observed
) -> None:
    """Probes and held-out runs in turn, so that both see the same machine.

    KeyboardInterrupt ends the measuring and keeps what is seen. So does a server that fails after a first round.

    Raises:
        CalibrationError: when the server refuses a probe of the first round, or cannot be talked to then.
    """
    prober = Prober(server, settings, plan.salt, plan.most_lanes, lambda phase, reply: told(phase, reply, 0))
    try:
        seen.resets_cache = server.reset_prefix_cache()
        told("warm-up", None, 0)
        prober.warm_up()
        for repetition in range(plan.repetitions):
            of_round = f"round {repetition + 1} of {plan.repetitions}"
            told(f"{of_round}: probes", None, 0)
            prober.round(seen.rows)
            runs = _Runs(server, held_out, plan, repetition, told)
            if seen.saturation_per_s is None:
                told("saturation", None, len(held_out.slices[0]))
                seen.saturation_per_s = runs.saturation_per_s()
            for share in plan.shares:
                told(f"{of_round}: {share:g} of saturation", None, len(held_out.slices[1]))
                seen.held_out.append(runs.serve(1, share, seen.saturation_per_s))
    except KeyboardInterrupt:
        seen.ended_by = "interrupted"
    except CalibrationError as error:
        if not seen.held_out:
            raise
        seen.ended_by = str(error)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Serves slices of the trace, each time with prompts of their own."""

    server: ServedModel
    held_out: HeldOut
    plan: StudyPlan
    repetition: int
    told: Told

    def saturation_per_s(self) -> float:
        """Requests a second of the first slice with all clients busy."""
        traced = self.held_out.timed(0, 1.0, self.plan.seed)
        inquiries = [replace(self.held_out.inquiry(one, self._salt(0)), at_s=0.0) for one in traced]
        lanes = [inquiries[k :: self.plan.most_lanes] for k in range(min(self.plan.most_lanes, len(inquiries)))]
        found = [reply for lane in self.server.replies(lanes, self._note) for reply in lane]
        done_s = [reply.times_s[-1] for reply in found if reply.failure is None]
        if not done_s:
            raise CalibrationError(f"the server refuses all of {len(found)} requests: {found[0].failure}")
        return len(done_s) / max(done_s)

    def serve(self, which: int, share: float, saturation_per_s: float) -> ServedRun:
        """A slice at a share of the saturation.

        Raises:
            CalibrationError: when no request is answered.
        """
        self.server.reset_prefix_cache()
        rate_per_s = share * saturation_per_s
        traced = self.held_out.timed(which, rate_per_s, self.plan.seed + which)
        before = self.server.reused_tokens()
        salt = self._salt(1 + which + round(1000 * share))
        lanes = [[self.held_out.inquiry(one, salt)] for one in traced]
        replies = [reply for (reply,) in self.server.replies(lanes, self._note)]
        if all(reply.failure is not None for reply in replies):
            raise CalibrationError(f"the server refuses all of {len(replies)} requests: {replies[0].failure}")
        after = self.server.reused_tokens()
        cached_tokens = [reply.cached_tokens for reply in replies if reply.cached_tokens is not None]
        reused = None if before is None or after is None else after - before
        if cached_tokens:
            reused = float(sum(cached_tokens))
        return ServedRun(rate_per_s, share, tuple(traced), tuple(replies), reused)

    def _note(self, reply: Reply) -> None:
        self.told("", reply, 0)

    def _salt(self, run: int) -> int:
        return self.plan.salt * 1_000_003 + self.repetition * 100_003 + run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibrated:
    """What was observed, the model that fits it, and its errors."""

    seen: Observed
    settings: ServerSettings
    fitted: Fitted
    notes: tuple[str, ...]
    rates: tuple[dict[str, Any], ...]
    """By rate, see `prediction.at_one_rate`."""


def conclude(seen: Observed, settings: ServerSettings, plan: StudyPlan) -> Calibrated:
    """Fit what was observed, and predict the held-out runs.

    Raises:
        CalibrationError: when too little was observed to fit, or the settings cannot be simulated.
    """
    if not seen.rows.prompts or not seen.rows.steps:
        raise CalibrationError("nothing was observed that could be fitted; let the first probes end")
    settings, notes = _with_prefixes(seen.rows, settings)
    best = fitted(seen.rows, settings)
    rates = [
        at_one_rate(runs, best, settings, seed=plan.seed)
        for share in dict.fromkeys(run.share for run in seen.held_out)
        if (runs := [run for run in seen.held_out if run.share == share])
    ]
    notes += [f"not observed: {why}" for why in dict.fromkeys(seen.rows.skipped)]
    notes += _warnings(seen, rates)
    return Calibrated(
        seen=seen,
        settings=settings,
        fitted=best,
        notes=(*best.untold, *notes),
        rates=tuple(rates),
    )


def _with_prefixes(rows: Rows, settings: ServerSettings) -> tuple[ServerSettings, list[str]]:
    """Whether prefixes are found is observed; what was said to the contrary is corrected, and noted."""
    if not rows.again:
        return settings, []
    finds = 2 * len([row for row in rows.again if row.is_found]) > len(rows.again)
    if finds == settings.prefix_caching:
        return settings, []
    said = "are found" if finds else "are not found"
    return replace(settings, prefix_caching=finds), [
        f"prefixes of prompts sent twice {said}, and are simulated so"
    ]


def _warnings(seen: Observed, rates: Sequence[dict[str, Any]]) -> list[str]:
    found = list[str]()
    spread_tokens = seen.rows.spread_tokens + sum(run.spread_tokens for run in seen.held_out)
    if spread_tokens:
        found.append(f"{spread_tokens} tokens came several in one event: their times are spread evenly")
    foreign = max((each["foreign_tokens"] for each in rates), default=0.0)
    if foreign:
        found.append(
            f"up to {foreign:.0f} tokens of a run were found in the cache that only earlier runs can have left"
        )
    late_s = max((run.late_s for run in seen.held_out), default=0.0)
    if late_s > _LATE_S:
        found.append(f"the clients sent a request up to {1e3 * late_s:.0f} ms after its time: they cannot keep up")
    unanswered = sum(len(run.replies) - len(run.answered) for run in seen.held_out)
    if unanswered:
        found.append(f"{unanswered} requests were refused; they are in no number")
    return found
