"""What a cluster asks of the system that starts its workers. `local` starts processes of this machine."""

import socket
from typing import Protocol

from mooncake_lab.serving.spec import LiveSpec, WorkerSpec


class WorkerError(RuntimeError):
    """A worker could not be started."""


class LaunchedWorker(Protocol):
    """A worker that was started."""

    def kill(self) -> None:
        """End it, unless it is no longer this worker."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is no longer this worker; whether that came to be in time."""
        ...

    def reason(self) -> str:
        """Why it ended."""
        ...


class Launcher(Protocol):
    """Starts workers."""

    def check(self, spec: LiveSpec) -> None:
        """Raise ValueError for a cluster that it cannot start workers for."""
        ...

    def launch(self, spec: WorkerSpec, control: socket.socket) -> LaunchedWorker:
        """Start a worker that holds one end of its control connection."""
        ...

    def keep_spares(self) -> None:
        """Prepare replacements from now on."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...
