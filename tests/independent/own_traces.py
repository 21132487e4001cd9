"""Requests for the second simulator: the released traces, and twins where a trace is not released.

A trace is read by the package's reader, because the format of a file is no result. Twins are files that the
command line writes. Everything after that is computed here.
"""

import functools
import itertools
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mooncake_lab.workload import find_trace, read_trace

BLOCK = 512
"""Tokens of a block in all traces (FAST'25, Appendix A)."""


@dataclass(frozen=True)
class Job:
    """One request of a trace."""

    at: float
    """Arrival in seconds."""
    prompt: int
    answer: int
    blocks: tuple[int, ...]
    """Prefix-chained ids: the last one may stand for fewer than 512 tokens."""


def jobs_of(path: Path) -> tuple[Job, ...]:
    """The requests of a file."""
    trace = read_trace(path)
    columns = (trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist())
    return tuple(
        Job(at, prompt, answer, tuple(trace.blocks_of(i).tolist()))
        for i, (at, prompt, answer) in enumerate(zip(*columns, strict=True))
    )


@functools.cache
def released(name: str) -> tuple[Job, ...]:
    """A trace that the authors released.

    Raises:
        LookupError: when the file is not on this machine.
    """
    path = find_trace(name)
    if path is None:
        raise LookupError(f"the {name} trace is not on this machine; `make traces` fetches it")
    return jobs_of(path)


@functools.cache
def twin(name: str, seed: int = 0) -> tuple[Job, ...]:
    """The twin of a trace, through a file as any other program would get it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "twin.jsonl"
        command = [sys.executable, "-m", "mooncake_lab", "trace", "synth"]
        subprocess.run(
            [*command, "--like", name, "--seed", str(seed), "--output", str(path)], check=True, capture_output=True
        )
        return jobs_of(path)


def faster(jobs: Iterable[Job], speed: float) -> tuple[Job, ...]:
    """The same requests, replayed `speed` times as fast."""
    return tuple(replace(job, at=job.at / speed) for job in jobs)


def spread(jobs: Sequence[Job], seed: int) -> tuple[Job, ...]:
    """Arrivals that share a moment, spread evenly at random up to the next moment of the trace, in their order.

    A recorder that writes only every few seconds gives many requests one time. The step is the commonest distance
    between two different times, so that a quiet minute does not stretch the last requests before it.
    """
    times = sorted({job.at for job in jobs})
    gaps = [round(after - before, 3) for before, after in itertools.pairwise(times)]
    step = max(set(gaps), key=gaps.count)
    draw = random.Random(seed)
    moved: list[Job] = []
    for at, group in itertools.groupby(jobs, key=lambda job: job.at):
        same = list(group)
        offsets = sorted(draw.uniform(0, step) for _ in same)
        moved += [replace(job, at=at + offset) for job, offset in zip(same, offsets, strict=True)]
    return tuple(moved)


def poisson(jobs: Sequence[Job]) -> bool:
    """Whether nearly every request has a moment of its own, so that there is nothing to spread."""
    return len({job.at for job in jobs}) > 0.9 * len(jobs)


def as_replayed(name: str, seed: int = 0) -> tuple[Job, ...]:
    """A workload of FAST'25 whole, with arrivals spread over the recorder's ticks where it has any."""
    jobs = twin(name) if name == "toolagent" else released(name)
    return jobs if poisson(jobs) else spread(jobs, seed)
