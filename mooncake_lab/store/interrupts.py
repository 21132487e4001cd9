"""Ctrl-C waits while the state of a store changes, so that no block stays half written or pinned."""

import importlib
import threading
from types import FrameType
from typing import Any, Final, Self, final

_MAIN_THREAD: Final = threading.main_thread().ident
_signal: Final[Any] = importlib.import_module("_signal")
"""The module below `signal`, which converts handlers to enumerations and back and takes ten times as long."""


@final
class Uninterrupted:
    """A section that SIGINT does not end: its handler runs when the section is over.

    A second SIGINT is handled at once, because the device of a copy may stall. Python handles signals in the main
    thread only: in any other thread, and inside another section, this does nothing. Mutable: it records a signal.
    """

    __slots__ = ("_prior", "is_interrupted")

    def __init__(self) -> None:
        self._prior: Any = None
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
        """Record the first signal; pass the second one on."""
        if self._prior is not None and self.is_interrupted:
            self.is_interrupted = False
            self._prior(number, frame)
        else:
            self.is_interrupted = True
