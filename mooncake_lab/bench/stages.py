"""Measure the two stages for real: seconds of a prefill over prompt lengths, of a decode step over batches.

    python -m mooncake_lab.bench.stages --model lab-30m --output data/measured/cpu_stages.json

Every point is measured once per round, and rounds are repeated. A temporary slowdown of the machine then affects
all points a little instead of one point a lot. The reported values are medians over the rounds.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import msgspec
import numpy as np
import torch

from mooncake_lab.bench.machine import Machine, describe_machine, measure_peaks
from mooncake_lab.engine.reference import Clock, ReferenceEngine, ReferencePrefill, Tokens
from mooncake_lab.perf import Hardware, ModelShape, model_shape

Stage = Literal["prefill", "decode"]
ClockName = Literal["wall", "processor"]

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
        return StageMeasurement(
            model=shape.name,
            bytes_per_element=shape.bytes_per_element,
            seed=seed,
            clock=plan.clock,
            machine=describe_machine(device),
            hardware=_better(before, measure_peaks(device, clock=clock)),
            times=tuple(_summary(*point, seconds) for point, seconds in samples.items()),
        )


@contextmanager
def computing_threads(threads: int | None) -> Generator[None]:
    """Set the threads of torch for a while; `None` changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def _summary(stage: Stage, batch: int, tokens: int, seconds: Sequence[float]) -> StageTime:
    return StageTime(
        stage=stage,
        batch=batch,
        tokens=tokens,
        seconds=statistics.median(seconds),
        least_s=min(seconds),
        most_s=max(seconds),
        samples=len(seconds),
    )


def _better(first: Hardware, second: Hardware) -> Hardware:
    """The higher of two measured peaks, rate by rate: what was reached once can be reached."""
    return replace(
        first,
        bfloat16_flops_per_s=max(first.bfloat16_flops_per_s, second.bfloat16_flops_per_s),
        float32_flops_per_s=max(first.float32_flops_per_s, second.float32_flops_per_s),
        device_memory_bytes_per_s=max(first.device_memory_bytes_per_s, second.device_memory_bytes_per_s),
    )


def write_measurement(path: Path, measurement: StageMeasurement) -> None:
    """Write a measurement as JSON; the file appears complete or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(measurement), indent=1) + b"\n")
    partial.replace(path)


def read_measurement(path: Path) -> StageMeasurement:
    """Read a measurement.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=StageMeasurement)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: not a measurement of the stages: {error}") from error


DEFAULT_PLAN: Final = StagePlan(
    prefill_tokens=(128, 256, 512, 1024, 2048),
    decode_points=tuple((batch, context) for context in (256, 1024) for batch in (1, 2, 4, 8, 16)),
)
"""About half a minute for `lab-30m` on two idle cores."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this machine and write, or show, the result."""
    first_line = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m mooncake_lab.bench.stages", description=first_line)
    parser.add_argument("--model", default="lab-30m", help="a shape of perf.MODELS (default: lab-30m)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--rounds", type=int, default=DEFAULT_PLAN.rounds, help="repetitions of every point")
    parser.add_argument("--threads", type=int, help="that torch computes with (default: as many as it likes)")
    parser.add_argument(
        "--clock", choices=("wall", "processor"), default="wall", help="processor needs --threads 1"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--output", type=Path, help="JSON file to write; without it the result is shown")
    chosen = parser.parse_args(arguments)
    plan = replace(DEFAULT_PLAN, rounds=chosen.rounds, threads=chosen.threads, clock=chosen.clock)
    measured = measure_stages(model_shape(chosen.model), plan, seed=chosen.seed, device=chosen.device)
    if chosen.output:
        write_measurement(chosen.output, measured)
    else:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(measured), indent=1).decode() + "\n")


if __name__ == "__main__":
    main()
