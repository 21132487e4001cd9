"""The other side of a measurement: a process that lends an arena.

It reads a token from stdin, prints its port, and ends when stdin closes.
"""

import sys

from mooncake_lab.store.backends import BlockServer, DramBackend


def main(arena_bytes: int) -> None:
    """Serve until stdin closes."""
    token = bytes.fromhex(sys.stdin.readline().strip())
    with BlockServer(DramBackend(arena_bytes), token) as server:
        sys.stdout.write(f"{server.address[1]}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
