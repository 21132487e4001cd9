"""One request as the cluster follows it, from arrival to its last token."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mooncake_lab.conductor import Placement
from mooncake_lab.core import Request
from mooncake_lab.serving.messages import Generation, Job


class RejectedError(Exception):
    """The cluster refused a request (HTTP 429).

    Args:
        stage: who refused.
        reason: why.
        retry_after_s: when it may be worth asking again.
    """

    def __init__(self, stage: str, reason: str, retry_after_s: float) -> None:
        super().__init__(f"{stage}: {reason}")
        self.stage = stage
        self.reason = reason
        self.retry_after_s = retry_after_s


class FailedError(RuntimeError):
    """An accepted request could not be served, however often it was placed (HTTP 503)."""


@dataclass(frozen=True, slots=True)
class End:
    """Why a request ended: `length`, `end_token`, `cancelled`, or with an error."""

    reason: str
    error: Exception | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A request and what became of it so far. Mutable: it is followed through the cluster."""

    id: int
    """Unique in the life of a cluster, unlike `request.id`, which is unique in a run."""
    request: Request
    prompt: npt.NDArray[np.int32]
    asked: Generation
    completion_id: str | None = None
    """Its name for its client, where that came over HTTP."""
    attempt: int = 0
    placement: Placement | None = None
    tokens: list[int] = field(default_factory=list[int])
    """Shown to the client, over all attempts."""
    in_prompt: int = 0
    """Those of them that a death made part of the prompt."""
    has_first: bool = False
    shown_in_attempt: int = 0
    cached_tokens: int | None = None
    """Tokens of the prompt whose KVCache was reused when it was first prefilled; None before that."""
    is_prefill_logged: bool = False
    has_joined: bool = False
    end: End | None = None
    news: asyncio.Queue[int | End] = field(default_factory=asyncio.Queue[int | End])

    @property
    def job(self) -> Job:
        """The attempt under way."""
        return Job(self.id, self.attempt)

    def known_tokens(self) -> npt.NDArray[np.int32]:
        """The prompt and what was shown, shape (n,): what a new attempt starts from."""
        return np.concatenate([self.prompt, np.asarray(self.tokens, dtype=np.int32)])

    def complete_by(self, end_tokens: tuple[int, ...]) -> str | None:
        """What says that all its tokens are shown, `end_token` or `length`; None where more are to come."""
        ends = end_tokens if self.asked.end_tokens is None else self.asked.end_tokens
        if self.tokens and self.tokens[-1] in ends:
            return "end_token"
        return "length" if len(self.tokens) >= self.asked.max_new_tokens else None

    def __aiter__(self) -> AsyncIterator[int]:
        return self.stream()

    async def stream(self) -> AsyncGenerator[int, None]:
        """Its tokens as they come.

        Raises:
            RejectedError: when it is refused.
            FailedError: when it cannot be served.
        """
        while not isinstance(news := await self.news.get(), End):
            yield news
        self.news.put_nowait(news)  # whoever asks again is told again
        if news.error is not None:
            raise news.error
