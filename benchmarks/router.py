"""A small router over HTTP before several servers, with a placement policy of this package.

Run: python benchmarks/router.py --policy cache_aware --probes probes.json --capacity-tokens 8192 URL URL

Prompts are token ids. The policy sees what a router can know: which requests it sent where, which of them have
their first token, the time that a latency model expects of the other prompts, and the blocks that each server was
sent last, as many as its KVCache holds. The policy `fewest_requests` uses the first of these alone. Answers are
passed on as they come, and are not parsed. A connection carries one request.
"""  # noqa: INP001  # scripts, not a package

import argparse
import asyncio
import contextlib
import itertools
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final
from urllib.parse import urlsplit

import numpy as np

from mooncake_lab.book.chapters.endtoend.gain import latency_model
from mooncake_lab.conductor import (
    ClusterView,
    DecodeView,
    Estimator,
    LatencyEstimator,
    PlacementPolicy,
    PrefillView,
    named_placement,
)
from mooncake_lab.core import BlockKey, Request, block_keys, sum_in_order

_EVENT: Final = b"data: "
"""What the first token comes with."""
_REFUSAL: Final = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(slots=True, kw_only=True, eq=False)
class Backend:
    """A server as the router knows it. Mutable: requests come and go.

    Args:
        name: its address.
        capacity_blocks: blocks of its KVCache.
    """

    name: str
    capacity_blocks: int
    requests: dict[int, Request] = field(default_factory=dict[int, Request])
    prefills_s: dict[int, float] = field(default_factory=dict[int, float])
    """The time expected of each prompt without a first token."""
    assigned_requests: int = 0
    _blocks: OrderedDict[BlockKey, None] = field(default_factory=OrderedDict[BlockKey, None])

    def matched_blocks(self, keys: Sequence[BlockKey]) -> int:
        """Leading blocks of a prompt that it was sent before, and that its cache may still hold."""
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, keys))

    def send(self, request: Request, prefill_s: float) -> None:
        """Note a request, and its blocks as those used last."""
        self.requests[request.id], self.prefills_s[request.id] = request, prefill_s
        self.assigned_requests += 1
        for key in reversed(request.block_keys):  # the first of a prompt are evicted last
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self.capacity_blocks:
            self._blocks.popitem(last=False)

    def end(self, request_id: int) -> None:
        """Note that a request is over."""
        self.prefills_s.pop(request_id, None)
        del self.requests[request_id]


@final
class Router:
    """Places requests on backends by a policy. Mutable: it counts.

    Args:
        backends: the servers.
        policy: which of them serves a request.
        estimate: the time that a prompt needs.
        block_size_tokens: of the servers' KVCache.
    """

    def __init__(
        self, backends: Sequence[Backend], policy: PlacementPolicy, estimate: Estimator, block_size_tokens: int
    ) -> None:
        self._backends = {backend.name: backend for backend in backends}
        self._policy, self._estimate, self._size = policy, estimate, block_size_tokens
        self._ids = itertools.count()
        self._start_s = time.monotonic()

    def place(self, prompt: Sequence[int], max_tokens: int) -> tuple[Backend, int]:
        """Choose a server for a prompt, and note the request there; its id."""
        now_s = time.monotonic() - self._start_s
        keys = block_keys(np.asarray(prompt, np.int32), self._size)
        request = Request(
            id=next(self._ids), arrival_s=now_s, input_tokens=len(prompt), block_keys=tuple(keys),
            block_size_tokens=self._size, max_tokens=max_tokens,
        )  # fmt: skip
        view = ClusterView(
            taken_at_s=now_s,
            prefill=tuple(
                PrefillView(
                    name=each.name, backlog_s=sum_in_order(each.prefills_s.values()),
                    queued_requests=len(each.prefills_s), assigned_requests=each.assigned_requests,
                    matched_blocks=each.matched_blocks(keys),
                )
                for each in self._backends.values()
            ),
            decode=tuple(
                DecodeView(
                    name=each.name, requests=len(each.requests), capacity_tokens=each.capacity_blocks * self._size,
                    context_tokens=sum(request.input_tokens for request in each.requests.values()),
                )
                for each in self._backends.values()
            ),
        )  # fmt: skip
        placement = self._policy.place(request, view, self._estimate)
        backend = self._backends[placement.prefill]
        backend.send(request, self._estimate.prefill_s(request.id, len(prompt), placement.reused_tokens))
        return backend, request.id

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one request and its answer."""
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_content_length(head))
            if not body:  # such as the list of models
                await _pass_on(next(iter(self._backends)), head, writer)
                return
            asked = json.loads(body)
            backend, number = self.place(asked["prompt"], asked["max_tokens"])
            try:
                await _pass_on(backend.name, head + body, writer, lambda: backend.prefills_s.pop(number, None))
            finally:
                backend.end(number)


async def _pass_on(
    name: str, message: bytes, writer: asyncio.StreamWriter, began: Callable[[], object] = lambda: None
) -> None:
    """Send a request to a server and its answer to the client; `began` is told when the first token comes."""
    address = urlsplit(name)
    try:
        answers, to_server = await asyncio.open_connection(address.hostname, address.port)
    except OSError:
        writer.write(_REFUSAL)
        await writer.drain()
        return
    with contextlib.closing(to_server):
        to_server.write(message)
        has_begun = False
        while data := await answers.read(1 << 16):
            if not has_begun and _EVENT in data:
                has_begun = True
                began()
            writer.write(data)
            await writer.drain()


def _content_length(head: bytes) -> int:
    """Bytes of the body; none where the head names none."""
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(lengths[0].partition(b":")[2]) if lengths else 0


async def _route(router: Router, port: int) -> None:
    server = await asyncio.start_server(router.serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Route until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="URL")
    parser.add_argument("--policy", choices=("fewest_requests", "cache_aware"), default="fewest_requests")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--probes", type=Path, required=True, help="JSON: what prompts and decode steps took")
    parser.add_argument("--model", default="lab-30m", help="the shape of the model that was timed")
    parser.add_argument("--capacity-tokens", type=int, required=True, help="KVCache of each server")
    parser.add_argument("--block-size", type=int, default=32)
    asked = parser.parse_args()
    latency = latency_model(json.loads(asked.probes.read_text(encoding="utf-8")), asked.model)
    blocks = asked.capacity_tokens // asked.block_size
    backends = [Backend(name=url, capacity_blocks=blocks) for url in asked.servers]
    router = Router(backends, named_placement(asked.policy, 0), LatencyEstimator(latency), asked.block_size)
    asyncio.run(_route(router, asked.port))


if __name__ == "__main__":
    main()
