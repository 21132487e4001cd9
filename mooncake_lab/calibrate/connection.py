"""HTTP to a server that nobody vouches for: bounded in time and size, and every failure is one sentence.

Threads with the standard library's client, because a client has to cost little beside what it times.
"""

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from mooncake_lab.calibrate.observations import CalibrationError

_MOST_BYTES: Final = 16 * 2**20
"""Of one answer."""
_MOST_EVENT_BYTES: Final = 2**20
_SHOWN: Final = 160
"""Characters of a server's own words that an error repeats."""
_FAILURES: Final = (http.client.HTTPException, OSError, ValueError)


@dataclass(frozen=True, slots=True)
class StatusError(Exception):
    """A server refuses a request with a status and some words."""

    status: int
    says: str

    def __str__(self) -> str:
        return f"status {self.status}" + (f" ({self.says})" if self.says else "")


class ServerConnection:
    """One connection at a time to one server. Mutable: it may be broken off from another thread.

    Args:
        url: of the server, with or without `/v1`.
        api_key: sent as bearer token.
        timeout_s: how long a server may be silent.
        most_s: how long an exchange may take in all.

    Raises:
        CalibrationError: when the URL is none of a server.
    """

    def __init__(self, url: str, api_key: str | None, timeout_s: float, most_s: float) -> None:
        self.url = url
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise CalibrationError(f"{url!r} is no URL of a server: {error}") from None
        if parts.scheme not in {"http", "https"} or not host or parts.query or parts.fragment:
            raise CalibrationError(
                f"{url!r} is no URL of a server; allowed are http://HOST:PORT and https://HOST, with a path or not"
            )
        self._host, self._port, self._is_secure = host, port, parts.scheme == "https"
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._most_s = most_s
        self._is_watched = False
        self._open: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = (
            None  # of the connection; its client forgets it before the answer ends
        )
        self._answer: http.client.HTTPResponse | None = None
        self._began_s: float | None = None  # of the exchange under way

    def another(self) -> "ServerConnection":
        """One more connection to the same server, whose owner asks it whether it `takes_too_long`."""
        more = object.__new__(ServerConnection)
        vars(more).update(
            vars(self) | {"_open": None, "_socket": None, "_answer": None, "_began_s": None, "_is_watched": True}
        )
        return more

    def takes_too_long(self, now_s: float) -> CalibrationError | None:
        """The reason to break off the exchange under way."""
        if self._began_s is None or now_s - self._began_s <= self._most_s:
            return None
        return CalibrationError(f"{self.url} did not end an answer within {self._most_s:g} s")

    def break_off(self) -> None:
        """End the exchange under way; its thread gets an error."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, and the answer that is read from it."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None
        if self._open is not None:
            self._open.close()
            self._open = self._socket = None

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The body of an answer; the connection is closed then.

        Raises:
            StatusError: when the server refuses.
            CalibrationError: when it does not answer, or not in HTTP.
        """
        with (
            contextlib.closing(self),
            self._exchange(method, path, None if body is None else encoded(body)) as found,
        ):
            return _bounded(found[0])

    def events(self, path: str, body: bytes) -> Generator[tuple[float, bytes]]:
        """First the moment of sending, with no data; then each server-sent event and when it came.

        Raises:
            StatusError: when the server refuses.
            CalibrationError: when it does not answer in HTTP, or is silent for too long.
        """
        with self._exchange("POST", path, body) as (answer, sent_s):
            yield sent_s, b""
            kind = answer.getheader("Content-Type") or "nothing"
            if not kind.startswith("text/event-stream"):
                raise CalibrationError(
                    f"{self.url} answers a streamed completion with {kind[:60]!r}; text/event-stream is needed"
                )
            held, total = b"", 0
            while piece := answer.read1(65536):
                now_s = time.perf_counter()
                total += len(piece)
                *whole, held = (held + piece.replace(b"\r", b"")).split(b"\n\n")
                if len(held) > _MOST_EVENT_BYTES or total > _MOST_BYTES:
                    raise CalibrationError(f"{self.url} sends more than {_MOST_BYTES} bytes for one answer")
                for event in whole:
                    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
                    if lines:
                        yield now_s, b"\n".join(lines)
            late = self.takes_too_long(time.perf_counter())
            if late is not None:  # it was broken off, and looks as if it had ended
                raise late

    @contextlib.contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes | None
    ) -> Generator[tuple[http.client.HTTPResponse, float]]:
        self._began_s = time.perf_counter()
        watch = threading.Timer(self._most_s, self.break_off)
        watch.daemon = True
        if not self._is_watched:
            watch.start()
        is_done = False
        try:
            answer, sent_s = self._answered(method, self._root + path, body)
            self._answer = answer
            _check_status(answer)
            yield answer, sent_s
            if not answer.isclosed():  # its end is read, so that the connection can be used again
                answer.read1(_MOST_EVENT_BYTES)
            is_done = answer.isclosed()
        except CalibrationError as error:
            raise self.takes_too_long(time.perf_counter()) or error from None
        except TimeoutError:
            raise CalibrationError(f"{self.url} sent nothing for {self._timeout_s:g} s") from None
        except _FAILURES as error:
            what = str(error).strip() or type(error).__name__
            late = self.takes_too_long(time.perf_counter())
            raise late or CalibrationError(f"{self.url} cannot be talked to: {what[:_SHOWN]}") from None
        finally:
            watch.cancel()
            self._began_s = None
            if not is_done:
                self.close()

    def _answered(self, method: str, target: str, body: bytes | None) -> tuple[http.client.HTTPResponse, float]:
        """The head of an answer, and when its request was sent.

        A server may close a connection that was kept after an answer; the request is sent once more then.
        """
        was_kept = self._open is not None
        while True:
            there, sent_s = self._connected(), time.perf_counter()
            try:
                there.request(method, target, body, self._headers)
                return there.getresponse(), sent_s
            except ConnectionError:
                if not was_kept or self.takes_too_long(time.perf_counter()) is not None:
                    raise
            was_kept = False
            self.close()

    def _connected(self) -> http.client.HTTPConnection:
        if self._open is not None:
            return self._open
        if self._is_secure:
            there: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=ssl.create_default_context()
            )
        else:
            there = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        self._open = there
        there.connect()
        connected: socket.socket = there.sock
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        return there


def encoded(body: Mapping[str, Any]) -> bytes:
    """A body as it is sent."""
    return json.dumps(body).encode()


def _check_status(answer: http.client.HTTPResponse) -> None:
    if not 200 <= answer.status < 300:
        raise StatusError(answer.status, _words(_bounded(answer)))


def _bounded(answer: http.client.HTTPResponse) -> bytes:
    found = answer.read(_MOST_EVENT_BYTES + 1)
    if len(found) > _MOST_EVENT_BYTES:
        raise ValueError(f"it answers with more than {_MOST_EVENT_BYTES} bytes")
    return found


def _words(body: bytes) -> str:
    """What a server says about an error: OpenAI's message, or the beginning of anything else, on one line."""
    text = body.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        message = error.get("message") if isinstance(error, dict) else error
        text = message if isinstance(message, str) else text
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())[:_SHOWN]
