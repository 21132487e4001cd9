"""Where notebooks are executed: processes of this machine, or the workers of a Dask cluster.

A worker of a cluster works in the same folder as here, under the same path (a shared file system), with the same
environment; results come back through that folder.
"""

import os
import threading
from collections.abc import Generator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Final
from urllib.parse import urlsplit

PROCESSES: Final = "processes"
"""The executor of this machine."""

_DASK: Final = "dask"
_PRELOADED: Final = ("papermill", "mooncake_lab.batch.execute")


def check_executor(name: str) -> str:
    """The name as it is.

    Raises:
        ValueError: when it is neither `processes` nor `dask://HOST:PORT`.
    """
    parts = urlsplit(name)
    if name == PROCESSES or (parts.scheme == _DASK and parts.hostname and parts.port):
        return name
    raise ValueError(f"there is no executor {name!r}; allowed are {PROCESSES} and {_DASK}://HOST:PORT")


@contextmanager
def opened(name: str, *, workers: int) -> Generator[Executor]:
    """An executor, closed afterwards.

    Args:
        name: what `check_executor` lets through.
        workers: processes at a time on this machine; a cluster has as many as it has.

    Raises:
        OSError: when the scheduler of a cluster does not answer.
    """
    if name == PROCESSES:
        # from a process that has imported papermill, which takes seconds, and has run none of its event loops,
        # which do not survive a fork
        context = get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED])
        pool = ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=_end_with_parent)
        try:
            yield pool
        except BaseException:  # an interrupt: what has not begun is not to begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        return
    from distributed import Client

    with Client(f"tcp://{urlsplit(name).netloc}", set_as_default=False) as client:
        yield client.get_executor(retries=1, pure=False)


def _end_with_parent() -> None:
    """Have this worker end when who started it was killed; its kernel then finds itself alone, and ends."""
    parent = parent_process()
    assert parent is not None  # noqa: S101  # it was started by one

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
