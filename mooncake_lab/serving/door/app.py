"""The HTTP application: OpenAI's routes over a live cluster."""

import asyncio
import contextlib
import hmac
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Final, final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from mooncake_lab.serving.door.answering import Choice, Envelope, Piece, begin, pieces, stop
from mooncake_lab.serving.door.telemetry import Telemetry
from mooncake_lab.serving.door.tokenizer import Tokenizer
from mooncake_lab.serving.door.wanted import BadRequestError, Wanted, read_chat, read_completion
from mooncake_lab.serving.hall import Hall
from mooncake_lab.serving.ticket import FailedError, RejectedError

MOST_BODY_BYTES: Final = 8 * 1024**2
MOST_RECEIVED_BYTES: Final = 256 * 1024**2
"""Of all bodies that are being received at once."""
MOST_BODY_S: Final = 30.0
"""How long a client may take to send one."""
_CLIENT_CLOSED: Final = 499
_KINDS: Final = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "invalid_request_error", 413: "invalid_request_error",
    429: "rate_limit_error",
}  # fmt: skip


@final
class Door:
    """Answers requests with a cluster. Mutable: it counts the bytes that it is receiving.

    Args:
        hall: the cluster.
        tokenizer: text to tokens and back.
        telemetry: what `/metrics` shows.
        token: what clients must bring; None lets everybody in.
    """

    def __init__(self, hall: Hall, tokenizer: Tokenizer, telemetry: Telemetry, token: str | None) -> None:
        self._hall = hall
        self._tokenizer = tokenizer
        self._telemetry = telemetry
        self._token = token
        self._opened = int(time.time())
        self._received_bytes = 0

    def app(self) -> Starlette:
        """The application, for any ASGI server."""
        routes = [
            Route("/v1/completions", self._guarded(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guarded(self._chat), methods=["POST"]),
            Route("/v1/models", self._guarded(self._models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._guarded(self._one_model), methods=["GET"]),
            Route("/metrics", self._guarded(self._metrics), methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    def _guarded(self, act: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """The same, for clients that know the token."""

        async def guarded(request: Request) -> Response:
            if self._token is not None:
                given = request.headers.get("authorization", "")
                if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                    return error(401, "the bearer token is missing or wrong; the server printed it when it began")
            return await act(request)

        return guarded

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, lambda body: read_completion(body, self._tokenizer, self._model))

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, lambda body: read_chat(body, self._tokenizer, self._model))

    async def _models(self, _: Request) -> Response:
        return _json({"object": "list", "data": [self._described]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._model:
            return error(404, f"no model {name!r}; there is {self._model!r}", "model", code="model_not_found")
        return _json(self._described)

    async def _health(self, _: Request) -> Response:
        books = self._hall.dispatcher.placer.books
        workers = sorted(books.accounts)
        status = "ok" if books.can_serve else "waiting for workers"
        return _json({"status": status, "workers": workers}, 200 if books.can_serve else 503)

    async def _metrics(self, _: Request) -> Response:
        placer = self._hall.dispatcher.placer
        page = self._telemetry.page(placer.books, len(placer.tickets))
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answer(self, request: Request, read: Callable[[bytes], Wanted]) -> Response:
        try:
            wanted = read(await self._body(request))
            choices = begin(self._hall, wanted, self._tokenizer)
        except (BadRequestError, LookupError, RejectedError, FailedError) as refused:
            return _refusal(refused)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_CLOSED)
        prefix = "chatcmpl" if wanted.is_chat else "cmpl"
        envelope = Envelope(id=f"{prefix}-{secrets.token_hex(12)}", model=self._model, wanted=wanted)
        act = self._streamed if wanted.is_stream else self._whole
        return await act(request, envelope, choices)

    async def _body(self, request: Request) -> bytes:
        """The body of a request, as far as it may go.

        Raises:
            HTTPException: when it is larger than allowed, takes longer, or comes with too many others.
        """
        found = bytearray()
        try:
            async with asyncio.timeout(MOST_BODY_S):
                async for chunk in request.stream():
                    found += chunk
                    self._received_bytes += len(chunk)
                    if len(found) > MOST_BODY_BYTES:
                        raise HTTPException(413, f"the body has more than {MOST_BODY_BYTES} bytes")
                    if self._received_bytes > MOST_RECEIVED_BYTES:
                        reason = (
                            f"{self._received_bytes} bytes are being received; allowed are {MOST_RECEIVED_BYTES}"
                        )
                        raise HTTPException(429, reason, headers={"Retry-After": "1"})
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {MOST_BODY_S:g} s") from None
        finally:
            self._received_bytes -= len(found)
        return bytes(found)

    async def _streamed(self, request: Request, envelope: Envelope, choices: list[Choice]) -> Response:
        """The answer as it comes. The first piece is waited for: a refusal before it is a status, not an event."""
        news = pieces(self._hall, choices)
        beginning = asyncio.ensure_future(anext(news, None))
        leaving = asyncio.create_task(_left(request))
        is_begun = False
        try:
            await asyncio.wait({beginning, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not beginning.done():
                return Response(status_code=_CLIENT_CLOSED)
            events = self._events(envelope, choices, beginning.result(), news)
            is_begun = True
        except (FailedError, RejectedError) as failed:
            return _refusal(failed)
        finally:
            leaving.cancel()
            if not is_begun:
                beginning.cancel()
                stop(self._hall, choices)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _whole(self, request: Request, envelope: Envelope, choices: list[Choice]) -> Response:
        """The answer in one piece, unless the client goes away first."""
        collecting = asyncio.create_task(self._collect(choices))
        leaving = asyncio.create_task(_left(request))
        try:
            await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=_CLIENT_CLOSED)
            return _json(envelope.whole(choices, await collecting))
        except (FailedError, RejectedError) as failed:
            return _refusal(failed)
        finally:
            for task in (collecting, leaving):
                task.cancel()
            stop(self._hall, choices)

    async def _collect(self, choices: list[Choice]) -> list[str]:
        texts = ["" for _ in choices]
        async for piece in pieces(self._hall, choices):
            texts[piece.choice.index] += piece.text
        return texts

    async def _events(
        self, envelope: Envelope, choices: list[Choice], first: Piece | None, rest: AsyncGenerator[Piece, None]
    ) -> AsyncIterator[bytes]:
        """The answer as server-sent events; when the client goes away, so does the request."""
        begun: set[int] = set()
        try:
            async with contextlib.aclosing(rest) as news:
                piece = first
                while piece is not None:
                    if piece.text or piece.tokens or piece.choice.finish_reason:
                        yield _event(envelope.part(piece, is_first=piece.choice.index not in begun))
                        begun.add(piece.choice.index)
                    piece = await anext(news, None)
            if envelope.wanted.include_usage:
                yield _event(envelope.closing(choices))
            yield b"data: [DONE]\n\n"
        except (FailedError, RejectedError) as failed:
            yield _event(_error_body(503, str(failed), None, "failed"))
        finally:
            stop(self._hall, choices)

    @property
    def _described(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._opened, "owned_by": "mooncake-lab"}

    @property
    def _model(self) -> str:
        return self._hall.spec.model


def error(
    status: int,
    message: str,
    param: str | None = None,
    *,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """An error as OpenAI's clients expect it."""
    return _json(_error_body(status, message, param, code), status, headers)


def _refusal(refused: Exception) -> Response:
    """The answer to a request that is not begun."""
    if isinstance(refused, BadRequestError):
        return error(400, str(refused), refused.param)
    if isinstance(refused, LookupError):
        return error(404, str(refused.args[0]), "model", code="model_not_found")
    if isinstance(refused, RejectedError):
        wait = {"Retry-After": str(math.ceil(refused.retry_after_s))}
        return error(429, str(refused), code="rejected", headers=wait)
    return error(503, str(refused), code="failed")


def _error_body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = _KINDS.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _left(request: Request) -> None:
    """Return when the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(_: Request, raised: Exception) -> Response:
    assert isinstance(raised, HTTPException)  # noqa: S101  # starlette calls it for nothing else
    return error(raised.status_code, raised.detail, headers=dict(raised.headers or {}))
