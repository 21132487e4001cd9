"""Ways to move bytes into another process of this machine; each is measured by the same clock, and checked."""

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
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.bench.transfer_peer import pieces_of

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
    from mooncake_lab.store.backends.mooncake_client import open_engine

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


WAYS: Final[Mapping[str, Callable[[Area], contextlib.AbstractContextManager[Route]]]] = MappingProxyType(
    {"shared memory": _shared, "socket": _socket, "mooncake": _mooncake}
)
"""Ways by name, each opened with the memory that is sent from."""
