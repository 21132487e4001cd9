"""Ctrl-C waits while the state of a store changes, so that no block stays half written; copies can be ended."""

import importlib
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Self, final

_MAIN_THREAD: Final = threading.main_thread().ident
_signal: Final[Any] = importlib.import_module("_signal")
"""The module below `signal`, which converts handlers to enumerations and back and takes ten times as long."""


@final
class Uninterrupted:
    """A section that SIGINT does not end: its handler runs when the section is over.

    A second SIGINT is handled at once. Python handles signals in the main thread only: in any other thread, and
    inside another section, this does nothing. Mutable: it records a signal.
    """

    __slots__ = ("_is_open", "_prior", "is_interrupted")

    def __init__(self) -> None:
        self._prior: Callable[[int, FrameType | None], Any] | None = None
        self._is_open = False
        self.is_interrupted = False
        """Whether a signal came whose handler runs at the end."""

    def __enter__(self) -> Self:
        if threading.get_ident() == _MAIN_THREAD:
            prior = _signal.getsignal(_signal.SIGINT)
            if callable(prior) and not isinstance(getattr(prior, "__self__", None), Uninterrupted):
                self._prior = prior
                _signal.signal(_signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        prior = self._prior
        if prior is not None:
            _signal.signal(_signal.SIGINT, prior)
            if self.is_interrupted:
                prior(_signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Record a signal; in an interruptible part, or the second time, call the prior handler."""
        if self._prior is not None and (self._is_open or self.is_interrupted):
            self._is_open = self.is_interrupted = False  # the part ends here, even if it ends before it began
            self._prior(number, frame)
        else:
            self.is_interrupted = True

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """A part of the section that a signal ends, one that came before included."""
        self._is_open = True
        try:
            if self.is_interrupted:
                self._handle(_signal.SIGINT, None)
            yield
        finally:
            self._is_open = False
