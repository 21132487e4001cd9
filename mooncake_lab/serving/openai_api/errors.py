"""Refusals in the form that OpenAI's clients expect."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of a refusal: its sentence, and the parameter of the request that it is about."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def plain_answer(status: HTTPStatus, message: str, headers: Mapping[str, str]) -> bytes:
    """A refusal as it goes over a connection that is closed behind it."""
    body = msgspec.json.encode(error_body(status, message))
    own = {"Connection": "close", "Content-Type": "application/json", "Content-Length": len(body)}
    lines = [f"{name}: {value}" for name, value in {**own, **headers}.items()]
    return "\r\n".join([f"HTTP/1.1 {status} {status.phrase}", *lines, "", ""]).encode() + body
