"""A Mooncake master of our own, on loopback and without etcd, and the one client that a process has of it."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from typing import Any, Final, Self, final

from mooncake_lab.core import MIB
from mooncake_lab.store.media.medium import Buffer, MediumError, flat
from mooncake_lab.store.media.mooncake_wheel import load_wheel, master_binary

_HOST: Final = "127.0.0.1"
_START_S: Final = 20.0
_STOP_S: Final = 10.0
_WATCHED: Final = '"$@" </dev/null >/dev/null 2>&1 & read -r _; kill "$!" 2>/dev/null; wait "$!"'
"""Runs the master until stdin closes: when we stop it, and when we are killed; so it is never orphaned."""


@final
class MooncakeMaster:
    """A running `mooncake_master`: who holds what in a Mooncake Store (FAST'25 §3.2). A context manager.

    It ends with this process however that ends. Clients are closed before it: without their master they take ten
    seconds to close. Mutable: it owns a process.

    Args:
        lease_ms: how long an object that is read stays; a read that takes longer fails. 10 s is their default.

    Raises:
        MediumError: when the wheel is missing, or the master does not answer in time.
    """

    def __init__(self, *, lease_ms: int = 10_000) -> None:
        load_wheel()  # says what is missing
        self.port = _free_port()
        self._clients: list[MooncakeClient] = []
        options = {
            "rpc_address": _HOST,
            "rpc_port": self.port,
            "metrics_host": _HOST,
            "metrics_port": _free_port(),
            "default_kv_lease_ttl": f"{lease_ms}ms",
            "enable_metric_reporting": "false",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = ["/bin/sh", "-c", _WATCHED, "sh", str(master_binary()), *flags]
        self._process = subprocess.Popen(  # noqa: S603  # the wheel's own
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # where the shell would mourn a killed master
        )
        try:
            _await_port(self.port, self._process)
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """Where clients find it."""
        return f"{_HOST}:{self.port}"

    def client(self, segment_bytes: int) -> "MooncakeClient":
        """A client of it, which is closed before it stops."""
        made = MooncakeClient(self.address, segment_bytes)
        self._clients.append(made)
        return made

    def stop(self) -> None:
        """Close its clients, and end it. Stopping twice is fine."""
        while self._clients:
            self._clients.pop().close()
        assert self._process.stdin is not None  # noqa: S101  # it was asked for
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()


@final
class MooncakeClient:
    """This process in a Mooncake Store: it lends a segment of its memory, and reads and writes all segments.

    A process should have one; several media may use it. Close it before its master ends. Mutable: a connection.

    Args:
        master: address of the master.
        segment_bytes: memory that it lends; 0 lends nothing. At least 16 MiB otherwise.
        host: the address at which others reach its memory.

    Raises:
        MediumError: when the wheel is missing, or the master cannot be reached.
    """

    def __init__(self, master: str, segment_bytes: int, *, host: str = _HOST) -> None:
        wheel = load_wheel()
        self.api: Any = wheel.MooncakeDistributedStore()
        """Mooncake's own interface."""
        self.pinned: Any = wheel.ReplicateConfig()
        """Asks that an object is never evicted: a medium does not forget what was committed."""
        self.pinned.with_hard_pin = True
        code = self.api.setup(host, "P2PHANDSHAKE", segment_bytes, 16 * MIB, "tcp", "", master)
        if code:
            self.api.close()
            raise MediumError(f"the Mooncake master at {master} cannot be joined: code {code}")
        self._is_open = True

    @contextlib.contextmanager
    def registered(self, *buffers: Buffer) -> Generator[None]:
        """Register memory with the transfer engine for a while: RDMA needs it, TCP works without.

        Raises:
            MediumError: when it refuses.
        """
        arrays = [flat(buffer) for buffer in buffers]
        done: Sequence[int] = []
        try:
            for array in arrays:
                code = self.api.register_buffer(array.ctypes.data, array.nbytes)
                if code:
                    raise MediumError(f"Mooncake cannot register {array.nbytes} bytes: code {code}")
                done = [*done, array.ctypes.data]
            yield
        finally:
            for pointer in done:
                self.api.unregister_buffer(pointer)

    def close(self) -> None:
        """Leave the store and take the segment back. Closing twice is fine."""
        if self._is_open:
            self._is_open = False
            self.api.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _await_port(port: int, process: "subprocess.Popen[bytes]") -> None:
    ends_s = time.monotonic() + _START_S
    while time.monotonic() < ends_s:
        if process.poll() is not None:
            raise MediumError(f"mooncake_master ended at once with status {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port), 1):
            return
        time.sleep(0.02)
    raise MediumError(f"mooncake_master does not answer on port {port} after {_START_S:g} s")
