"""How fast bytes move between two processes of this machine, way by way, as FAST'25 Fig. 12 asks of two nodes.

    python -m mooncake_lab.bench.transfer --mib 1 4 16 64 --rounds 5

All ways are open at once and take turns in every round, so that a busy machine slows all of them.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np

from mooncake_lab.bench.machine import Machine, describe_machine
from mooncake_lab.bench.rounds import median_ratio, paired_rounds, timed
from mooncake_lab.bench.transfer_gloo import gloo
from mooncake_lab.bench.transfer_peer import pieces_of
from mooncake_lab.bench.transfer_ways import WAYS as LIGHT_WAYS
from mooncake_lab.bench.transfer_ways import Area, Route
from mooncake_lab.core import MIB
from mooncake_lab.store.backends import StorageError

WAYS: Final[Mapping[str, Callable[[Area], contextlib.AbstractContextManager[Route]]]] = MappingProxyType(
    {**LIGHT_WAYS, "gloo": gloo}
)
"""Ways by name, each opened with the memory that is sent from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTime:
    """One size moved one way; seconds are of single transfers."""

    way: str
    size_bytes: int
    pieces: int
    seconds: float
    """Median over the rounds."""
    least_s: float
    most_s: float
    over_socket: float
    """Median over the rounds of this way's seconds over the plain socket's in the same round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMeasurement:
    """All rows of one run, the machine, and what could not be measured."""

    machine: Machine
    rounds: int
    seed: int
    times: tuple[TransferTime, ...]
    left_out: dict[str, str]
    """Ways that this machine cannot go, each with the sentence that says why."""


def measure_transfers(
    *, ways: Sequence[str] = tuple(WAYS), sizes_bytes: Sequence[int], rounds: int = 5, seed: int = 0
) -> TransferMeasurement:
    """Time every way at every size; what arrives is compared with what was sent.

    Args:
        ways: names in `WAYS`; `socket` is always among them, as what the others are compared with.
        sizes_bytes: of single transfers.
        rounds: each visits every way once; one more warms up.
        seed: of the bytes.

    Raises:
        ValueError: when a way is unknown or a size not positive.
        TransferError: when bytes do not arrive as they were sent.
    """
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise ValueError(f"unknown way {unknown[0]!r}; allowed are {', '.join(WAYS)}")
    if not sizes_bytes or min(sizes_bytes) < 1 or rounds < 1:
        raise ValueError(f"sizes {tuple(sizes_bytes)!r} in {rounds} rounds; at least one of each, all positive")
    area = np.random.default_rng(seed).integers(0, 256, max(sizes_bytes), dtype=np.uint8)
    left_out: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        routes: dict[str, Route] = {}
        for way in WAYS:
            if way not in (*ways, "socket"):
                continue
            try:
                routes[way] = stack.enter_context(WAYS[way](area))
            except StorageError as error:  # Mooncake's wheel is an extra
                left_out[way] = str(error)
        times = []
        for size in sizes_bytes:
            taken = paired_rounds(partial(_time_once, routes, size), rounds)
            for way, route in routes.items():
                route.check(size)
                times.append(_row(way, size, taken))
    return TransferMeasurement(
        machine=describe_machine(), rounds=rounds, seed=seed, times=tuple(times), left_out=left_out
    )


def _time_once(routes: Mapping[str, Route], size: int) -> dict[str, float]:
    return {way: timed(partial(route.send, size)) for way, route in routes.items()}


def _row(way: str, size: int, taken: dict[str, list[float]]) -> TransferTime:
    mine = taken[way]
    return TransferTime(
        way=way,
        size_bytes=size,
        pieces=len(pieces_of(size)),
        seconds=statistics.median(mine),
        least_s=min(mine),
        most_s=max(mine),
        over_socket=median_ratio(mine, taken["socket"]),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this machine and show, or write, the result."""
    first_line = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m mooncake_lab.bench.transfer", description=first_line)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64], help="sizes of transfers")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions")
    parser.add_argument("--output", type=Path, help="JSON file to write, for data/measured")
    chosen = parser.parse_args(arguments)
    measured = measure_transfers(
        ways=chosen.ways, sizes_bytes=[size * MIB for size in chosen.mib], rounds=chosen.rounds
    )
    if chosen.output:
        chosen.output.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
    lines = [
        f"{row.way:14} {row.size_bytes / MIB:6.0f} MiB {1e3 * row.seconds:9.2f} ms"
        f" {row.size_bytes / row.seconds / 1e9:7.2f} GB/s {row.over_socket:7.2f} x socket"
        for row in measured.times
    ]
    lines += [f"{way} is left out: {why}" for way, why in measured.left_out.items()]
    sys.stdout.write("\n".join([*lines, str(measured.machine)]) + "\n")


if __name__ == "__main__":
    main()
