"""What a cluster asks of the system that starts its workers. `local` starts processes of this machine."""

import socket
from typing import Final, Protocol

from mooncake_lab.serving.spec import WorkerSpec

LONGEST_PAUSE_S: Final = 10.0
"""Between two attempts to start a worker."""


def pause_before_restart_s(before_s: float, ran_s: float, *, longest_s: float = LONGEST_PAUSE_S) -> float:
    """How long to wait before a process is started again: none after a long run, else twice as long as before.

    Args:
        before_s: how long the last restart waited.
        ran_s: how long the process ran.
        longest_s: how long it may wait.
    """
    return 0.0 if ran_s > LONGEST_PAUSE_S else min(max(0.1, 2 * before_s), longest_s)


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

    def launch(self, spec: WorkerSpec, control: socket.socket) -> LaunchedWorker:
        """Start a worker that holds one end of its control connection.

        Raises:
            ValueError: when it starts no workers of this kind.
        """
        ...

    def keep_spares(self) -> None:
        """Prepare replacements from now on."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...
