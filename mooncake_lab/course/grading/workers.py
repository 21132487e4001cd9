"""Worker processes, each with one piece of work at a time; one that ends costs its own work a second try, no more.

The kernel ends a process that uses too much memory, and a person may. Each worker is a pool of one process, so
that it is known what it worked at. What lost its worker is tried again when all others are done, by itself.

A worker that has grown is replaced before its next piece of work. An engine and a simulation leave libraries and
memory in fragments behind, which no later work needs: kept, they would add up over a class.
"""

import contextlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from mooncake_lab.core import KIB, MIB
from mooncake_lab.core.process import end_with_parent

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_STARTS: Final = 5
"""Workers in a row that may end before they work."""
_MOST_KEPT_BYTES: Final = 320 * MIB
"""A worker that holds more after a piece of work gets no other; one that has loaded the engine holds 300 MiB."""
_BADNESS: Final = "500"
"""Of 1,000: where memory is short, the kernel ends a worker or its submission, and not who waits for it."""


@dataclass(frozen=True, slots=True)
class _Worker:
    pool: Executor
    started: "Future[int]"

    @property
    def has_come_up(self) -> bool:
        """Whether its process has answered before."""
        return self.started.done() and self.started.exception() is None

    @property
    def is_fit(self) -> bool:
        """Whether its process may get more work: it has not grown too large."""
        return _resident_bytes(self.started.result()) <= _MOST_KEPT_BYTES


def work_through(
    items: Sequence[Item], work: Callable[[Item], Result], jobs: int
) -> Iterator[tuple[Item, Result | None]]:
    """Each item with its result, in the order in which they are found; None where its worker ended twice.

    Args:
        items: what can be sent to a process.
        work: a function of a module. What it raises is raised here.
        jobs: workers at a time.

    Raises:
        ChildProcessError: when no worker comes up.
    """
    lost: list[Item] = []
    for item, result in _once(items, work, jobs):
        if result is None:
            lost.append(item)
        else:
            yield item, result
    yield from _once(lost, work, 1)


def _once(
    items: Sequence[Item], work: Callable[[Item], Result], jobs: int
) -> Iterator[tuple[Item, Result | None]]:
    """Each item with its result; None where its worker ended."""
    waiting = deque(items)
    idle: list[_Worker] = []
    busy: dict[Future[Result], tuple[Item, _Worker]] = {}
    vain_starts = 0
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                worker, item = idle.pop() if idle else _new_worker(), waiting.popleft()
                try:
                    future = worker.pool.submit(work, item)
                except BrokenProcessPool:  # it ended while it had nothing to do
                    worker = _new_worker()
                    future = worker.pool.submit(work, item)
                busy[future] = item, worker
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                item, worker = busy.pop(future)
                if not isinstance(future.exception(), BrokenProcessPool):
                    if worker.is_fit:
                        idle.append(worker)
                    else:
                        worker.pool.shutdown()
                    vain_starts = 0
                    yield item, future.result()
                    continue
                worker.pool.shutdown()
                if worker.has_come_up:
                    yield item, None
                    continue
                vain_starts += 1
                if vain_starts == _MOST_STARTS:
                    raise ChildProcessError(f"no worker comes up here: {vain_starts} in a row ended at once")
                waiting.appendleft(item)
    finally:
        for worker in (*idle, *(worker for _, worker in busy.values())):
            worker.pool.shutdown(cancel_futures=True)


def _new_worker() -> _Worker:
    pool = new_pool()
    return _Worker(pool, pool.submit(os.getpid))


def new_pool() -> Executor:
    """A process that ends with this one."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin, initargs=(os.getpid(),))


def _resident_bytes(pid: int) -> int:
    """Memory that a process holds; 0 where it has ended, or the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((KIB * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)


def _begin(parent: int) -> None:
    end_with_parent(parent)
    with contextlib.suppress(OSError):  # not Linux, or not allowed
        Path("/proc/self/oom_score_adj").write_text(_BADNESS, encoding="ascii")
