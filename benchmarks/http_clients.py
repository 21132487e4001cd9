"""Clients of servers with OpenAI's API: prompts of token ids, and the time of each token of the answers.

Every request has a connection of its own. A server that sends several tokens in one event gives them one time.
"""  # noqa: INP001  # scripts, not a package

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import httpx
from http_servers import MODEL

_SILENCE_S: Final = 120.0
"""How long a server may send nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request of a client."""

    at_s: float = 0.0
    """When it is sent, in seconds since the first could be."""
    prompt: Sequence[int]
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client saw."""

    sent_s: float
    token_times_s: tuple[float, ...]
    """When each token came, in seconds since the first question could be sent."""
    error: str | None = None
    """Why there are fewer tokens than were asked for."""

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None where none came."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None


def open_loop(url: str, questions: Sequence[Question], patience_s: float) -> list[Answer]:
    """Send each question at its time, whatever the server does; the clients leave so long after the last one."""
    return asyncio.run(_open_loop(url, questions, patience_s))


def closed_loop(url: str, questions: Iterable[Question], clients: int) -> list[Answer]:
    """So many clients, each of which sends its next question when it has its answer."""
    return asyncio.run(_closed_loop(url, questions, clients))


async def _open_loop(url: str, questions: Sequence[Question], patience_s: float) -> list[Answer]:
    async with _client() as client:
        start_s = time.perf_counter()
        end_s = start_s + patience_s + max(question.at_s for question in questions)
        return await asyncio.gather(*(_ask(client, url, each, start_s, end_s) for each in questions))


async def _closed_loop(url: str, questions: Iterable[Question], clients: int) -> list[Answer]:
    left, found = iter(questions), list[Answer]()
    async with _client() as client:
        start_s = time.perf_counter()

        async def one() -> None:
            for question in left:
                found.append(await _ask(client, url, question, start_s, float("inf")))

        await asyncio.gather(*(one() for _ in range(clients)))
    return found


def _client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=_SILENCE_S, limits=limits, headers={"Connection": "close"}, trust_env=False)


async def _ask(client: httpx.AsyncClient, url: str, question: Question, start_s: float, end_s: float) -> Answer:
    await asyncio.sleep(max(0.0, start_s + question.at_s - time.perf_counter()))
    sent_s, times_s, error = time.perf_counter() - start_s, list[float](), None
    limit_s = None if end_s == float("inf") else end_s - time.perf_counter()
    try:
        async with asyncio.timeout(limit_s):
            await _receive(client, url, question, start_s, times_s)
    except TimeoutError:
        error = "not done when the clients left"
    except (httpx.HTTPError, ValueError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    if error is None and len(times_s) != question.new_tokens:
        error = f"{len(times_s)} of {question.new_tokens} tokens came"
    return Answer(sent_s=sent_s, token_times_s=tuple(times_s), error=error)


async def _receive(
    client: httpx.AsyncClient, url: str, question: Question, start_s: float, times_s: list[float]
) -> None:
    """Note when tokens come.

    Raises:
        ValueError: when the server refuses the request, or sends what is no event.
    """
    body = {
        "model": MODEL, "prompt": list(question.prompt), "max_tokens": question.new_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                now_s = time.perf_counter() - start_s
                choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
                times_s += [now_s] * len(choices[0].get("token_ids") or ())
