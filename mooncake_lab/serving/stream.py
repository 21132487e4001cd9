"""The answer to one request as its client sees it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_lab.serving.messages import SamplingParams


class RejectedError(Exception):
    """The cluster refused a request (HTTP 429).

    Args:
        stage: what refused it.
        reason: why.
        retry_after_s: when the client may try again.
    """

    def __init__(self, stage: str, reason: str, retry_after_s: float) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason
        self.retry_after_s = retry_after_s


class FailedError(RuntimeError):
    """An accepted request could not be served, in any of its attempts (HTTP 503).

    Args:
        reason: why.
        retry_after_s: when the client may try again, if that may help.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class End:
    """Why a request ended: `length`, `end_token`, `stop`, `cancelled`, or with an error."""

    reason: str
    error: Exception | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class RequestStream:
    """The tokens that a client has of its answer, and those that it waits for. Mutable: tokens are added to it."""

    request_id: int
    prompt: npt.NDArray[np.int32]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list[int])
    """Shown to the client, over all attempts."""
    cached_tokens: int | None = None
    """Tokens of the prompt whose KVCache was reused when it was first prefilled; None before that."""
    end: End | None = None
    _news: asyncio.Queue[int | End] = field(default_factory=asyncio.Queue[int | End])

    def show(self, token: int) -> None:
        """The client receives its next token."""
        self.tokens.append(token)
        self._news.put_nowait(token)

    def close(self, end: End) -> None:
        """No more tokens come."""
        self.end = end
        self._news.put_nowait(end)

    def known(self, tokens: int) -> npt.NDArray[np.int32]:
        """The first tokens of the prompt and the answer behind it."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, dtype=np.int32)])[:tokens]

    def remaining(self, input_tokens: int) -> tuple[bytes, SamplingParams]:
        """The prompt of an attempt with this many tokens, and what it is to generate.

        The tokens after `prompt` were shown before.
        """
        shown = input_tokens - len(self.prompt)
        return self.known(input_tokens).astype("<i4").tobytes(), msgspec.structs.replace(
            self.params,
            max_new_tokens=self.params.max_new_tokens - shown,
            min_new_tokens=max(0, self.params.min_new_tokens - shown),
        )

    def complete_by(self, end_tokens: tuple[int, ...]) -> str | None:
        """Why no more tokens come after those shown, `end_token` or `length`; None where more come."""
        return self.ended_by(self.tokens, end_tokens)

    def ended_by(self, tokens: Sequence[int], end_tokens: tuple[int, ...]) -> str | None:
        """Why an answer with these first tokens is complete; None where it is not."""
        ends = end_tokens if self.params.end_tokens is None else self.params.end_tokens
        if tokens and tokens[-1] in ends:
            return "end_token"
        return "length" if len(tokens) >= self.params.max_new_tokens else None

    async def ended(self) -> None:
        """Return when no more tokens come; those that came and were not read are dropped."""
        while not isinstance(news := await self._news.get(), End):
            pass
        self._news.put_nowait(news)

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        """The tokens of the answer as they come.

        Raises:
            RejectedError: when it is refused.
            FailedError: when it cannot be served.
        """
        while not isinstance(news := await self._news.get(), End):
            yield news
        self._news.put_nowait(news)  # a second reader gets it too
        if news.error is not None:
            raise news.error


def check_prompt(prompt: npt.NDArray[np.int32], params: SamplingParams, most_tokens: int, vocabulary: int) -> None:
    """Refuse what can never be served.

    Args:
        prompt: token ids, shape (n,).
        params: how its answer is generated.
        most_tokens: the most that a prompt and its answer may have together.
        vocabulary: how many tokens the model knows.

    Raises:
        ValueError: saying what is out of range.
    """
    if len(prompt) < 1 or params.max_new_tokens < 1:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and {params.max_new_tokens} new ones; at least 1 each is needed"
        )
    if len(prompt) + params.max_new_tokens > most_tokens:
        raise ValueError(
            f"{len(prompt)} prompt tokens and {params.max_new_tokens} new ones are too many;"
            f" together they may be {most_tokens}"
        )
    lowest, highest, known = int(prompt.min()), int(prompt.max()), vocabulary
    if lowest < 0 or highest >= known:
        raise ValueError(f"the prompt holds tokens {lowest} to {highest}; the model knows 0 to {known - 1}")
