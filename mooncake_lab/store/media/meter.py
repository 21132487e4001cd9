"""A medium's own estimate of its speed."""

import time
from collections.abc import Generator
from contextlib import contextmanager

from mooncake_lab.store.media.medium import Bandwidth

_NEWEST = 0.2
"""The weight of the latest transfer: about ten transfers are remembered."""


class Meter:
    """Smoothed bytes per second, reading and writing. Mutable: it learns from every transfer."""

    __slots__ = ("_read", "_write")

    def __init__(self) -> None:
        self._read: float | None = None
        self._write: float | None = None

    @contextmanager
    def reading(self, size_bytes: int) -> Generator[None]:
        """Time a read of so many bytes; a failed one teaches nothing."""
        started_s = time.perf_counter()
        yield
        self._read = _smoothed(self._read, size_bytes, time.perf_counter() - started_s)

    @contextmanager
    def writing(self, size_bytes: int) -> Generator[None]:
        """Time a write of so many bytes; a failed one teaches nothing."""
        started_s = time.perf_counter()
        yield
        self._write = _smoothed(self._write, size_bytes, time.perf_counter() - started_s)

    def bandwidth(self) -> Bandwidth:
        """What was learnt."""
        return Bandwidth(self._read, self._write)


def _smoothed(before: float | None, size_bytes: int, taken_s: float) -> float:
    latest = size_bytes / max(taken_s, 1e-9)
    return latest if before is None else before + _NEWEST * (latest - before)
