"""Mooncake's own wheel (extra `mooncake`): how it is loaded, its master, and its Transfer Engine."""

import contextlib
import ctypes
import importlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, Self, final

from mooncake_lab.net.wire import Bytes

_HOST: Final = "127.0.0.1"
_LEASE_MS: Final = 10_000
"""How long an object that is read stays; a read that takes longer fails. It is Mooncake's default."""
_START_S: Final = 20.0
_STOP_S: Final = 10.0
_WATCHED: Final = '"$@" </dev/null >/dev/null 2>&1 & read -r _; kill -9 "$!" 2>/dev/null; wait "$!"'
"""Runs the master until stdin closes, which it does when this process is killed: even a stopped master ends."""
_INSTALL: Final = "apt-get install -y libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4"
_SILENT: Final = 4
"""Above glog's highest level, FATAL = 3."""


class MooncakeError(ConnectionError):
    """Mooncake's wheel cannot be loaded, or one of its parts does not start."""


@final
class MooncakeMaster:
    """A running `mooncake_master`: the index of a Mooncake Store (FAST'25 §3.2), without etcd. A context manager.

    It ends with this process in every case. Close its clients first: without their master they take ten seconds to
    close. Mutable: it owns a process.

    Raises:
        MooncakeError: when the wheel is missing, or the master does not answer in time.
    """

    def __init__(self) -> None:
        load_wheel()  # says what is missing
        self._port = _free_port()
        options = {
            "rpc_address": _HOST,
            "rpc_port": self._port,
            "metrics_host": _HOST,
            "metrics_port": _free_port(),
            "default_kv_lease_ttl": f"{_LEASE_MS}ms",
            "enable_metric_reporting": "false",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._process = subprocess.Popen(  # noqa: S603  # the wheel's own
            ["/bin/sh", "-c", _WATCHED, "sh", str(_package() / "mooncake_master"), *flags],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # where the shell would report a killed master
        )
        try:
            self._await_start()
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"{_HOST}:{self._port}"

    @property
    def is_running(self) -> bool:
        """Whether it accepts connections; the shell that watches it may outlast it."""
        with contextlib.suppress(OSError), socket.create_connection((_HOST, self._port), 1):
            return True
        return False

    def stop(self) -> None:
        """End it. Stopping twice is allowed."""
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

    def _await_start(self) -> None:
        ends_s = time.monotonic() + _START_S
        while not self.is_running:
            if self._process.poll() is not None:
                raise MooncakeError(f"mooncake_master ended at once with status {self._process.returncode}")
            if time.monotonic() > ends_s:
                raise MooncakeError(f"mooncake_master does not answer on port {self._port} after {_START_S:g} s")
            time.sleep(0.02)


def open_engine(area: Bytes) -> Any:
    """A Transfer Engine of this process that may read and write `area`; peers connect without a directory.

    Raises:
        MooncakeError: when the wheel cannot be loaded, or the engine does not start.
    """
    load_wheel()  # says what is missing, and keeps its log quiet
    from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingTypeStubs]

    engine: Any = TransferEngine()
    for step, code in (
        ("start", engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")),
        ("register memory", engine.register_memory(area.ctypes.data, area.nbytes)),
    ):
        if code:
            raise MooncakeError(f"Mooncake's Transfer Engine cannot {step}: code {code}")
    return engine


def load_wheel() -> Any:
    """The module `mooncake.store`, with its log silenced unless MC_LOG_LEVEL asks for more than ERROR.

    Raises:
        MooncakeError: when the wheel or one of its system libraries is missing, with how to install it.
    """
    level = os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    was_loaded = "mooncake.store" in sys.modules
    try:
        module = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise MooncakeError(
            "Mooncake Store needs its wheel, which has Linux builds for Python 3.11 and 3.12:"
            " in the repository, pip install '.[mooncake]'"
        ) from error
    except ImportError as error:
        raise MooncakeError(
            f"Mooncake's wheel finds a system library missing ({error}); on Debian or Ubuntu: {_INSTALL}"
        ) from error
    if level == "ERROR" and not was_loaded:
        _silence(_package())
    return module


def _package() -> Path:
    """The folder of the wheel's package; loading it alone needs no system library."""
    return Path(str(importlib.import_module("mooncake").__file__)).parent


def _silence(package: Path) -> None:
    """Let the wheel's glog write neither to stderr nor to files; Mooncake has no setting for that."""
    for path in package.parent.glob("mooncake_transfer_engine*.libs/libglog*"):
        glog = ctypes.CDLL(str(path))
        glog["_ZN6google17InitGoogleLoggingEPKc"](b"mooncake")
        for level in range(_SILENT):
            glog["_ZN6google17SetLogDestinationEiPKc"](level, b"")
        ctypes.c_int32.in_dll(glog, "_ZN3fLI21FLAGS_stderrthresholdE").value = _SILENT


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
