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
from datetime import timedelta
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
    from mooncake_lab.net.mooncake_wheel import open_engine

    area = np.zeros(room_bytes, np.uint8)
    engine = open_engine(area)
    say([f"127.0.0.1:{engine.get_rpc_port()}", area.ctypes.data])

    def take(_size: int) -> None:
        """Bytes are written into our memory; the engine must live as long."""
        _ = engine

    return area, take


def _gloo(room_bytes: int, meeting: str) -> tuple[Area, Take]:
    area = np.zeros(room_bytes, np.uint8)
    say(None)
    meet_over_gloo(meeting, rank=1)
    return area, lambda size: move_over_gloo(area, size, receives=True)


def meet_over_gloo(meeting: str, *, rank: int) -> None:
    """Connect two processes, which name the same file, through torch.distributed."""
    from torch import distributed

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )


def move_over_gloo(area: Area, size: int, *, receives: bool) -> None:
    """Send bytes to the other process, or receive them: each piece is a tensor, and all move at once."""
    import torch
    from torch import distributed

    begin = distributed.irecv if receives else distributed.isend
    other = 0 if receives else 1
    waits = [begin(torch.from_numpy(area[piece]), other, tag=tag) for tag, piece in enumerate(pieces_of(size))]
    for wait in waits:
        assert wait is not None  # noqa: S101  # both are of this group
        wait.wait()


def pieces_of(size_bytes: int) -> list[slice]:
    """Equal pieces of a transfer, as many as the paper's setting allows; the last may be longer."""
    count = min(MOST_PIECES, max(1, size_bytes // LEAST_BYTES))
    step = size_bytes // count
    return [slice(i * step, size_bytes if i == count - 1 else (i + 1) * step) for i in range(count)]


_WAYS: Final[Mapping[str, Callable[[int, str], tuple[Area, Take]]]] = MappingProxyType(
    {"shared memory": _shared, "socket": _socket, "mooncake": _mooncake, "gloo": _gloo}
)


def say(what: object) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(way: str, room_bytes: int, detail: str) -> None:
    """Follow stdin until it closes, and exit hard: threads of Gloo and Mooncake do not end by themselves."""
    area, take = _WAYS[way](room_bytes, detail)
    for line in sys.stdin:
        order, size = line.split()
        if order == "take":
            take(int(size))
        say(zlib.crc32(area[: int(size)].data) if order == "sum" else "ok")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
