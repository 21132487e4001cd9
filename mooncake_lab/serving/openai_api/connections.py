"""Connections of clients, bounded in number and in time: a client that sends nothing, or half, costs no other.

Uvicorn waits without a limit for the headers of a request, for its body, and for a client that does not read its
answer. Here each has a limit, in which only the time counts that this process had (see `timeouts`).

Where all connections are in use, the one that has waited longest without a request is closed for the next one, so
that health checks and requests come through; but none that waits for less than `ClientLimits.young_s`, since its
request may be on the way. Without one to close, further clients wait in the backlog of the listening socket. When
that lasts, they get 503.
"""

import asyncio
import resource
import select
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal, cast, final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from mooncake_lab.serving.openai_api.errors import plain_answer
from mooncake_lab.serving.timeouts import TICK_S, tick

_SPARE_FILES: Final = 64
"""File descriptors for everything that is not a client's connection."""
_WANTED_FILES: Final = 65_536
_MOST_REFUSED: Final = 1024
_FAREWELL_S: Final = 2.0
"""How long a client that was refused may take to read that and hang up; closing earlier may reset the connection,
and the refusal would be lost."""
_NO_FILES_S: Final = 1.0
"""After so long the next client is accepted where the system had no file descriptor for the last one."""

_Phase = Literal["headers", "body", "rest", "idle"]
"""What a connection waits for: a request, its body, the rest of a body that is answered, or the next request."""


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
    young_s: float = 1.0
    """A connection is not closed for another one before it has waited so long for a request; and a further client
    waits so long for a connection before it is refused."""
    connections: int = 4096
    """At once; fewer where the system allows the process fewer open files."""


def available_files(wanted: int) -> tuple[int, int]:
    """How many connections the open files of this process are enough for, and how many more for refusals.

    The soft limit of open files is raised first, as far as it may be.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    files = _WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    refused = max(1, min(_MOST_REFUSED, files // 8))
    return max(1, min(wanted, files - refused - _SPARE_FILES)), refused


@final
class _WhileConnected:
    """The transport of a client to which nothing is written once it is gone: asyncio would log each such attempt.

    Args:
        transport: that of the event loop.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Send this, or drop it."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@final
class Gate:
    """Counts the connections of one server, and their time. Mutable; it belongs to one event loop.

    Args:
        limits: of each of them.
        connections: how many there may be at once.
        refused: how many more may be told at once that they are refused.
    """

    def __init__(self, limits: ClientLimits, connections: int, refused: int = 1) -> None:
        self.limits = limits
        self.now_s = 0.0
        """The time that this process had while there were connections."""
        self.changed: Callable[[], None] = lambda: None
        """Called after every tick, and when a connection has ended."""
        self._most = connections
        self._most_refused = refused
        self._open: set[ClientConnection] = set()
        self._waiting: dict[ClientConnection, float] = {}
        """Connections without a request under way, and since when; the longest wait comes first."""
        self._refused: dict[ClientConnection, float] = {}
        """Connections that are told that they are refused, and until when they may read it."""
        self._tick_s = min(TICK_S, limits.header_s / 4, limits.body_s / 4, limits.idle_s / 4, limits.stalled_s / 4)
        self._ticking: asyncio.Task[None] | None = None

    def has_room(self, others: int = 0) -> bool:
        """Whether a further connection could be opened beside these others that are being opened."""
        room = self._most - len(self._open)
        if room > others:
            return True
        for since_s in self._waiting.values():
            if self.now_s - since_s < self.limits.young_s:
                return False
            room += 1
            if room > others:
                return True
        return False

    def refusable(self) -> int:
        """How many more connections may be refused now."""
        return self._most_refused - len(self._refused)

    def enter(self, connection: "ClientConnection") -> bool:
        """Whether there is room for a new connection; one that waits is closed to make it."""
        self._tick()
        if len(self._open) >= self._most:
            if not self.has_room():
                return False
            next(iter(self._waiting)).give_way()
        self._open.add(connection)
        self._waiting[connection] = self.now_s
        return True

    def works(self, connection: "ClientConnection") -> None:
        """A request of it is under way."""
        self._waiting.pop(connection, None)

    def waits(self, connection: "ClientConnection") -> None:
        """No request of it is under way any more."""
        if connection in self._open:
            self._waiting.setdefault(connection, self.now_s)

    def refuse(self, connection: "ClientConnection") -> None:
        """Tell a connection that it is refused, and close it when it has read that; the oldest one makes room."""
        self.leave(connection)
        if len(self._refused) >= self._most_refused:
            oldest = next(iter(self._refused))
            del self._refused[oldest]
            oldest.transport.close()
        self._refused[connection] = self.now_s + _FAREWELL_S

    def leave(self, connection: "ClientConnection") -> None:
        """A connection has ended."""
        self._waiting.pop(connection, None)
        self._refused.pop(connection, None)
        self._open.discard(connection)
        self.changed()

    def _tick(self) -> None:
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.get_running_loop().create_task(self._keep_time(), name="connections")

    async def _keep_time(self) -> None:
        """End connections whose time is over, while there are any."""
        while True:
            await tick(self._tick_s)
            self.now_s += self._tick_s
            for connection in list(self._open):
                connection.check()
            for connection, until_s in list(self._refused.items()):
                if until_s <= self.now_s:
                    connection.transport.close()
            self.changed()
            if not self._open and not self._refused:
                return


@final
class Acceptor:
    """Accepts clients while a gate has room for them; others wait in the backlog. Mutable: it pauses.

    Args:
        gate: of the server.
        listeners: sockets that listen.
        make: makes the protocol of a connection.
    """

    def __init__(
        self, gate: Gate, listeners: Iterable[socket.socket], make: Callable[[], asyncio.Protocol]
    ) -> None:
        self._gate = gate
        self._listeners = list(listeners)
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[Any]] = set()
        self._full_since_s: float | None = None
        """Since when clients wait because there is no room; None while they are accepted."""
        self._is_closed = False
        gate.changed = self._look
        for listener in self._listeners:
            listener.settimeout(0)
        self._listen()

    def close(self) -> None:
        """Accept no more."""
        self._is_closed = True
        self._gate.changed = lambda: None
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    def _listen(self) -> None:
        self._full_since_s = None
        for listener in self._listeners:
            self._loop.add_reader(listener, self._accept_all, listener)

    def _pause(self) -> None:
        self._full_since_s = self._gate.now_s
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    def _accept_all(self, listener: socket.socket) -> None:
        """Accept those who wait, as far as there is room."""
        while self._gate.has_room(len(self._opening)):
            if not self._accept(listener):
                return
        self._pause()

    def _look(self) -> None:
        """Go on when there is room; refuse connections that have waited too long for it."""
        if self._full_since_s is None or self._is_closed:
            return
        if self._gate.has_room(len(self._opening)):
            self._listen()
        elif not any(map(_is_waited_for, self._listeners)):
            self._full_since_s = self._gate.now_s
        elif self._gate.now_s - self._full_since_s >= self._gate.limits.young_s:
            for listener in self._listeners:
                while len(self._opening) < self._gate.refusable() and self._accept(listener):
                    pass

    def _accept(self, listener: socket.socket) -> bool:
        """Accept one client; whether one was waiting."""
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError:  # no file descriptor is left
            self._pause()
            self._loop.call_later(_NO_FILES_S, self._look)
            return False
        peer.settimeout(0)
        task = self._loop.create_task(self._open(peer))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        return True

    async def _open(self, peer: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, peer)
        except OSError:  # the client is gone already
            peer.close()


def _is_waited_for(listener: socket.socket) -> bool:
    """Whether a client is in the backlog of a socket."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return bool(poll.poll(0))


@final
class ClientConnection(H11Protocol):
    """One client's connection, under the limits of a gate. Mutable: it is a protocol."""

    def __init__(self, gate: Gate, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._gate = gate
        self._phase: _Phase | None = None
        self._due_s = 0.0
        self._due_for: object = None
        """The request to which the limit belongs."""
        self._stall: tuple[float, int] | None = None
        """Until when the client has to take some of the bytes that wait for it, and how many wait."""
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A client has connected."""
        quiet: Any = _WhileConnected(transport)
        super().connection_made(quiet)
        if self._gate.enter(self):
            self._expect("headers")
        else:
            self._say_full()

    def data_received(self, data: bytes) -> None:
        """Something came: a request, or a part of one."""
        if not self._is_refused:
            super().data_received(data)
            self._look()

    def on_response_complete(self) -> None:
        """An answer is out."""
        super().on_response_complete()
        self._look(has_more=bool(self.conn.trailing_data[0]))

    def timeout_keep_alive_handler(self) -> None:
        """Uvicorn's own limit of idle connections also counts time that this process did not have."""

    def pause_writing(self) -> None:
        """The client takes less than is sent; one that takes nothing for a time is cut off."""
        super().pause_writing()
        if self._stall is None:
            self._expect_progress()

    def _expect_progress(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall = self._gate.now_s + self._gate.limits.stalled_s, left

    def resume_writing(self) -> None:
        """The client takes more again."""
        super().resume_writing()
        self._stall = None

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._phase = self._stall = None
        self._gate.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        del msg
        self._say(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request, or its headers are too long")

    def check(self) -> None:
        """End what takes longer than it may."""
        now_s, limits = self._gate.now_s, self._gate.limits
        if self._stall is not None and self._stall[0] <= now_s:
            if self.transport.get_write_buffer_size() >= self._stall[1]:
                self.transport.abort()
                return
            self._expect_progress()
        if self._phase is None or self._due_s > now_s:
            return
        if self._phase == "headers":
            self._say(HTTPStatus.REQUEST_TIMEOUT, f"the headers did not come within {limits.header_s:g} s")
        elif self._phase == "body":
            self._say(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {limits.body_s:g} s")
        else:
            self.transport.close()

    def give_way(self) -> None:
        """Close it, since another client needs the connection."""
        if self._phase == "headers":
            self._say_full()
        else:
            self._gate.leave(self)
            self.transport.close()

    def _look(self, *, has_more: bool = True) -> None:
        """See whether a request is under way now; if not, the next one's headers may have begun."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # uvicorn declares it without None
        is_sending = self.conn.their_state is h11.SEND_BODY
        if self.transport.is_closing() or self._is_refused:
            self._expect(None)
        elif cycle is not None and not cycle.response_complete:
            self._expect("body" if is_sending else None)
            self._gate.works(self)
        else:
            self._expect("rest" if is_sending else "headers" if has_more else "idle")
            self._gate.waits(self)

    def _expect(self, phase: _Phase | None) -> None:
        """Begin to wait for something, unless that has begun: a byte now and then wins no time."""
        if (phase, self.cycle) == (self._phase, self._due_for):
            return
        limits = self._gate.limits
        limit_s = {"headers": limits.header_s, "idle": limits.idle_s}.get(str(phase), limits.body_s)
        self._phase, self._due_for, self._due_s = phase, self.cycle, self._gate.now_s + limit_s

    def _say_full(self) -> None:
        says = "all connections of this server are in use; try again later"
        self._say(HTTPStatus.SERVICE_UNAVAILABLE, says, **{"Retry-After": "1"})

    def _say(self, status: HTTPStatus, message: str, **headers: str) -> None:
        """Refuse a request, unless its answer has begun, and hang up when the client has read that."""
        self._phase = None
        if self._is_refused or self.transport.is_closing():
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()
            return
        self._is_refused = True
        self._gate.refuse(self)
        self.transport.write(plain_answer(status, message, headers))
        if cycle is not None:  # who reads the body learns that no more comes
            cycle.disconnected = True
            cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write_eof()
