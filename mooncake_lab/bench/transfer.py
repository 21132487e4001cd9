"""How fast bytes move between two processes of this machine, way by way, as FAST'25 Fig. 12 asks of two nodes.

All ways are open at once and take turns in every round, so that a busy machine slows all of them. What arrives is
compared with what was sent.
"""

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.bench.machine import Machine, describe_machine
from mooncake_lab.bench.rounds import Rounds, alternating_rounds, timed
from mooncake_lab.bench.transfer_peer import meet_over_gloo, move_over_gloo, pieces_of
from mooncake_lab.net.mooncake_wheel import MooncakeError

Area: TypeAlias = npt.NDArray[np.uint8]
Move: TypeAlias = Callable[[int], None]
"""Moves bytes from the beginning of our area to the beginning of the peer's."""


class TransferError(RuntimeError):
    """A way of moving bytes failed, or delivered others than were sent."""


@final
class Route:
    """One way into one peer. Mutable: it owns the peer's process.

    Args:
        process: the peer.
        area: what is sent from.
        move: the way.
    """

    def __init__(self, process: "subprocess.Popen[str]", area: Area, move: Move) -> None:
        self._process = process
        self._area = area
        self._move = move

    def send(self, size_bytes: int) -> None:
        """Move bytes; returns when the receiver says that it has all of them.

        Raises:
            TransferError: when the peer ended.
        """
        _order(self._process, f"take {size_bytes}")
        self._move(size_bytes)
        _answer(self._process)

    def check(self, size_bytes: int) -> None:
        """Compare what lies at both ends.

        Raises:
            TransferError: when they differ.
        """
        _order(self._process, f"sum {size_bytes}")
        theirs, ours = _answer(self._process), zlib.crc32(self._area[:size_bytes].data)
        if theirs != ours:
            raise TransferError(f"{size_bytes} bytes arrived with checksum {theirs}, and were sent with {ours}")


@contextlib.contextmanager
def receiver(command: Sequence[str], fds: tuple[int, ...] = ()) -> Generator[Any]:
    """A process that receives, and what it said first; it ends with the block.

    Raises:
        TransferError: when it ends before.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *command], stdin=pipe, stdout=pipe, text=True, pass_fds=fds) as process:  # noqa: S603  # our own
        try:
            yield process, _answer(process)
        finally:
            process.communicate()  # closes its stdin, upon which it ends


def _peer(way: str, area: Area, detail: object = "", fds: tuple[int, ...] = ()) -> Any:
    return receiver(["-m", "mooncake_lab.bench.transfer_peer", way, str(area.nbytes), str(detail)], fds)


def _order(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None  # noqa: S101  # asked for above
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _answer(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None  # noqa: S101  # asked for above
    line = process.stdout.readline()
    if not line:
        raise TransferError(f"the receiving process ended with code {process.wait()}")
    return json.loads(line)


@contextlib.contextmanager
def _shared(area: Area) -> Generator[Route]:
    """Memory that both processes see: the receiver's area is written by the sender, once."""
    memory = Path("/dev/shm")  # noqa: S108  # where Linux keeps what is shared; elsewhere a file of the page cache
    with tempfile.TemporaryFile(dir=memory if memory.is_dir() else None) as file:
        os.ftruncate(file.fileno(), area.nbytes)
        theirs = np.frombuffer(mmap.mmap(file.fileno(), area.nbytes), np.uint8)
        with _peer("shared memory", area, file.fileno(), (file.fileno(),)) as (process, _):
            yield Route(process, area, lambda size: np.copyto(theirs[:size], area[:size]))


@contextlib.contextmanager
def _socket(area: Area) -> Generator[Route]:
    """One TCP connection."""
    with _peer("socket", area) as (process, port), socket.create_connection(("127.0.0.1", port)) as to:
        to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Route(process, area, lambda size: to.sendall(area.data[:size]))


@contextlib.contextmanager
def _mooncake(area: Area) -> Generator[Route]:
    """Mooncake's Transfer Engine over TCP: it writes the pieces into the peer's memory."""
    from mooncake_lab.net.mooncake_wheel import open_engine

    engine = open_engine(area)
    with _peer("mooncake", area) as (process, (name, address)):
        ours = area.ctypes.data

        def move(size: int) -> None:
            pieces = pieces_of(size)
            starts, sizes = [piece.start for piece in pieces], [piece.stop - piece.start for piece in pieces]
            code = engine.batch_transfer_sync_write(
                name, [ours + at for at in starts], [address + at for at in starts], sizes
            )
            if code:
                raise TransferError(f"Mooncake's Transfer Engine cannot write {size} bytes: code {code}")

        yield Route(process, area, move)


@contextlib.contextmanager
def _gloo(area: Area) -> Generator[Route]:
    """Gloo, which torch.distributed uses between CPUs.

    Raises:
        TransferError: when the receiver ends, or the two do not meet.
    """
    from torch import distributed

    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        with _peer("gloo", area, meeting) as (process, _):
            meet_over_gloo(meeting, rank=0)
            try:
                yield Route(process, area, lambda size: move_over_gloo(area, size, receives=False))
            finally:
                distributed.destroy_process_group()


WAYS: Final[Mapping[str, Callable[[Area], contextlib.AbstractContextManager[Route]]]] = MappingProxyType(
    {"shared memory": _shared, "socket": _socket, "mooncake": _mooncake, "gloo": _gloo}
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
            except MooncakeError as error:  # Mooncake's wheel is an extra
                left_out[way] = str(error)
        times = []
        for size in sizes_bytes:
            works = {way: partial(_send_s, route, size) for way, route in routes.items()}
            taken = alternating_rounds(works, rounds)
            for way, route in routes.items():
                route.check(size)
                times.append(_row(way, size, taken))
    return TransferMeasurement(
        machine=describe_machine(), rounds=rounds, seed=seed, times=tuple(times), left_out=left_out
    )


def _send_s(route: Route, size: int, _round: int) -> float:
    return timed(partial(route.send, size))


def _row(way: str, size: int, taken: Rounds[str]) -> TransferTime:
    mine = taken.seconds[way]
    return TransferTime(
        way=way,
        size_bytes=size,
        pieces=len(pieces_of(size)),
        seconds=taken.median_s(way),
        least_s=min(mine),
        most_s=max(mine),
        over_socket=taken.ratio(way, "socket").median,
    )
