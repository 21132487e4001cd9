"""Ctrl-C between two calls instead of within one: one handler of a process, and the calls that it lets finish."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

_MAIN_THREAD: Final = threading.main_thread().ident
_Handler = Callable[[int, FrameType | None], object]


@dataclass(slots=True)
class _Deferral:
    """State of the main thread, where Python handles signals. Mutable."""

    prior: _Handler | None = None
    """What handles a signal at last; None where signals are not deferred."""
    blocks: int = 0
    """Blocks that defer signals now."""
    calls: int = 0
    """Calls that are under way, one within the other."""
    is_interrupted: bool = False
    """Whether a signal waits for their end."""


_DEFERRAL: Final = _Deferral()


@contextmanager
def deferred_interrupts() -> Generator[None]:
    """In this block, SIGINT lets a call finish that `begin_call` has begun, and is handled when the call ends.

    A second SIGINT is handled at once, because a device may stall. Blocks may overlap: the first one installs the
    handler, and the end of the last one restores that of before. In another thread than the main one, and where
    SIGINT has no Python handler, this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.get_ident() != _MAIN_THREAD or not callable(handler):
        yield
        return
    if handler is not _handle:
        _DEFERRAL.prior, _DEFERRAL.calls, _DEFERRAL.is_interrupted = handler, 0, False
        signal.signal(signal.SIGINT, _handle)
    _DEFERRAL.blocks += 1
    try:
        yield
    finally:
        _DEFERRAL.blocks -= 1
        is_last = not _DEFERRAL.blocks and threading.get_ident() == _MAIN_THREAD
        if is_last and signal.getsignal(signal.SIGINT) is _handle:
            signal.signal(signal.SIGINT, _DEFERRAL.prior)
            _DEFERRAL.prior = None


def begin_call() -> None:
    """SIGINT waits from now on, until `end_call` was called as often."""
    if _DEFERRAL.prior is not None and threading.get_ident() == _MAIN_THREAD:
        _DEFERRAL.calls += 1


def end_call() -> None:
    """Handle a SIGINT that has waited for this call."""
    if _DEFERRAL.calls and threading.get_ident() == _MAIN_THREAD:
        _DEFERRAL.calls -= 1
        if _DEFERRAL.is_interrupted and not _DEFERRAL.calls and _DEFERRAL.prior is not None:
            _DEFERRAL.is_interrupted = False
            _DEFERRAL.prior(signal.SIGINT, None)


def _handle(number: int, frame: FrameType | None) -> None:
    """Let the first signal wait for a call that is under way; pass any other one on."""
    if _DEFERRAL.calls and not _DEFERRAL.is_interrupted:
        _DEFERRAL.is_interrupted = True
    elif _DEFERRAL.prior is not None:
        _DEFERRAL.is_interrupted = False
        _DEFERRAL.prior(number, frame)
