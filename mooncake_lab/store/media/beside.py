"""Two things at once: one on a helper thread, one here, both ended before anybody goes on."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

_Mine = TypeVar("_Mine")
_Other = TypeVar("_Other")


def beside(helpers: Executor, other: Callable[[], _Other], mine: Callable[[], _Mine]) -> tuple[_Other, _Mine]:
    """What both return, `other` from a helper thread while `mine` runs here.

    Neither runs any more when this returns or raises, so that nobody touches buffers that were given back. If no
    helper has come to `other` by then, the caller does it too: late helpers cost nothing but their help.
    """
    begun = Future[_Other]()

    def help_out() -> None:
        if begun.set_running_or_notify_cancel():
            try:
                begun.set_result(other())
            except BaseException as error:  # noqa: BLE001  # the caller raises it
                begun.set_exception(error)

    with contextlib.suppress(RuntimeError):  # no more helpers: should one come by later, it finds this cancelled
        helpers.submit(help_out)
    try:
        done = mine()
        return (other() if begun.cancel() else begun.result()), done
    finally:
        while not (begun.cancel() or begun.done()):  # an interrupt must not leave a helper at the caller's buffers
            with contextlib.suppress(KeyboardInterrupt):
                wait([begun])


def shared(helpers: Executor, tasks: Iterable[Callable[[], None]]) -> None:
    """Do these tasks, each once, here and on a helper thread: whoever is free takes the next one.

    None runs any more when this returns or raises; after one that failed the others are not begun.
    """
    left = deque(tasks)

    def work() -> None:
        while True:
            try:
                task = left.popleft()
            except IndexError:
                return
            try:
                task()
            except BaseException:
                left.clear()
                raise

    beside(helpers, work, work)
