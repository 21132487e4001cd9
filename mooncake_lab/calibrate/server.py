"""A real server: clients in threads of their own, and what its other routes say about it."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Final, final

import msgspec

from mooncake_lab.calibrate.connection import ServerConnection, StatusError
from mooncake_lab.calibrate.dialect import Dialect, learn
from mooncake_lab.calibrate.observations import CalibrationError, Inquiry, Lanes, Reply
from mooncake_lab.calibrate.settings import Metrics, read_metrics

_LOOK_S: Final = 0.05
"""How often the clients are looked at."""
_REUSED: Final = (
    ("mooncake_prompt_tokens_total", {"how": "reused"}),
    ("vllm:prefix_cache_hits_total", {}),
    ("vllm:prefix_cache_hits", {}),
)
"""Counters of prompt tokens that were found in a cache, ours and vLLM's."""


@final
class HttpServer:
    """A `ServedModel` over HTTP.

    Args:
        url: with or without `/v1`.
        model: its name in requests; None takes the first one that the server lists.
        api_key: for the server.
        timeout_s: how long it may be silent.
        most_s: how long one answer may take in all.

    Raises:
        CalibrationError: when it cannot be talked to, or answers no completion.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        most_s: float = 600.0,
    ) -> None:
        self._connection = ServerConnection(url, api_key, timeout_s, most_s)
        with contextlib.closing(self._connection):
            self.described = _described(self._connection, model)
            """What `/v1/models` says about the model."""
            self.dialect: Dialect = learn(self._connection, self.described["id"])
        self.takes_token_ids = self.dialect.form == "token ids"

    def replies(self, lanes: Lanes, note: Callable[[Reply], None]) -> list[list[Reply]]:
        """As `ServedModel`; a request that the server refuses has a failure, one that hangs ends the calibration.

        Raises:
            CalibrationError: when an answer is no answer.
        """
        zero_s = time.perf_counter() + _LOOK_S
        clients = [_Client(self._connection.another(), self.dialect, lane, zero_s, note) for lane in lanes]
        try:
            for client in clients:
                client.start()
            while any(client.is_alive() for client in clients):
                time.sleep(_LOOK_S)
                self._check(clients)
        except BaseException:
            for client in clients:
                client.stop()
            for client in clients:
                client.join(1.0)
            raise
        self._check(clients)
        return [client.found for client in clients]

    def _check(self, clients: "list[_Client]") -> None:
        now_s = time.perf_counter()
        for client in clients:
            if client.error is not None:
                raise client.error
            late = client.connection.takes_too_long(now_s)
            if late is not None:
                raise late

    def metrics(self) -> Metrics:
        """What `/metrics` says now; nothing where there is no such route."""
        with contextlib.suppress(StatusError, CalibrationError):
            return read_metrics(self._connection.call("GET", "/metrics").decode("utf-8", "replace"))
        return Metrics(())

    def reused_tokens(self) -> float | None:
        """As `ServedModel`."""
        metrics = self.metrics()
        found = [metrics.total(name, **labels) for name, labels in _REUSED]
        return next((value for value in found if value is not None), None)

    def reset_prefix_cache(self) -> bool:
        """As `ServedModel`: `POST /reset_prefix_cache`, ours and that of vLLM in its development mode."""
        with contextlib.suppress(StatusError, CalibrationError):
            self._connection.call("POST", "/reset_prefix_cache")
            return True
        return False


class _Client(threading.Thread):
    """Sends the requests of one lane. Mutable: a thread."""

    def __init__(
        self,
        connection: ServerConnection,
        dialect: Dialect,
        lane: Any,
        zero_s: float,
        note: Callable[[Reply], None],
    ) -> None:
        super().__init__(daemon=True)
        self.connection = connection
        self.found: list[Reply] = []
        self.error: CalibrationError | None = None
        self._dialect = dialect
        self._lane: list[tuple[Inquiry, bytes]] = [(inquiry, dialect.body(inquiry)) for inquiry in lane]
        self._zero_s = zero_s
        self._note = note
        self._stopped = threading.Event()

    def run(self) -> None:
        """Until all are answered, or one is not."""
        with contextlib.closing(self.connection):
            for inquiry, body in self._lane:
                wait_s = self._zero_s + inquiry.at_s - time.perf_counter()
                if self._stopped.wait(max(0.0, wait_s)):
                    return
                sent_s = time.perf_counter() - self._zero_s
                try:
                    reply = self._dialect.ask(self.connection, inquiry, self._zero_s, body)
                except StatusError as refused:
                    reply = Reply(sent_s, failure=str(refused))
                except CalibrationError as error:
                    self.error = error
                    return
                self.found.append(reply)
                self._note(reply)

    def stop(self) -> None:
        """Send no more, and break off what is under way."""
        self._stopped.set()
        self.connection.break_off()


def _described(connection: ServerConnection, model: str | None) -> dict[str, Any]:
    """The entry of a model in `/v1/models`; of a server without such a list, its name alone.

    Raises:
        CalibrationError: when the list is none, or does not have the model.
    """
    try:
        body = connection.call("GET", "/v1/models")
    except StatusError as error:
        if model is None or error.status in {401, 403}:
            raise CalibrationError(f"{connection.url} refuses to list its models with {error}") from None
        return {"id": model}
    try:
        found = msgspec.json.decode(body, type=_Models).data
    except msgspec.MsgspecError as error:
        raise CalibrationError(f"{connection.url} has a list of models that is none: {error}") from None
    if model is not None and not found:  # some servers list nothing before the first request
        return {"id": model}
    names = [each.get("id") for each in found]
    chosen = next((each for each in found if model in {None, each.get("id")}), None)
    if chosen is None or not isinstance(chosen.get("id"), str):
        raise CalibrationError(f"{connection.url} serves no model {model!r}; it lists {names[:5]}")
    return chosen


class _Models(msgspec.Struct, frozen=True):
    data: list[dict[str, Any]]
