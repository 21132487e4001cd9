"""Measure the two stages for real: seconds of a prefill over prompt lengths, of a decode step over batches.

Every point is measured once per round, and rounds are repeated. A temporary slowdown of the machine then affects
all points a little instead of one point a lot. The reported values are medians over the rounds.
"""

import copy
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import msgspec
import numpy as np

from mooncake_lab.bench.machine import Machine, describe_machine, measure_peaks
from mooncake_lab.bench.measuring import computing_threads
from mooncake_lab.engine.reference import Clock, ReferenceEngine, ReferencePrefill, Tokens
from mooncake_lab.perf import Hardware, ModelShape

Stage = Literal["prefill", "decode"]
ClockName = Literal["wall", "processor"]

_RATES: Final = ("bfloat16_flops_per_s", "float32_flops_per_s", "device_memory_bytes_per_s")
_CLOCKS: Final[Mapping[ClockName, Clock]] = MappingProxyType(
    {"wall": time.perf_counter, "processor": time.process_time}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Which points to measure, and how often.

    Raises:
        ValueError: when a number is below 1.
    """

    prefill_tokens: tuple[int, ...]
    """Prompt lengths."""
    decode_points: tuple[tuple[int, int], ...]
    """Pairs of batch size and context tokens of each request."""
    rounds: int = 5
    steps: int = 4
    """Decode steps a round; each starts from the same context."""
    threads: int | None = None
    """Threads that torch computes with; None leaves what is set. On a shared machine 1 is the steadiest."""
    clock: ClockName = "wall"
    """`processor` counts only the seconds this process computes, so neighbours on a busy machine do not
    count; it needs exactly one thread, and no device that computes by itself."""
    budget_s: float = 60.0
    """No new round begins later than this; one to warm up and one to count there always are."""

    def __post_init__(self) -> None:
        numbers = (
            *self.prefill_tokens,
            *(n for point in self.decode_points for n in point),
            self.rounds,
            self.steps,
            self.threads or 1,
        )
        if min(numbers) < 1:
            raise ValueError(f"a stage plan has {min(numbers)} among its numbers; all must be at least 1")
        if not self.budget_s > 0:
            raise ValueError(f"a stage plan has a budget of {self.budget_s!r} s; it must be positive")
        if self.clock == "processor" and self.threads != 1:
            raise ValueError(
                f"a stage plan reads the processor's clock with {self.threads} threads, which adds up the seconds"
                " of all; allowed is 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One measured point: the median over all rounds, and the fastest and slowest of them."""

    stage: Stage
    batch: int
    tokens: int
    """Prompt tokens of the prefill; cached tokens of each request of the decode step."""
    seconds: float
    least_s: float
    most_s: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasurement:
    """All points of one run, the machine, and the peaks it reached in the same run."""

    model: str
    bytes_per_element: int
    seed: int
    clock: ClockName
    machine: Machine
    hardware: Hardware
    times: tuple[StageTime, ...]

    @property
    def dtype(self) -> str:
        """The data type computed in, as `Hardware.flops_per_s` names it."""
        return {2: "bfloat16", 4: "float32"}[self.bytes_per_element]


def measure_stages(
    shape: ModelShape, plan: StagePlan, *, seed: int = 0, device: str = "cpu", clock: Clock | None = None
) -> StageMeasurement:
    """Measure a random model of this shape on this machine; the peaks first and last, the better of each kept.

    Args:
        shape: of the model.
        plan: what to measure.
        seed: of weights and prompt.
        device: `cpu` or `cuda`.
        clock: another source of seconds than the one the plan names.

    Raises:
        ValueError: when the plan reads the processor's clock and the device computes by itself.
    """
    if plan.clock == "processor" and device != "cpu":
        raise ValueError(f"a stage plan reads the processor's clock on device {device!r}; allowed is cpu")
    clock = clock or _CLOCKS[plan.clock]
    with computing_threads(plan.threads):
        before = measure_peaks(device, clock=clock)
        engine = ReferenceEngine(shape, seed=seed, device=device, clock=clock)
        samples = _samples(engine, plan, seed, clock)
        after = measure_peaks(device, clock=clock)
        return StageMeasurement(
            model=shape.name,
            bytes_per_element=shape.bytes_per_element,
            seed=seed,
            clock=plan.clock,
            machine=describe_machine(device),
            hardware=replace(
                before, **{rate: max(getattr(before, rate), getattr(after, rate)) for rate in _RATES}
            ),
            times=tuple(
                StageTime(
                    stage=stage,
                    batch=batch,
                    tokens=tokens,
                    seconds=statistics.median(seconds),
                    least_s=min(seconds),
                    most_s=max(seconds),
                    samples=len(seconds),
                )
                for (stage, batch, tokens), seconds in samples.items()
            ),
        )


def _samples(
    engine: ReferenceEngine, plan: StagePlan, seed: int, clock: Clock
) -> dict[tuple[Stage, int, int], list[float]]:
    """Seconds by stage, batch and tokens, from as many rounds as the budget allows."""
    longest = max(*plan.prefill_tokens, *(context for _, context in plan.decode_points))
    prompt = np.random.default_rng(seed).integers(0, engine.shape.vocabulary, longest)
    samples: dict[tuple[Stage, int, int], list[float]] = {}
    end_s = clock() + plan.budget_s
    for round_number in range(plan.rounds + 1):
        if round_number > 1 and clock() > end_s:
            break
        for stage, batch, tokens, seconds in _one_round(engine, plan, prompt):
            if round_number:  # round 0 warms up
                samples.setdefault((stage, batch, tokens), []).extend(seconds)
    return samples


def _one_round(
    engine: ReferenceEngine, plan: StagePlan, prompt: Tokens
) -> Iterator[tuple[Stage, int, int, list[float]]]:
    """One visit of every point; the prefill that a decode step needs first is measured as well."""
    for tokens in sorted({*plan.prefill_tokens, *(context for _, context in plan.decode_points)}):
        prefilled = engine.prefill(prompt[:tokens])
        yield "prefill", 1, tokens, [prefilled.seconds]
        for batch, context in plan.decode_points:
            if context == tokens:
                yield "decode", batch, context, _steps(engine, prefilled, batch, plan.steps)


def _steps(engine: ReferenceEngine, prefilled: ReferencePrefill, batch: int, steps: int) -> list[float]:
    """Seconds of single decode steps that each find exactly the prefilled context, `batch` times."""
    cache = copy.deepcopy(prefilled.cache)
    if batch > 1:
        cache.batch_repeat_interleave(batch)
    next_tokens = np.full(batch, prefilled.first_token)
    seconds: list[float] = []
    for _ in range(steps):
        seconds.append(float(engine.decode(cache, next_tokens, steps=1).seconds[0]))
        cache.crop(-1)
    return seconds


def read_measurement(path: Path) -> StageMeasurement:
    """Read a measurement.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=StageMeasurement)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: not a measurement of the stages: {error}") from error
