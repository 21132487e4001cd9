"""The process that receives: it lends an area of memory to one way of moving bytes, and says what arrived.

It prints one line of JSON, what the sender must know. Then it answers orders from stdin, a line each: `take N` if
N bytes are there, `sum N` with a checksum of the first N bytes. It ends when stdin closes.
"""

import json
import mmap
import os
import socket
import sys
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Area: TypeAlias = npt.NDArray[np.uint8]
Take: TypeAlias = Callable[[int], None]
"""Returns when this number of bytes is at the beginning of the area."""

LEAST_BYTES: Final = 128 * 1024
"""No piece is smaller (FAST'25 §5.4.1: a granularity of at least 128 KB)."""
MOST_PIECES: Final = 64
"""Pieces in flight at a time (FAST'25 §5.4.1: a concurrency of 64)."""


def _nothing(_size: int) -> None:
    """The sender writes into this memory and reports when it is done."""


def _shared(room_bytes: int, fd: str) -> tuple[Area, Take]:
    area = np.frombuffer(mmap.mmap(int(fd), room_bytes), np.uint8)
    say(None)
    return area, _nothing


def _socket(room_bytes: int, _detail: str) -> tuple[Area, Take]:
    area = np.zeros(room_bytes, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        say(listener.getsockname()[1])
        peer, _ = listener.accept()

    def take(size: int) -> None:
        got = 0
        while got < size:
            read = peer.recv_into(area.data[got:size])
            if not read:
                raise ConnectionError(f"the sender left after {got} of {size} bytes")
            got += read

    return area, take


def _mooncake(room_bytes: int, _detail: str) -> tuple[Area, Take]:
    from mooncake_lab.store.backends.mooncake_client import open_engine

    area = np.zeros(room_bytes, np.uint8)
    engine = open_engine(area)
    say([f"127.0.0.1:{engine.get_rpc_port()}", area.ctypes.data])

    def take(_size: int) -> None:
        """Bytes are written into our memory; the engine must live as long."""
        _ = engine

    return area, take


def pieces_of(size_bytes: int) -> list[slice]:
    """Equal pieces of a transfer, as many as the paper's setting allows; the last may be longer."""
    count = min(MOST_PIECES, max(1, size_bytes // LEAST_BYTES))
    step = size_bytes // count
    return [slice(i * step, size_bytes if i == count - 1 else (i + 1) * step) for i in range(count)]


_WAYS: Final[Mapping[str, Callable[[int, str], tuple[Area, Take]]]] = MappingProxyType(
    {"shared memory": _shared, "socket": _socket, "mooncake": _mooncake}
)


def say(what: object) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(way: str, room_bytes: int, detail: str) -> None:
    """Receive until stdin closes."""
    answer_orders(*_WAYS[way](room_bytes, detail))


def answer_orders(area: Area, take: Take) -> None:
    """Follow stdin until it closes, and exit hard: threads of Gloo and Mooncake do not end by themselves."""
    for line in sys.stdin:
        order, size = line.split()
        if order == "take":
            take(int(size))
        say(zlib.crc32(area[: int(size)].data) if order == "sum" else "ok")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
