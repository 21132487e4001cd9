"""The program of a worker process: load the model, then be one worker after the other.

Started by `local.WorkerProcesses` as a file, never by hand. Little is imported at first: the process is bound to
its parent at once, and a spare imports the rest at low priority, on a thread of its own.
"""

import contextlib
import ctypes
import gc
import logging
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mooncake_lab.engine import LlamaModel
    from mooncake_lab.serving.spec import ModelOptions, WorkerSpec

_PR_SET_NAME: Final = 15
_NICE: Final = 10
"""Added while a spare is prepared, on one thread: only root may return to a higher priority."""
_DISPENSABLE: Final = 500
"""Added to the `oom_score_adj` of a spare: half of the memory that there is."""
_MOST_OOM_SCORE: Final = 1000
_THREADS_END_S: Final = 3.0
_REASON_BYTES: Final = 2**15


def main() -> None:
    """Prepare, report that, and be a worker for each message until the launcher is gone.

    Arguments: the descriptor of the launcher's socket, the pid of the parent, and `background` for low priority.
    """
    from mooncake_lab.core.process import end_with_parent

    descriptor, parent, priority = sys.argv[1:]
    end_with_parent(int(parent))
    _set_title("spare-worker")
    logging.basicConfig(format="%(message)s")
    launcher = socket.socket(fileno=int(descriptor))
    launcher.set_inheritable(False)
    try:
        score = OomScore()
        if priority == "background":
            score.raise_()
            models = _prepare_in_background(launcher)
        else:
            models = _prepare(launcher)
        _serve(launcher, models, score)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the cluster is told why
        _fail(launcher, error)


class OomScore:
    """Which process the kernel kills first when memory runs out (Linux): one that waits, not one that serves.

    Args:
        path: of the score of this process; every process may raise it, and lower it to what it was before.
    """

    def __init__(self, path: Path = Path("/proc/self/oom_score_adj")) -> None:
        self._path = path
        self._before: str | None = None

    def raise_(self) -> None:
        """Let this process be killed before those that serve."""
        if self._before is not None:
            return
        with contextlib.suppress(OSError, ValueError):
            before = self._path.read_text().strip()
            # those that serve may have a score of their own; a process above it is killed before them
            self._path.write_text(str(min(_MOST_OOM_SCORE, max(0, int(before)) + _DISPENSABLE)))
            self._before = before

    def restore(self) -> None:
        """Let it be killed as late as before."""
        if self._before is not None:
            try:
                self._path.write_text(self._before)
            except OSError as error:
                logging.getLogger(__name__).warning(
                    "%s stays at its raised value, so that this worker is killed first when memory runs out: %s",
                    self._path,
                    error,
                )
            self._before = None


def _serve(launcher: socket.socket, models: "dict[str, LlamaModel]", score: OomScore) -> None:
    """Be one worker after the other."""
    import msgspec

    from mooncake_lab.serving.launch.local import MOST_BYTES, READY
    from mooncake_lab.serving.launch.memory import most_memory_bytes
    from mooncake_lab.serving.spec import WorkerSpec

    workers = 0
    while True:
        score.raise_()
        launcher.send(READY + f"{workers} {most_memory_bytes()}".encode())
        message, descriptors, _, _ = socket.recv_fds(launcher, MOST_BYTES, 1)
        if not message:
            os._exit(0)  # the launcher is closed; the destructors of torch take seconds
        score.restore()
        spec = msgspec.msgpack.decode(message, type=WorkerSpec)
        _set_title(spec.name)
        _work(socket.socket(fileno=descriptors[0]), spec, models)
        workers += 1
        if not _is_clean(spec):
            os._exit(0)
        _set_title("spare-worker")


def _prepare(launcher: socket.socket) -> "dict[str, LlamaModel]":
    """Import, load and warm up what the launcher's first message describes.

    The loaded model by its device: on a CPU one; on GPUs none yet, since the worker decides which GPU.
    """
    import msgspec
    import torch

    from mooncake_lab.engine import warm_up
    from mooncake_lab.serving import worker  # what it imports is part of the preparation
    from mooncake_lab.serving.launch.local import MOST_BYTES
    from mooncake_lab.serving.spec import ModelOptions

    del worker
    model = msgspec.msgpack.decode(launcher.recv(MOST_BYTES), type=ModelOptions)
    torch.set_num_threads(model.threads)
    if model.device.startswith("cuda") or (model.device == "auto" and torch.cuda.is_available()):
        return {}
    loaded = _load(model, model.device)
    warm_up(loaded)
    return {"cpu": loaded}


def _load(model: "ModelOptions", device: str) -> "LlamaModel":
    from mooncake_lab.engine import load_model

    return load_model(
        model.model,
        device=device,
        dtype=model.dtype,
        backend=model.backend,
        seed=model.seed,
        positions=model.max_model_len,
    )


def _prepare_in_background(launcher: socket.socket) -> "dict[str, LlamaModel]":
    """Prepare at low priority: on a thread that ends with the threads it started, and once more from this one.

    The second time nothing is compiled any more, and the threads that compute get this thread's priority.
    """
    lower = (_NICE,)  # on Linux the priority of this one thread, and of those that it starts
    with ThreadPoolExecutor(1, initializer=os.nice, initargs=lower) as executor:
        models = executor.submit(_prepare, launcher).result()
    from mooncake_lab.engine import warm_up

    for loaded in models.values():
        warm_up(loaded)
    return models


def _work(control: socket.socket, spec: "WorkerSpec", models: "dict[str, LlamaModel]") -> None:
    """Be a worker until it is told to stop."""
    from mooncake_lab.engine import warm_up
    from mooncake_lab.serving.worker import Worker

    place = _place(spec, models)
    if place not in models:  # a GPU
        models[place] = _load(spec, place)
        warm_up(models[place])  # else its first request waits for the kernels to be compiled
    with control:
        Worker(control, spec, models[place]).run()


def _place(spec: "WorkerSpec", models: "dict[str, LlamaModel]") -> str:
    """The device of a worker: GPUs in turn, so that several workers may share one."""
    import torch

    if "cpu" in models:
        return "cpu"
    return f"cuda:{spec.index % torch.cuda.device_count()}" if spec.device == "auto" else spec.device


def _is_clean(spec: "WorkerSpec") -> bool:
    """Whether nothing is left of a worker, so that the process can be another one."""
    if "mooncake" in {spec.transfer, spec.shared_store}:
        return False  # its engine has threads of its own, and no way to end them
    gc.collect()
    deadline_s = time.monotonic() + _THREADS_END_S
    while threading.active_count() > 1 and time.monotonic() < deadline_s:
        time.sleep(0.002)
    return threading.active_count() == 1


def _fail(launcher: socket.socket, error: BaseException) -> None:
    """Report why this process ends: bad input in one sentence, anything else with a traceback on stderr."""
    from mooncake_lab.store.backends.base import StorageError

    if isinstance(error, (ValueError, OSError, MemoryError, StorageError)):
        reason = str(error) or type(error).__name__
    else:
        logging.getLogger(__name__).error("a worker process failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
    try:
        launcher.send(reason.encode()[:_REASON_BYTES])
    finally:
        sys.stderr.flush()
        os._exit(1)


def _set_title(name: str) -> None:
    """Let `ps -o comm` and `top` show which worker this is (Linux; at most 15 bytes)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[3])  # where this package is, not the folder of this file
    main()
