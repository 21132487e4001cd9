"""The calls of a store that are under way: it closes after them, and Ctrl-C waits for that of the main thread."""

import threading
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar, final

from mooncake_lab.core.interrupts import begin_call, end_call
from mooncake_lab.store.backends import StorageError

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@final
class Calls:
    """A context manager around each call of one store, also within another one. Mutable: it counts.

    A call that a `KeyboardInterrupt` ends halfway ends the store, too: its state may be half changed.
    """

    def __init__(self) -> None:
        self.lock: Final = threading.RLock()
        """Guards the store. It is reentrant: `with` of a plain lock can be interrupted before the release."""
        self.changed: Final = threading.Condition(self.lock)
        self._running = Counter[int]()
        """By thread, because a thread that closes the store does not wait for itself."""
        self._is_closed = False
        self.was_interrupted = False
        """Whether a call ended halfway."""

    def __enter__(self) -> None:
        begin_call()
        with self.lock:
            self._running[threading.get_ident()] += 1

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        with self.lock:
            thread = threading.get_ident()
            self._running[thread] -= 1
            if not self._running[thread]:
                del self._running[thread]
            self.was_interrupted |= kind is not None and not issubclass(kind, Exception)
            if self._is_closed:
                self.changed.notify_all()
        end_call()

    def check_open(self) -> None:
        """Refuse a call after the end of the store.

        Raises:
            StorageError: when it is closed, or one of its calls was interrupted.
        """
        if self.was_interrupted:
            raise StorageError("a call of this store was interrupted twice; open it in a new process")
        if self._is_closed:
            raise StorageError("this store is closed")

    def close(self) -> None:
        """Refuse further calls, and return when those of other threads are over."""
        with self.lock:
            self._is_closed = True
            others = self._running.keys() - {threading.get_ident()}
            self.changed.wait_for(lambda: self.was_interrupted or not self._running.keys() & others)


class HasCalls(Protocol):
    """A store that counts its calls."""

    calls: Calls


_Store = TypeVar("_Store", bound=HasCalls)


def call(
    method: Callable[Concatenate[_Store, _Parameters], _Result],
) -> Callable[Concatenate[_Store, _Parameters], _Result]:
    """Make a method of a store one of its calls, which is refused after the end of the store."""

    @wraps(method)
    def counted(store: _Store, *arguments: _Parameters.args, **settings: _Parameters.kwargs) -> _Result:
        with store.calls:
            store.calls.check_open()
            return method(store, *arguments, **settings)

    return counted
