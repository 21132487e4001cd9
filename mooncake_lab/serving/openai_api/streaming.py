"""Answers in OpenAI's JSON: whole, or as a stream of server-sent events."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from mooncake_lab.serving.messages import SamplingParams
from mooncake_lab.serving.openai_api.parsing import BadRequestError, Wanted
from mooncake_lab.serving.openai_api.stop_strings import Writer
from mooncake_lab.serving.openai_api.tokenizer import Tokenizer
from mooncake_lab.serving.runtime import ClusterRuntime
from mooncake_lab.serving.stream import RequestStream

_REASONS: Final = {"length": "length", "end_token": "stop"}


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One prompt's answer as it grows. Mutable for that reason."""

    index: int
    stream: RequestStream
    writer: Writer
    tokens: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of a choice: text, the tokens it came from, and at last why it ended."""

    choice: Choice
    text: str
    tokens: tuple[int, ...]


def begin(runtime: ClusterRuntime, wanted: Wanted, tokenizer: Tokenizer, completion_id: str) -> list[Choice]:
    """Place every prompt of a request; all of them, or none.

    Raises:
        RejectedError: when the cluster refuses one.
        BadRequestError: when one can never be served.
    """
    choices: list[Choice] = []
    try:
        for index, prompt in enumerate(wanted.prompts):
            params = wanted.params
            if not params.max_new_tokens:
                room = runtime.max_model_len() - len(prompt)
                params = msgspec.structs.replace(params, max_new_tokens=max(1, room))
            _check_least(params)
            stream = runtime.submit(np.asarray(prompt, dtype=np.int32), params, completion_id=completion_id)
            writer = Writer(tokenizer.stream(), wanted.stops, least_tokens=params.min_new_tokens)
            choices.append(Choice(index=index, stream=stream, writer=writer))
    except BaseException as error:
        stop(runtime, choices)
        if isinstance(error, ValueError) and not isinstance(error, BadRequestError):
            raise BadRequestError(str(error), "messages" if wanted.is_chat else "prompt") from error
        raise
    return choices


def _check_least(params: SamplingParams) -> None:
    if params.min_new_tokens > params.max_new_tokens:
        raise BadRequestError(
            f"min_tokens is {params.min_new_tokens}; this answer may have 0 to {params.max_new_tokens} tokens",
            "min_tokens",
        )


def stop(runtime: ClusterRuntime, choices: Sequence[Choice]) -> None:
    """Let go of whatever of a request still runs."""
    for choice in choices:
        runtime.cancel(choice.stream)


async def pieces(runtime: ClusterRuntime, choices: Sequence[Choice]) -> AsyncGenerator[Delta, None]:
    """What is new, of all choices as it comes.

    Raises:
        RejectedError: when one is refused after all.
        FailedError: when one cannot be served.
    """
    if len(choices) == 1:
        async for piece in _pieces_of(runtime, choices[0]):
            yield piece
        return
    news: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    async def follow(choice: Choice) -> None:
        try:
            async for piece in _pieces_of(runtime, choice):
                news.put_nowait(piece)
            news.put_nowait(None)
        except Exception as error:  # noqa: BLE001  # raised again below
            news.put_nowait(error)

    tasks = [asyncio.create_task(follow(choice)) for choice in choices]
    try:
        left = len(tasks)
        while left:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


async def _pieces_of(runtime: ClusterRuntime, choice: Choice) -> AsyncGenerator[Delta, None]:
    async with contextlib.aclosing(choice.stream.stream()) as tokens:
        async for token in tokens:
            choice.tokens.append(token)
            text = choice.writer.push(token)
            if choice.writer.is_stopped:
                runtime.stop(choice.stream)
                choice.finish_reason = "stop"
                yield Delta(choice, text, (token,))
                return
            yield Delta(choice, text, (token,))
    text = choice.writer.finish()
    end = choice.stream.end
    assert end is not None  # noqa: S101  # its stream is over
    choice.finish_reason = "stop" if choice.writer.is_stopped else _REASONS.get(end.reason, end.reason)
    yield Delta(choice, text, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every part of one answer repeats."""

    id: str
    model: str
    wanted: Wanted
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], texts: Sequence[str]) -> dict[str, Any]:
        """The answer in one piece."""
        found: list[dict[str, Any]] = []
        for choice, text in zip(choices, texts, strict=True):
            content: dict[str, Any] = {"text": text}
            if self.wanted.is_chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            found.append(self._choice(choice, content, tuple(choice.tokens), choice.finish_reason))
        kind = "chat.completion" if self.wanted.is_chat else "text_completion"
        return self._body(kind, found) | {"usage": usage(choices)}

    def part(self, piece: Delta, choices: Sequence[Choice], *, is_first: bool) -> dict[str, Any]:
        """One event of a stream."""
        content: dict[str, Any] = {"text": piece.text}
        if self.wanted.is_chat:
            content = {"delta": ({"role": "assistant"} if is_first else {}) | {"content": piece.text}}
        ends = piece.choice.finish_reason
        body = self._body(self._kind, [self._choice(piece.choice, content, piece.tokens, ends)])
        if self.wanted.include_usage:  # OpenAI's other events have the field too, and it is null there
            body["usage"] = usage(choices) if self.wanted.continuous_usage else None
        return body

    def closing(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last event of a stream whose client wants to know the usage."""
        return self._body(self._kind, []) | {"usage": usage(choices)}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.wanted.is_chat else "text_completion"

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(
        self, choice: Choice, content: dict[str, Any], tokens: tuple[int, ...], ends: str | None
    ) -> dict[str, Any]:
        also = {"token_ids": list(tokens)} if self.wanted.return_token_ids else {}
        return {"index": choice.index, **content, "logprobs": None, "finish_reason": ends, **also}


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens that a request took and made so far, and those of its prompts whose KVCache was reused."""
    prompt = sum(len(choice.stream.prompt) for choice in choices)
    made = sum(len(choice.tokens) for choice in choices)
    cached = sum(choice.stream.cached_tokens or 0 for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
