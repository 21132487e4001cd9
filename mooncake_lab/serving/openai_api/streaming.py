"""Answers as clients see them: text from tokens, up to a stop sequence, in OpenAI's JSON, whole or streamed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import msgspec
import numpy as np

from mooncake_lab.serving.openai_api.parsing import BadRequestError, ParsedRequest
from mooncake_lab.serving.openai_api.text_stream import TextStream
from mooncake_lab.serving.openai_api.tokenizer import Tokenizer
from mooncake_lab.serving.runtime import ClusterRuntime
from mooncake_lab.serving.stream import RequestStream

_REASONS: Final = {"length": "length", "end_token": "stop"}


@final
class Writer:
    """One answer as it grows. Mutable: it holds back what may still become a stop sequence.

    Args:
        text: turns tokens into text.
        stops: sequences that end the answer and are not part of it.
        least_tokens: a sequence that begins before this number of tokens does not end it.
    """

    __slots__ = ("_held", "_least", "_stops", "_text", "is_stopped")

    def __init__(self, text: TextStream, stops: Sequence[str], *, least_tokens: int = 0) -> None:
        self._text = text
        self._stops = stops
        self._least = least_tokens
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """What the client may see after one more token."""
        text = self._text.push(token)
        if self._least > 0:
            self._least -= 1
            return text
        return self._release(text)

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        if self.is_stopped:
            return ""
        last = self._release(self._text.finish())
        held, self._held = self._held, ""
        return last if self.is_stopped else last + held

    def _release(self, fresh: str) -> str:
        self._held += fresh
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """The longest end of the text that begins a stop sequence."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


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
    finish_reason: str | None = None


def begin(
    runtime: ClusterRuntime,
    parsed: ParsedRequest,
    tokenizer: Tokenizer,
    completion_id: str,
    session: str | None = None,
) -> list[Choice]:
    """Place every prompt of a request; all of them, or none.

    Raises:
        RejectedError: when the cluster refuses one.
        BadRequestError: when one can never be served.
    """
    choices: list[Choice] = []
    try:
        for index, prompt in enumerate(parsed.prompts):
            params = parsed.params
            if tokenizer.end_tokens and params.end_tokens is None:
                params = msgspec.structs.replace(params, end_tokens=runtime.end_tokens(tokenizer.end_tokens))
            if not parsed.is_seeded:  # equal prompts are different draws
                params = msgspec.structs.replace(params, seed=params.seed + index)
            if not params.max_new_tokens:
                room = runtime.max_model_len() - len(prompt)
                params = msgspec.structs.replace(params, max_new_tokens=max(1, room))
            if params.min_new_tokens > params.max_new_tokens:
                says = f"this answer may have 0 to {params.max_new_tokens} tokens"
                raise BadRequestError(f"min_tokens is {params.min_new_tokens}; {says}", "min_tokens")  # noqa: TRY301
            tokens = np.asarray(prompt, dtype=np.int32)
            stream = runtime.submit(tokens, params, completion_id=completion_id, session=session)
            writer = Writer(tokenizer.stream(), parsed.stops, least_tokens=params.min_new_tokens)
            choices.append(Choice(index=index, stream=stream, writer=writer))
    except BaseException as error:
        stop(runtime, choices, "another prompt of the request could not be served")
        if isinstance(error, ValueError) and not isinstance(error, BadRequestError):
            raise BadRequestError(str(error), "messages" if parsed.is_chat else "prompt") from error
        raise
    return choices


def stop(runtime: ClusterRuntime, choices: Sequence[Choice], reason: str = "the client went away") -> None:
    """Cancel all choices of a request that still run."""
    for choice in choices:
        runtime.cancel(choice.stream, reason)


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
    """What is new of one choice; its last token comes with the reason of its end, as with vLLM."""
    stream, writer = choice.stream, choice.writer
    async with contextlib.aclosing(aiter(stream)) as tokens:
        async for token in tokens:
            choice.tokens.append(token)
            text = writer.push(token)
            ended_by = stream.ended_by(choice.tokens, runtime.end_tokens())
            if ended_by is not None:
                text += writer.finish()
            if writer.is_stopped:
                runtime.stop(stream)
            if writer.is_stopped or ended_by is not None:
                choice.finish_reason = "stop" if writer.is_stopped else _REASONS[str(ended_by)]
            yield Delta(choice, text, (token,), choice.finish_reason)
            if choice.finish_reason is not None:
                break
    if choice.finish_reason is not None:
        await stream.ended()
        return
    text = writer.finish()
    end = stream.end
    assert end is not None  # noqa: S101  # its stream is over
    choice.finish_reason = "stop" if writer.is_stopped else _REASONS.get(end.reason, end.reason)
    yield Delta(choice, text, (), choice.finish_reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every part of one answer repeats."""

    id: str
    model: str
    parsed: ParsedRequest
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice], texts: Sequence[str]) -> dict[str, Any]:
        """The answer in one piece."""
        found: list[dict[str, Any]] = []
        for choice, text in zip(choices, texts, strict=True):
            content: dict[str, Any] = {"text": text}
            if self.parsed.is_chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            found.append(self._choice(choice, content, tuple(choice.tokens), choice.finish_reason))
        kind = "chat.completion" if self.parsed.is_chat else "text_completion"
        return self._body(kind, found) | {"usage": usage(choices)}

    def part(self, piece: Delta, choices: Sequence[Choice], *, is_first: bool) -> dict[str, Any]:
        """One event of a stream."""
        content: dict[str, Any] = {"text": piece.text}
        if self.parsed.is_chat:
            content = {"delta": ({"role": "assistant"} if is_first else {}) | {"content": piece.text}}
        ends = piece.finish_reason
        body = self._body(self._kind, [self._choice(piece.choice, content, piece.tokens, ends)])
        if self.parsed.include_usage:  # OpenAI's other events have the field too, and it is null there
            body["usage"] = usage(choices) if self.parsed.continuous_usage else None
        return body

    def closing(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last event of a stream whose client wants to know the usage."""
        return self._body(self._kind, []) | {"usage": usage(choices)}

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.parsed.is_chat else "text_completion"

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(
        self, choice: Choice, content: dict[str, Any], tokens: tuple[int, ...], ends: str | None
    ) -> dict[str, Any]:
        also = {"token_ids": list(tokens)} if self.parsed.return_token_ids else {}
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
