"""Connections of clients, bounded in number and in time: a client that sends nothing, or half, costs nobody else.

Uvicorn waits without a limit for the headers of a request, and for a client that does not read its answer. Here
both have one. Where all connections are in use, the one that has been longest without a request is closed for the
next one, so that health checks and requests come through.
"""

import asyncio
import resource
from dataclasses import dataclass
from typing import Any, Final, cast, final

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_SPARE_FILES: Final = 64
"""File descriptors for everything that is not a client's connection."""
_WANTED_FILES: Final = 65_536
_MOST_BACKLOG: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What clients may take."""

    header_s: float = 10.0
    """From connecting, or from the first byte of a further request, to the end of its headers."""
    body_s: float = 30.0
    """From there to the end of its body."""
    idle_s: float = 75.0
    """Between two requests on one connection."""
    stalled_s: float = 60.0
    """A client that takes nothing of its answer for so long is gone."""
    connections: int = 4096
    """At once; fewer where the system allows the process fewer open files."""


def available_files(wanted: int) -> tuple[int, int]:
    """How many connections the open files of this process are enough for, and the backlog of its listening socket.

    The soft limit of open files is raised first, as far as it may be. The backlog counts because the event loop
    accepts so many at once before it counts them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    files = _WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    backlog = max(1, min(_MOST_BACKLOG, files // 8))
    return max(1, min(wanted, files - backlog - _SPARE_FILES)), backlog


@final
class Gate:
    """Counts the connections of one server. Mutable; it belongs to one event loop.

    Args:
        limits: of each of them.
        connections: how many there may be at once.
    """

    def __init__(self, limits: ClientLimits, connections: int) -> None:
        self.limits = limits
        self._most = connections
        self._open: set[ClientConnection] = set()
        self._waiting: dict[ClientConnection, None] = {}
        """Those without a request under way, who has waited longest first."""

    def enter(self, connection: "ClientConnection") -> bool:
        """Whether there is room for a new connection; one that waits is closed to make it."""
        if len(self._open) >= self._most:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.transport.abort()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def works(self, connection: "ClientConnection") -> None:
        """A request of it is under way."""
        self._waiting.pop(connection, None)

    def waits(self, connection: "ClientConnection") -> None:
        """No request of it is under way any more."""
        if connection in self._open:
            self._waiting[connection] = None

    def leave(self, connection: "ClientConnection") -> None:
        """It has ended."""
        self._waiting.pop(connection, None)
        self._open.discard(connection)


@final
class ClientConnection(H11Protocol):
    """One client's connection, under the limits of a gate. Mutable: it is a protocol."""

    def __init__(self, gate: Gate, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._gate = gate
        self._headers_due: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A client has connected."""
        super().connection_made(transport)
        if self._gate.enter(self):
            self._headers_due = self.loop.call_later(self._gate.limits.header_s, self._too_late)
        else:
            self._say(b"503 Service Unavailable")

    def data_received(self, data: bytes) -> None:
        """Something came: a request, or a part of one."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """An answer is out."""
        super().on_response_complete()
        self._look(has_more=bool(self.conn.trailing_data[0]))

    def pause_writing(self) -> None:
        """The client takes less than is sent; one that takes nothing for a time is cut off."""
        super().pause_writing()
        if self._stall is None:
            self._expect_progress()

    def _expect_progress(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self._gate.limits.stalled_s, self._abort_unless_below, left)

    def _abort_unless_below(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._expect_progress()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        """The client takes more again."""
        super().resume_writing()
        self._stall = _stopped(self._stall)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._headers_due = _stopped(self._headers_due)
        self._stall = _stopped(self._stall)
        self._gate.leave(self)
        super().connection_lost(exc)

    def _look(self, *, has_more: bool = True) -> None:
        """See whether a request is under way now; if not, the next one's headers may have begun."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # uvicorn declares it without None
        if cycle is not None and not cycle.response_complete:
            self._headers_due = _stopped(self._headers_due)
            self._gate.works(self)
            return
        self._gate.waits(self)
        if has_more and self._headers_due is None and not self.transport.is_closing():
            self._headers_due = self.loop.call_later(self._gate.limits.header_s, self._too_late)

    def _too_late(self) -> None:
        self._headers_due = None
        self._say(b"408 Request Timeout")

    def _say(self, status: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
