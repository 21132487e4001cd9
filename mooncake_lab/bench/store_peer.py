"""The other side of a measurement: a process that lends an arena and runs a bare socket beside it.

It reads a token from stdin, prints the two ports, and ends when stdin closes.
"""

import socket
import struct
import sys
import threading
from typing import Final

import numpy as np

from mooncake_lab.core import MIB
from mooncake_lab.store.backends import BlockServer, DramBackend

ORDER: Final = struct.Struct("<cQ")
"""What a client of the bare socket asks: w to take or r to send, and how many bytes; w is answered by one byte."""


def main(arena_bytes: int) -> None:
    """Serve until stdin closes."""
    token = bytes.fromhex(sys.stdin.readline().strip())
    arena = DramBackend(arena_bytes)
    with BlockServer(arena, token) as server, socket.create_server(("127.0.0.1", 0)) as bare:
        threading.Thread(target=_bare, args=(bare,), daemon=True).start()
        sys.stdout.write(f"{server.address[1]} {bare.getsockname()[1]}\n")
        sys.stdout.flush()
        sys.stdin.read()


def _bare(listener: socket.socket) -> None:
    """Take and send bytes as fast as a plain socket can, out of an area that is larger than the caches."""
    peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    area = np.ones(256 * MIB, np.uint8).data
    at = 0
    while order := peer.recv(ORDER.size, socket.MSG_WAITALL):
        what, size = ORDER.unpack(order)
        at = at if at + size <= len(area) else 0
        place = area[at : at + size]
        at += size
        if what == b"r":
            peer.sendall(place)
            continue
        got = 0
        while got < size:
            got += peer.recv_into(place[got:])
        peer.sendall(b".")


if __name__ == "__main__":
    main(int(sys.argv[1]))
