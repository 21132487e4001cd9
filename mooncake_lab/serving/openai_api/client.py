"""A client that replays a trace over HTTP, against any server that speaks OpenAI's completions with token ids."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import numpy as np

from mooncake_lab.core import Arrived, Finished, FirstToken, Record, Rejected, TracedRequest
from mooncake_lab.workload import Trace
from mooncake_lab.workload.transforms import prompt_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a client saw of one request."""

    status: int
    """0 where the connection failed."""
    tokens: tuple[int, ...] = ()
    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    error: str = ""


def replay_over_http(
    trace: Trace, url: str, token: str | None, model: str, note: Callable[[Record], None] = lambda _: None
) -> dict[str, Any]:
    """Send a trace's requests at their times; how many were served, and their latencies as a client sees them.

    Args:
        trace: what is sent.
        url: of the server, with or without `/v1`.
        token: what it wants to know.
        model: the name of its model.
        note: told when a request is sent, has its first token, and ends, for whoever watches.

    Raises:
        ValueError: when no request was served, with what the server said to the first.
    """
    seen = asyncio.run(_replay(list(trace.requests()), url.rstrip("/").removesuffix("/v1"), token, model, note))
    served = [one for one in seen if one.ttft_s is not None]
    if not served:
        said = seen[0].error or f"it was answered with status {seen[0].status}"
        raise ValueError(f"none of {len(seen)} requests was served; of the first: {said}")
    ttft = np.array([one.ttft_s for one in served], dtype=np.float64)
    gaps = np.array([gap for one in served for gap in one.gaps_s] or [0.0])
    return {
        "url": url,
        "requests": len(seen),
        "finished": sum(one.status == 200 for one in seen),
        "rejected": sum(one.status == 429 for one in seen),
        "failed": sum(one.status not in {200, 429} for one in seen),
        "output_tokens": sum(len(one.tokens) for one in seen),
        "ttft_mean_s": float(ttft.mean()),
        **{f"ttft_p{p}_s": float(np.percentile(ttft, p)) for p in (50, 90, 99)},
        "gap_mean_s": float(gaps.mean()),
        "gap_p99_s": float(np.percentile(gaps, 99)),
    }


async def _replay(
    requests: list[TracedRequest], url: str, token: str | None, model: str, note: Callable[[Record], None]
) -> list[Seen]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    limits = httpx.Limits(max_connections=1024)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=300, limits=limits) as client:
        zero_s = time.monotonic()

        async def one(traced: TracedRequest) -> Seen:
            number, arrival_s = traced.request.id, traced.request.arrival_s
            await asyncio.sleep(max(0.0, arrival_s - (time.monotonic() - zero_s)))
            note(Arrived(at_s=arrival_s, request_id=number, input_tokens=traced.request.input_tokens))
            begun = lambda: note(FirstToken(at_s=time.monotonic() - zero_s, request_id=number))  # noqa: E731
            seen = await _one(client, traced, model, begun)
            at_s = time.monotonic() - zero_s
            if seen.ttft_s is None:
                note(Rejected(at_s=at_s, request_id=number, stage="server", reason=str(seen.status)))
            else:
                note(Finished(at_s=at_s, request_id=number, output_tokens=len(seen.tokens)))
            return seen

        return await asyncio.gather(*map(one, requests))


async def _one(client: httpx.AsyncClient, traced: TracedRequest, model: str, begun: Callable[[], None]) -> Seen:
    """One streamed completion; `begun` is called at its first token."""
    prompt = prompt_of(traced.request, 256).tolist()  # bytes: every vocabulary has these ids
    body = {
        "model": model, "prompt": prompt, "max_tokens": max(1, traced.output_tokens), "temperature": 0,
        "stream": True, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    start_s, tokens, times_s = time.monotonic(), list[int](), list[float]()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return Seen(status=response.status_code)
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    return Seen(status=503, tokens=tuple(tokens))
                for choice in event["choices"]:
                    if choice["token_ids"] and not tokens:
                        begun()
                    tokens += choice["token_ids"]
                    times_s += [time.monotonic()] * bool(choice["token_ids"])
    except httpx.HTTPError as error:
        return Seen(status=0, tokens=tuple(tokens), error=f"{type(error).__name__}: {error}")
    first_s = times_s[0] - start_s if times_s else None
    return Seen(status=200, tokens=tuple(tokens), ttft_s=first_s, gaps_s=tuple(np.diff(times_s).tolist()))
