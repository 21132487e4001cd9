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
"""Returns when so many bytes are at the beginning of the area."""


def _nothing(_size: int) -> None:
    """Whoever writes into our memory says so only when it is done."""


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
    """Do what stdin says until it closes, and end the process: threads of Gloo and Mooncake wait for nobody."""
    for line in sys.stdin:
        order, size = line.split()
        if order == "take":
            take(int(size))
        say(zlib.crc32(area[: int(size)].data) if order == "sum" else "ok")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
