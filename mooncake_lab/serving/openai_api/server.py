"""The web server: a cluster, and uvicorn before it, until a signal ends them."""

import asyncio
import contextlib
import functools
import math
import signal
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final, final

import uvicorn

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import Record
from mooncake_lab.engine import check_model
from mooncake_lab.serving.openai_api.app import OpenAIApp
from mooncake_lab.serving.openai_api.connections import (
    Acceptor,
    ClientConnection,
    ClientLimits,
    Gate,
    available_files,
)
from mooncake_lab.serving.openai_api.telemetry import Telemetry
from mooncake_lab.serving.openai_api.tokenizer import Tokenizer, tokenizer_of
from mooncake_lab.serving.recording import TraceRecorder
from mooncake_lab.serving.runtime import ClusterRuntime
from mooncake_lab.serving.spec import LiveOptions
from mooncake_lab.serving.timeouts import TICK_S, tick

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_FAREWELL_S: Final = 3
"""How long clients have to hear that their requests were ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the server is, and who may use it."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 lets the system choose."""
    token: str | None = None
    """The API key; None lets all clients in."""
    drain_s: float = 30.0
    """How long requests under way may go on after a signal."""
    model: str | None = None
    """The name by which clients ask for the model; None takes the cluster's."""
    limits: ClientLimits = field(default_factory=ClientLimits)
    """What clients may take of time and connections."""


async def serve(
    spec: ClusterSpec,
    options: LiveOptions,
    address: Address,
    *,
    opened: Callable[[str], None],
    write: Callable[[Record], None] | None = None,
    record: Callable[[dict[str, Any]], None] | None = None,
    ending: Callable[[int], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or SIGINT; requests under way are then finished, as far as they do in time.

    Args:
        spec: of the cluster.
        options: likewise.
        address: where to listen.
        opened: told the URL when requests can come.
        write: gets each record as the cluster hears of it.
        record: gets each request with its answer's length, as a line of a trace (`TraceRecorder`).
        ending: told how many requests are under way when a signal ends the taking of more.

    Raises:
        ValueError: when the model or its tokenizer cannot be loaded, or a live cluster cannot do what the spec
            asks.
        WorkerError: when the workers do not start.
        OSError: when it cannot listen there.
    """
    telemetry = Telemetry()
    told = [telemetry.note, *([] if write is None else [write])]

    def note(noted: Record) -> None:
        for tell in told:
            tell(noted)

    listener, url = listen(address.host, address.port)
    with contextlib.closing(listener):
        await asyncio.to_thread(check_model, options.model)  # before workers load for nothing
        tokenizer = await asyncio.to_thread(tokenizer_of, options.model)
        loop, this = asyncio.get_running_loop(), asyncio.current_task()
        assert this is not None  # noqa: S101  # a coroutine runs in a task
        for number in _SIGNALS:
            loop.add_signal_handler(number, this.cancel)
        async with ClusterRuntime(spec, options, write=note) as runtime:
            server = web_server(runtime, telemetry, address, ending, tokenizer=tokenizer)

            def end(_number: int, _frame: object) -> None:
                server.should_exit = True

            for number in _SIGNALS:  # uvicorn takes them over, gives them back and raises them again: no harm
                loop.remove_signal_handler(number)
                signal.signal(number, end)
            with _recording(runtime, record, told):
                opened(url)
                await server.serve(sockets=[listener])


@contextlib.contextmanager
def _recording(
    runtime: ClusterRuntime,
    record: Callable[[dict[str, Any]], None] | None,
    told: list[Callable[[Record], None]],
) -> Generator[None]:
    """Requests that arrive inside become lines of a trace, if somebody takes them."""
    if record is None:
        yield
        return
    recorder = TraceRecorder(record, runtime.shown_tokens)
    runtime.on_event = recorder.note_event
    told.append(recorder.note)
    try:
        yield
    finally:
        recorder.close()


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """A socket that listens at an IPv4 or IPv6 address, or at the first one of a name, and its URL.

    Raises:
        OSError: when it cannot listen there, with the reason.
    """
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        family, _, _, _, at = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )[0]
        listener = socket.create_server(at, family=family, backlog=1024)
        # its connections inherit it; asyncio sets it only on sockets that say they are TCP, and without it the
        # second part of an answer may wait 40 ms for the acknowledgement of the first
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise OSError(f"cannot listen at {host!r}, port {port}: {reason}") from error
    shown, port = listener.getsockname()[:2]
    return listener, f"http://[{shown}]:{port}" if family == socket.AF_INET6 else f"http://{shown}:{port}"


def web_server(
    runtime: ClusterRuntime,
    telemetry: Telemetry,
    address: Address,
    ending: Callable[[int], None] = lambda _: None,
    tokenizer: Tokenizer | None = None,
) -> uvicorn.Server:
    """Uvicorn before an open cluster; for `ending` see `serve`. None loads the model's own tokenizer."""
    limits = address.limits
    app = OpenAIApp(
        runtime,
        tokenizer or tokenizer_of(runtime.options.model),
        telemetry,
        address.token,
        model=address.model,
        host=address.host,
    )
    gate = Gate(limits, *available_files(limits.connections))
    connection: Any = functools.partial(ClientConnection, gate)
    config = uvicorn.Config(
        app.asgi(),
        http=connection,
        ws="none",  # a client with a web socket would leave the limits of its connection behind
        lifespan="off",
        log_config=None,
        log_level="error",  # what a client does wrong is no matter for the operator's log
        access_log=False,
        timeout_keep_alive=math.ceil(limits.idle_s),
        timeout_graceful_shutdown=math.ceil(address.drain_s) + _FAREWELL_S,
        server_header=False,
    )
    return _Server(config, app, gate, address.drain_s, ending)


@final
class _Server(uvicorn.Server):
    """Uvicorn that tells the clients whose requests it will not finish, instead of hanging up on them."""

    def __init__(
        self, config: uvicorn.Config, app: OpenAIApp, gate: Gate, drain_s: float, ending: Callable[[int], None]
    ) -> None:
        super().__init__(config)
        self._app, self._gate, self._drain_s, self._ending = app, gate, drain_s, ending
        self._acceptor: Acceptor

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections, as many as there may be."""
        await super().startup(sockets=[])

        def make() -> asyncio.Protocol:
            state = {"server_state": self.server_state, "app_state": self.lifespan.state}
            connection: Any = self.config.http_protocol_class
            return connection(config=self.config, **state)

        self._acceptor = Acceptor(self._gate, sockets or [], make)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new connections, and wait for what is under way, as long as agreed."""
        runtime = self._app.runtime
        self._acceptor.close()
        self._ending(len(runtime.streams))

        async def shut() -> None:
            left_s = self._drain_s
            while left_s > 0:
                await tick(min(TICK_S, left_s))
                left_s -= TICK_S
            runtime.shut()

        late = asyncio.create_task(shut())
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()
            self._app.close()
