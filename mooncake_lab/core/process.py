"""What a process of this package does with its parent, its garbage and its imports."""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Final

from mooncake_lab.core.extras import naming_extra

_PR_SET_PDEATHSIG: Final = 1
_EVERY_OBJECTS: Final = 50_000
_blocks_lock: Final = threading.Lock()
_thresholds_before: Final[list[tuple[int, int, int]]] = []  # one for each block in which a thread is


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends (Linux), even if it is stopped or its threads hang.

    The parent's end is that of the thread which started this process.

    Args:
        parent: its process id; this process exits at once where it has another parent by now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


@contextmanager
def rare_collections() -> Generator[None]:
    """Look for garbage seldom in this block: a run makes records and requests that stay until its end.

    Looking through them again and again takes a quarter of a replay of 12,000 requests. What is garbage is still
    found, a few ten thousand objects later. When the last such block of all threads ends, the thresholds are those
    from before the first.
    """
    with _blocks_lock:
        _thresholds_before.append(gc.get_threshold())
        gc.set_threshold(_EVERY_OBJECTS, *_thresholds_before[0][1:])
    try:
        yield
    finally:
        with _blocks_lock:
            before = _thresholds_before.pop()
            if not _thresholds_before:
                gc.set_threshold(*before)


def lazy_names(package: str, *modules: str, extra: str | None = None) -> Callable[[str], object]:
    """A module-level `__getattr__` for a package: names that are imported when they are first used.

    The package's `__all__` lists them, too. The simulator must run where there is no numpy, and starts faster
    without it. Where a library is missing, the error names its extra.

    Args:
        package: its name.
        modules: of the package, in which the names are defined.
        extra: the one that these modules need; by default the one that brings the missing library.
    """

    def getattr_lazily(name: str) -> object:
        here = vars(sys.modules[package])
        if name in here["__all__"]:
            for module in modules:
                with naming_extra(extra):
                    defined = vars(import_module(f"{package}.{module}"))
                # all at once, for a module may have the name of what it defines
                here.update((each, defined[each]) for each in here["__all__"] if each in defined)
                if name in defined:
                    return defined[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_lazily
