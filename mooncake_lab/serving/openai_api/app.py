"""The HTTP application: OpenAI's routes over a live cluster."""

import asyncio
import bisect
import contextlib
import hmac
import ipaddress
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, final
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mooncake_lab.serving.openai_api.errors import error_body
from mooncake_lab.serving.openai_api.parsing import BadRequestError, ParsedRequest, Reader
from mooncake_lab.serving.openai_api.streaming import Choice, Delta, Envelope, begin, pieces, stop
from mooncake_lab.serving.openai_api.telemetry import Telemetry
from mooncake_lab.serving.openai_api.tokenizer import Tokenizer
from mooncake_lab.serving.runtime import ClusterRuntime
from mooncake_lab.serving.stream import FailedError, RejectedError

MOST_BODY_BYTES: Final = 8 * 1024**2
MOST_RECEIVED_BYTES: Final = 256 * 1024**2
"""Bytes of all bodies together that are being received, or wait to be read."""
_READERS_BYTES: Final = (2**10, 2**12, 2**14, 2**18)
"""Bodies up to each of these sizes have a thread of their own that reads them, and so have longer ones: what is
tokenised in milliseconds does not wait for what takes seconds."""
_CLIENT_CLOSED: Final = 499
_FOREIGN_HOST: Final = (
    "the request is for the host {!r}; without an API key, this server answers only to localhost and its address"
)
_Result = TypeVar("_Result")


@final
class OpenAIApp:
    """Answers requests with a cluster. Mutable: it counts the bytes that it is receiving, and owns threads.

    Args:
        runtime: the cluster.
        tokenizer: text to tokens and back.
        telemetry: what `/metrics` shows.
        token: what clients must bring; None lets all clients in.
        model: the name by which clients ask for the model; None takes the cluster's.
        host: where it listens; without a token at a loopback address, requests for another host are refused.
    """

    def __init__(
        self,
        runtime: ClusterRuntime,
        tokenizer: Tokenizer,
        telemetry: Telemetry,
        token: str | None,
        *,
        model: str | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.runtime = runtime
        self._tokenizer = tokenizer
        self._telemetry = telemetry
        telemetry.describe(runtime.spec)
        self._token = token
        self._model = runtime.options.model if model is None else model
        self._host = host.strip("[]").lower()
        self._opened = int(time.time())
        self._received_bytes = 0
        # a long prompt takes long to tokenise: the event loop must go on meanwhile
        self._readers = [
            ThreadPoolExecutor(1, thread_name_prefix="tokenizer") for _ in range(len(_READERS_BYTES) + 1)
        ]

    def close(self) -> None:
        """End the threads that read requests."""
        for reader in self._readers:
            reader.shutdown(wait=False, cancel_futures=True)

    def asgi(self) -> ASGIApp:
        """The application, for any ASGI server."""
        routes = [
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._one_model), methods=["GET"]),
            Route("/reset_prefix_cache", self._guarded(self._reset_prefix_cache), methods=["POST"]),
            Route("/metrics", self._guarded(self._metrics, is_open_here=True), methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        there = ", ".join(f"{method} {each.path_format}" for each, method in _calls(routes))

        async def refusal(request: Request, raised: Exception) -> Response:
            if isinstance(raised, HTTPException) and raised.status_code in {404, 405}:
                says = f"there is no {request.method} {request.url.path} here; there are {there}"
                return _error(raised.status_code, says, headers=dict(raised.headers or {}))
            return await _refusal(request, raised)

        raised = (HTTPException, BadRequestError, RejectedError, FailedError, ClientDisconnect, Exception)
        return _unambiguous(Starlette(routes=routes, exception_handlers=dict.fromkeys(raised, refusal)))

    def _guarded(self, act: Callable[[Request], Any], *, is_open_here: bool = False) -> Callable[[Request], Any]:
        """A handler for clients that know the token, or for those of this machine too."""

        async def guarded(request: Request) -> Response:
            if not self._knows_token(request):
                is_open = self._token is None or (is_open_here and _is_from_here(request))
                if not is_open:
                    says = "the bearer token is missing or wrong; the server printed it when it began"
                    raise HTTPException(401, says, headers={"WWW-Authenticate": "Bearer"})
                if not self._is_for_here(request):
                    raise HTTPException(403, _FOREIGN_HOST.format(request.headers["host"]))
            return await act(request)

        return guarded

    def _knows_token(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode(), str(self._token).encode()
        )

    def _is_for_here(self, request: Request) -> bool:
        """Whether a request names this server's host; where it listens on more than loopback, any name may be its.

        A page of another host can give its own name the address 127.0.0.1 (DNS rebinding), and a browser then lets
        it read what is here.
        """
        named = request.headers.get("host")
        if named is None or not is_loopback(self._host):
            return True
        try:
            host = urlsplit(f"//{named}").hostname or ""
        except ValueError:  # half of a bracket
            return False
        return host == self._host or is_loopback(host)

    def _check_kind(self, request: Request) -> None:
        """Without a token, bodies have to be declared as JSON: browsers send no other page's JSON unasked.

        Raises:
            HTTPException: when it is something else.
        """
        kind = request.headers.get("content-type")
        if self._token is not None or (kind or "").partition(";")[0].strip().lower() == "application/json":
            return
        said = "is missing" if kind is None else f"is {kind[:80]!r}"
        raise HTTPException(
            415, f"the Content-Type of the body {said}; without an API key, application/json is required"
        )

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, Reader.completion)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, Reader.chat)

    async def _models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._described]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._model:
            raise BadRequestError(f"no model {name!r}; there is {self._model!r}", "model", status=404)
        return _json(self._described)

    async def _reset_prefix_cache(self, request: Request) -> Response:
        """Every cache is empty when this is answered (vLLM's route); requests under way keep what they use."""
        self._check_kind(request)
        await self.runtime.reset_prefix_cache()
        return Response()

    async def _health(self, _: Request) -> Response:
        table = self.runtime.coordinator.instances
        workers = sorted(worker.name for worker in table.up)
        status = "ok" if table.can_serve else "waiting for workers"
        return _json({"status": status, "workers": workers}, 200 if table.can_serve else 503)

    async def _metrics(self, _: Request) -> Response:
        runtime = self.runtime
        page = self._telemetry.page(runtime.workers, runtime.damaged_blocks, len(runtime.streams))
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answer(self, request: Request, read: Callable[[Reader, bytes], ParsedRequest]) -> Response:
        received_s = time.monotonic()
        self._check_kind(request)
        async with self._body(request) as body:
            most = self.runtime.max_model_len()
            reader = Reader(tokenizer=self._tokenizer, model=self._model, most_tokens=most)
            thread = self._readers[bisect.bisect_left(_READERS_BYTES, len(body))]
            parsed = await asyncio.get_running_loop().run_in_executor(thread, read, reader, body)
        name = f"{'chatcmpl' if parsed.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        session = request.headers.get("x-session-id") or None
        choices = begin(self.runtime, parsed, self._tokenizer, name, session)
        envelope = Envelope(id=name, model=self._model, parsed=parsed)
        news = self._timed(choices, received_s)
        is_streaming = False
        try:
            if not parsed.is_stream:
                return _json(envelope.whole(choices, await _unless_left(request, _collect(choices, news))))
            # the first piece is waited for: a refusal before it is a status, not an event
            events = self._events(envelope, choices, await _unless_left(request, anext(news, None)), news)
            is_streaming = True
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        finally:
            if not is_streaming:
                stop(self.runtime, choices)

    async def _timed(self, choices: list[Choice], received_s: float) -> AsyncGenerator[Delta, None]:
        """What is new; the first token is timed from when the request came, the front's own work included."""
        is_first = True
        async with contextlib.aclosing(pieces(self.runtime, choices)) as news:
            async for piece in news:
                if is_first and piece.tokens:
                    self._telemetry.first_token(time.monotonic() - received_s)
                    is_first = False
                yield piece

    @contextlib.asynccontextmanager
    async def _body(self, request: Request) -> AsyncGenerator[bytes]:
        """The body of a request, as far as it may go; its bytes count among all that came until it is read.

        Raises:
            HTTPException: when it is larger than allowed, or comes with too many others.
            ClientDisconnect: when the client hangs up, or took too long and was told so.
        """
        found, told = bytearray(), request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > MOST_BODY_BYTES:
            raise _too_large()  # before it is sent: a client that sends `Expect: 100-continue` waits for that
        try:
            async for chunk in request.stream():
                found += chunk
                self._received_bytes += len(chunk)
                self._check_size(len(found))
            yield bytes(found)
        finally:
            self._received_bytes -= len(found)

    def _check_size(self, of_one: int) -> None:
        if of_one > MOST_BODY_BYTES:
            raise _too_large()
        if self._received_bytes > MOST_RECEIVED_BYTES:
            reason = f"{self._received_bytes} bytes are being received; allowed are {MOST_RECEIVED_BYTES}"
            raise HTTPException(429, reason, headers={"Retry-After": "1"})

    async def _events(
        self, envelope: Envelope, choices: list[Choice], first: Delta | None, rest: AsyncGenerator[Delta, None]
    ) -> AsyncIterator[bytes]:
        """The answer as server-sent events; when the client goes away, so does the request."""
        begun: set[int] = set()
        try:
            async with contextlib.aclosing(rest) as news:
                piece = first
                while piece is not None:
                    if piece.text or piece.tokens or piece.finish_reason:
                        yield _event(envelope.part(piece, choices, is_first=piece.choice.index not in begun))
                        begun.add(piece.choice.index)
                    piece = await anext(news, None)
            if envelope.parsed.include_usage:
                yield _event(envelope.closing(choices))
            yield b"data: [DONE]\n\n"
        except (FailedError, RejectedError) as failed:
            yield _event(error_body(503, str(failed), None, "failed"))
        finally:
            stop(self.runtime, choices)

    @property
    def _described(self) -> dict[str, Any]:
        described = {"id": self._model, "object": "model", "created": self._opened, "owned_by": "mooncake-lab"}
        return described | {"max_model_len": self.runtime.max_model_len()}


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body has more than {MOST_BODY_BYTES} bytes")


def _calls(routes: list[Route]) -> list[tuple[Route, str]]:
    """Each route with its method."""
    return [(route, method) for route in routes for method in route.methods or () if method != "HEAD"]


async def _collect(choices: list[Choice], news: AsyncGenerator[Delta, None]) -> list[str]:
    """The whole text of each choice."""
    texts = ["" for _ in choices]
    async with contextlib.aclosing(news):
        async for piece in news:
            texts[piece.choice.index] += piece.text
    return texts


def _unambiguous(app: ASGIApp) -> ASGIApp:
    """The application, without requests that name two lengths: a proxy may believe the other one."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if {b"content-length", b"transfer-encoding"} <= names:
            says = "the request has both Content-Length and Transfer-Encoding; allowed is one of them"
            await _error(400, says, headers={"Connection": "close"})(scope, receive, send)
        else:
            await app(scope, receive, send)

    return guarded


def _is_from_here(request: Request) -> bool:
    """Whether the client is on this machine; behind a proxy on this machine, whether the proxy's client is."""
    return request.client is not None and request.client.host != "localhost" and is_loopback(request.client.host)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine for programs on it alone: a loopback address, or `localhost`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.rstrip(".").lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


async def _refusal(_: Request, raised: Exception) -> Response:
    """The answer to a request that is not begun, as OpenAI's clients expect it."""
    match raised:
        case ClientDisconnect():
            return Response(status_code=_CLIENT_CLOSED)
        case HTTPException():
            return _error(raised.status_code, raised.detail, headers=dict(raised.headers or {}))
        case BadRequestError():
            code = "model_not_found" if raised.status == 404 else None
            return _error(raised.status, str(raised), raised.param, code)
        case RejectedError():
            wait = {"Retry-After": str(math.ceil(raised.retry_after_s))}
            return _error(429, str(raised), code="rejected", headers=wait)
        case FailedError():
            wait = {} if raised.retry_after_s is None else {"Retry-After": str(math.ceil(raised.retry_after_s))}
            return _error(503, str(raised), code="failed", headers=wait)
        case _:
            return _error(500, "the server failed at this request; its log says why")


def _error(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    return _json(error_body(status, message, param, code), status, headers)


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _unless_left(request: Request, work: Awaitable[_Result]) -> _Result:
    """What the work gives.

    Raises:
        ClientDisconnect: when the client hangs up before that.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    """Return when the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
