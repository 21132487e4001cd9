"""The cluster's side of the nursery: start it, and have workers born in it."""

import os
import socket
import subprocess
import sys
import threading
from typing import Final, Self, final

import msgspec

from mooncake_lab.serving.spec import LiveSpec, WorkerSpec

MOST_BYTES: Final = 2**16
_FAREWELL_S: Final = 3.0


class Cradle(msgspec.Struct, frozen=True, kw_only=True):
    """What a nursery prepares: one model, for all workers it will bear."""

    model: str
    seed: int
    device: str
    dtype: str | None
    backend: str
    positions: int
    threads: int


def cradle_for(spec: LiveSpec) -> Cradle:
    """What the workers of a cluster need."""
    return Cradle(
        model=spec.model,
        seed=spec.seed,
        device=spec.device,
        dtype=spec.dtype,
        backend=spec.backend,
        positions=spec.max_request_tokens,
        threads=spec.threads,
    )


@final
class Nursery:
    """A process that has loaded torch and a model, and forks workers (see `nursery`).

    It may serve several clusters, one after the other or at once: the second one starts in a fraction of a second.
    It starts when it is first needed, and again when it died. Mutable: it owns a process; any thread may use it.

    Args:
        spec: of a cluster; others must agree with it in model, seed, device, numbers, longest context and threads.
    """

    def __init__(self, spec: LiveSpec) -> None:
        self._cradle = cradle_for(spec)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._home: socket.socket | None = None
        self._loading: subprocess.Popen[bytes] | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def check(self, spec: LiveSpec) -> None:
        """Refuse a cluster that this nursery is not for.

        Raises:
            ValueError: naming both.
        """
        if cradle_for(spec) != self._cradle:
            raise ValueError(f"a nursery for {self._cradle} cannot bear workers for {cradle_for(spec)}")

    def open(self) -> None:
        """Start it, unless it runs; returns when the model is loaded.

        Raises:
            ValueError: when the model cannot be loaded.
            ConnectionError: when it is closed, or closed meanwhile.
        """
        with self._lock:
            if self._closed:
                raise ConnectionError("the nursery is closed")
            if self._process is not None and self._process.poll() is None:
                return
            if self._home is not None:
                self._home.close()
            self._home, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603  # our own module
                    [sys.executable, "-m", "mooncake_lab.serving.nursery", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    env=_environment(self._cradle.threads),
                )
            self._loading = self._process
            if self._closed:  # since we looked: whoever closes it did not see that it loads
                self._process.kill()
            try:
                self._home.send(msgspec.json.encode(self._cradle))
                answer = self._home.recv(MOST_BYTES)
            finally:
                self._loading = None
            if answer != b"ready":
                self._process.wait()
                raise ValueError(answer.decode() or "the process that bears workers ended before it was ready")

    def bear(self, spec: WorkerSpec, control: socket.socket) -> None:
        """Have a worker born that holds one end of its control connection; `open` comes first.

        Raises:
            OSError: when the nursery has died.
        """
        with self._lock:
            if self._home is None:
                raise ConnectionError("the nursery is closed")
            socket.send_fds(self._home, [msgspec.msgpack.encode(spec)], [control.fileno()])

    def close(self) -> None:
        """End it for good, also while it loads; workers that still live die with it."""
        self._closed = True
        loading = self._loading
        if loading is not None:
            loading.kill()  # whoever waits for it holds the lock
        with self._lock:
            if self._home is not None:
                self._home.close()
                self._home = None
            if self._process is not None:
                try:
                    self._process.wait(_FAREWELL_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                self._process = None


def _environment(threads: int) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),
        "NUMBA_THREADING_LAYER": "workqueue",  # the one that survives a fork
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking for GPUs must not open them before a fork
    }
