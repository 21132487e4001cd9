"""The program of a shared store: lends memory of this machine to other processes until its standard input closes.

Arguments: the process id of its parent, with which it ends; `remote` for our block server or `mooncake` for a
Mooncake Store; and the bytes to lend. The first line of standard input is the secret of the block server in
hexadecimal digits. It answers with one line: the address, or `error: ` and the reason.
"""

import os
import select
import sys
from typing import Final

from mooncake_lab.core import MIB
from mooncake_lab.core.process import end_with_parent
from mooncake_lab.net.mooncake_wheel import MooncakeMaster
from mooncake_lab.store.backends.base import StorageError
from mooncake_lab.store.backends.dram import DramBackend
from mooncake_lab.store.backends.mooncake import MooncakeClient
from mooncake_lab.store.backends.remote_server import BlockServer

ERROR: Final = "error: "
_LOOK_S: Final = 0.5
_LEAST_SEGMENT_BYTES: Final = 16 * MIB
"""Mooncake takes no smaller segment."""


def main(kind: str, capacity_bytes: int) -> int:
    """Lend memory; the exit status."""
    token = bytes.fromhex(sys.stdin.readline())
    try:
        if kind == "remote":
            _lend_dram(capacity_bytes, token)
        else:
            _lend_to_mooncake(capacity_bytes)
    except (StorageError, OSError, ValueError, MemoryError) as error:
        _say(f"{ERROR}{error}")
        return 1
    return 0


def _lend_dram(capacity_bytes: int, token: bytes) -> None:
    with BlockServer(DramBackend(capacity_bytes), token) as server:
        host, port = server.address
        _say(f"{host}:{port}")
        sys.stdin.read()


def _lend_to_mooncake(capacity_bytes: int) -> None:
    """Run a master and be its only provider of memory; when the master is gone, so is this process."""
    segment_bytes = max(capacity_bytes, _LEAST_SEGMENT_BYTES)
    with MooncakeMaster() as master, MooncakeClient(master.address, segment_bytes):
        _say(master.address)
        while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
            if not master.is_running:
                os._exit(1)  # a client that leaves without its master would wait for it


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    sys.exit(main(sys.argv[2], int(sys.argv[3])))
