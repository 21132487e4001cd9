"""Floors: the plainest way to move bytes through memory, a file and a socket; what media are compared with."""

import contextlib
import os
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake_lab.bench.store_peer import ORDER

Blocks: TypeAlias = list[list[npt.NDArray[np.uint8]]]
"""The layers of each block."""
Pass: TypeAlias = Callable[[], None]
"""Moves all blocks once."""


def copy(source: Blocks, target: Blocks) -> None:
    """Copy every layer from memory to memory."""
    for old, new in zip(source, target, strict=True):
        for one, other in zip(old, new, strict=True):
            np.copyto(other, one)


def writing(file: int, source: Blocks, batch: int) -> Pass:
    """Write blocks one behind the other, syncing after every `batch`."""

    def write() -> None:
        at = 0
        for number, layers in enumerate(source, start=1):
            at += os.pwritev(file, [layer.data for layer in layers], at)
            if number % batch == 0 or number == len(source):
                os.fdatasync(file)

    return write


def reading(file: int, target: Blocks) -> Pass:
    """Read blocks one behind the other."""

    def read() -> None:
        at = 0
        for layers in target:
            at += os.preadv(file, [layer.data for layer in layers], at)

    return read


def forgetting(plain: int, slab: Path) -> Pass:
    """Ask the page cache to drop both files."""

    def forget() -> None:
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_DONTNEED)
        forget_pages(slab)

    return forget


def forget_pages(path: Path) -> None:
    """Ask the page cache to drop a file; what is not yet on the device stays."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def send(peer: socket.socket, source: Blocks) -> None:
    """Send blocks to the bare socket of `measure_peer`, each acknowledged by a byte."""
    for layers in source:
        peer.sendall(ORDER.pack(b"w", sum(layer.nbytes for layer in layers)))
        for layer in layers:
            peer.sendall(layer.data)
        peer.recv(1)


def receive(peer: socket.socket, target: Blocks) -> None:
    """Have the bare socket of `measure_peer` send blocks."""
    for layers in target:
        peer.sendall(ORDER.pack(b"r", sum(layer.nbytes for layer in layers)))
        for layer in layers:
            got = 0
            while got < layer.nbytes:
                got += peer.recv_into(layer.data[got:])


@contextlib.contextmanager
def plain_file(path: Path, size: int) -> Generator[tuple[int, int | None]]:
    """A preallocated file through the page cache, and around it where the file system can."""
    cached = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(cached, 0, size)
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        direct = None
    try:
        yield cached, direct
    finally:
        for file in (cached, direct):
            if file is not None:
                os.close(file)
