"""Virtual time: callbacks in order of their times, and iterations that repeat as one formula."""

from collections.abc import Callable
from math import inf, nextafter, sqrt
from operator import attrgetter
from typing import Final, final

import msgspec
import simpy
from simpy.events import EventPriority

from mooncake_lab.batching import Plan
from mooncake_lab.core import DecodeStretch
from mooncake_lab.perf import LatencyModel

_LAST: Final = 2
"""The priority of what comes after all else that is due at its time; simpy's own are 0 and 1."""
_ROUNDING_S: Final = 1e-9
"""An iteration that ends so shortly before now may, by rounding, be still to end."""


def delay_until(at_s: float, now_s: float) -> float:
    """The delay after which it is exactly that moment, as far as floats have it; 0 where it is past."""
    if at_s <= now_s:
        return 0
    delay_s = at_s - now_s
    while now_s + delay_s < at_s:  # the difference was rounded
        delay_s = nextafter(delay_s, inf)
    while now_s + delay_s > at_s:
        delay_s = nextafter(delay_s, 0.0)
    return delay_s


class _Last(simpy.Event):
    """An event that comes after all else that is due at its time."""

    def __init__(self, env: simpy.Environment, delay_s: float) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, EventPriority(_LAST), delay_s)


@final
class EventLoop:
    """Runs callbacks in a simpy environment, in order of their times; those of one time run first in, first out.

    Mutable: time passes. An hour of traffic has about 100,000 callbacks, so one costs an event and nothing more.

    Args:
        env: an environment that others use too, such as simpy processes that are clients; None makes one.
    """

    __slots__ = ("env", "scheduled")

    now_s: float = property(attrgetter("env.now"))  # pyright: ignore[reportAssignmentType]  # read most often of all
    """Seconds since the environment began."""

    def __init__(self, env: simpy.Environment | None = None) -> None:
        self.env: Final = env or simpy.Environment()
        self.scheduled = 0
        """How many callbacks were ever scheduled."""

    def call_later(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        """Let a callback run `delay_s` seconds from now; after 0 s it runs after all that is due now.

        A callback an infinite time from now never runs.

        Raises:
            ValueError: when the delay is negative or not a number.
        """
        if not delay_s >= 0.0:
            raise ValueError(f"the delay of a callback is {delay_s!r} s; allowed are 0 and more")
        self.scheduled += 1
        if delay_s < inf:
            due = simpy.Timeout(self.env, delay_s)
            due.callbacks.append(lambda _: callback(*arguments))  # pyright: ignore[reportUnknownLambdaType]  # an event

    def call_last_at(self, at_s: float, callback: Callable[[], None]) -> None:
        """Let a callback run at a moment, after all else that is due then; at once where the moment is past."""
        self.scheduled += 1
        due = _Last(self.env, delay_until(at_s, self.env.now))
        due.callbacks.append(lambda _: callback())  # pyright: ignore[reportUnknownLambdaType]  # an event

    def run(self, until_s: float = inf) -> None:
        """Run what is due until nothing is left, or all before a moment, which is the present then."""
        if until_s > self.env.now:
            self.env.run(None if until_s == inf else until_s)


class Steady(msgspec.Struct, frozen=True, gc=False):
    """Iterations of an unchanged plan; iteration `k` from 0 lasts `first_s + k * growth_s`."""

    first_s: float
    growth_s: float = 0.0

    def seconds(self, steps: int) -> float:
        """Seconds of the first `steps` of them; exactly their sum."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_before(self, steps: int, horizon_s: float, start_s: float) -> int:
        """How many of `steps` that begin at `start_s` end before a horizon; at least the one that begins then."""
        if horizon_s == inf or start_s + self.seconds(steps) < horizon_s:
            return steps
        steps = min(steps, self.steps_within(max(0.0, horizon_s - start_s)))
        while steps > 1 and start_s + self.seconds(steps) >= horizon_s:
            steps -= 1  # one that ends at the horizon is not before it
        return max(1, steps)

    def steps_within(self, seconds: float) -> int:
        """How many of them end within `seconds`.

        Raises:
            ValueError: when they take no time, so that no number of them fills any.
        """
        if seconds < self.first_s:
            return 0
        slope = self.first_s - self.growth_s / 2
        root = slope + sqrt(slope * slope + 2 * self.growth_s * seconds)
        if root <= 0:
            raise ValueError(f"iterations of {self.first_s!r} s; a positive time is needed")
        steps = int(2 * seconds / root)
        while self.seconds(steps + 1) <= seconds:  # undo rounding
            steps += 1
        while self.seconds(steps) > seconds:
            steps -= 1
        return steps


class Stretch(msgspec.Struct, frozen=True, gc=False):
    """Iterations of one plan on an instance: when the first began, how long they take, and how many."""

    start_s: float
    pace: Steady
    steps: int

    @property
    def end_s(self) -> float:
        """When the last one ends."""
        return self.start_s + self.pace.seconds(self.steps)

    def steps_ended(self, now_s: float) -> int:
        """How many of them have ended."""
        return min(self.steps, self.pace.steps_within(now_s - self.start_s - _ROUNDING_S))

    def cut(self, now_s: float) -> "Stretch":
        """The iteration under way is the last one."""
        steps = min(self.steps, self.pace.steps_within(now_s - self.start_s) + 1)
        return Stretch(self.start_s, self.pace, steps)

    def split(self, steps: int) -> "tuple[Stretch, Stretch]":
        """The first iterations and the others, as two stretches."""
        others = Steady(self.pace.first_s + steps * self.pace.growth_s, self.pace.growth_s)
        first = Stretch(self.start_s, self.pace, steps)
        return first, Stretch(first.end_s, others, self.steps - steps)

    def decoded(self, instance: str, now_s: float, request_ids: tuple[int, ...]) -> DecodeStretch:
        """The event that each of these requests has one more token from each of them."""
        return DecodeStretch(
            at_s=now_s,
            instance=instance,
            start_s=self.start_s,
            steps=self.steps,
            first_step_s=self.pace.first_s,
            step_growth_s=self.pace.growth_s,
            request_ids=request_ids,
        )


def pace_of(model: LatencyModel, plan: Plan, begun: int) -> Steady:
    """How long an iteration takes, and by how much the next one like it takes longer.

    Args:
        model: of the node.
        plan: of the iteration.
        begun: how many prompts the iteration begins; each costs the constant of a prefill.
    """
    hybrid = model.hybrid
    pieces, decodes, context_tokens = plan.work
    step_s = hybrid.batch_s(pieces, decodes, context_tokens)
    chunk = sum(new for new, _ in pieces)
    growth_s = hybrid.per_context_token_s * decodes + hybrid.per_token_squared_s * 2 * chunk * chunk
    return Steady(step_s + begun * model.prefill.constant_s, growth_s)
