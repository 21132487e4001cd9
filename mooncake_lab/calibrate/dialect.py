"""How a server wants to be asked: prompts as token ids or as text, completions or chat, and with which options."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from mooncake_lab.calibrate.connection import ServerConnection, StatusError, encoded
from mooncake_lab.calibrate.observations import LEAST_TOKEN, CalibrationError, Inquiry, Reply, random_tokens

_EXTRAS: Final = ("return_token_ids", "min_tokens", "ignore_eos", "stream_options")
"""Options beyond the oldest form of the API; a server that refuses one is asked without it."""
_REFUSES: Final = frozenset({400, 404, 405, 415, 422, 500, 501})
"""What servers answer to a form of request that they do not know."""
_TRIAL: Final = ((12, 4), (48, 4))
"""Tokens of prompts and answers by which the length of a text is learnt."""
WORDS: Final = tuple(
    consonant + vowel + end for end in ("", "n", "r") for vowel in "aeiou" for consonant in "bcdfghjklmnprstv"
)
"""One for each token id that prompts are made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A form of request that a server answers."""

    model: str
    form: str
    """`token ids`, `text` or `chat`."""
    extras: tuple[str, ...] = _EXTRAS
    tokens_per_word: float = 1.0
    base_tokens: float = 0.0
    """Of a text: what a template or the beginning of a sequence adds."""

    @property
    def path(self) -> str:
        """Of the route."""
        return "/v1/chat/completions" if self.form == "chat" else "/v1/completions"

    def body(self, inquiry: Inquiry) -> bytes:
        """A request as it is sent."""
        asked: dict[str, Any] = {"model": self.model, "max_tokens": inquiry.output_tokens, "temperature": 0.0}
        options: dict[str, Any] = {
            "return_token_ids": True,
            "min_tokens": inquiry.output_tokens,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        asked |= {"stream": True} | {name: options[name] for name in self.extras}
        if self.form == "chat":
            return encoded(asked | {"messages": [{"role": "user", "content": self._text(inquiry)}]})
        prompt = inquiry.tokens.tolist() if self.form == "token ids" else self._text(inquiry)
        return encoded(asked | {"prompt": prompt})

    def _text(self, inquiry: Inquiry) -> str:
        """Words at even distances of the token ids, so that prompts that begin alike do so as texts."""
        ids = inquiry.tokens.tolist()
        count = max(1, round((len(ids) - self.base_tokens) / self.tokens_per_word))
        chosen = [ids[min(len(ids) - 1, int(k * self.tokens_per_word))] for k in range(count)]
        return " ".join(WORDS[one - LEAST_TOKEN] for one in chosen)

    def ask(
        self, connection: ServerConnection, inquiry: Inquiry, zero_s: float, body: bytes | None = None
    ) -> Reply:
        """Send a request and follow its answer.

        Raises:
            StatusError: when the server refuses it.
            CalibrationError: when the answer is none, or does not say what has to be known.
        """
        answer = _Answer(connection.url)
        with contextlib.closing(connection.events(self.path, body or self.body(inquiry))) as events:
            sent_s, _ = next(events)
            for at_s, data in events:
                if data != b"[DONE]":
                    answer.read(at_s - zero_s, data)
        known = len(inquiry.tokens) if self.form == "token ids" else None
        return answer.reply(sent_s - zero_s, known)


class _Answer:
    """An answer as its events come. Mutable for that reason."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._events: list[tuple[float, int | None]] = []  # times, and tokens where the event says them
        self._usage: Mapping[str, Any] = {}
        self._last_s: float | None = None  # of an event with a choice, be it without text

    def read(self, at_s: float, data: bytes) -> None:
        """Take note of one event."""
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise CalibrationError(f"{self._url} streams {data[:40]!r}, which is no JSON") from None
        if not isinstance(event, dict):
            raise CalibrationError(f"{self._url} streams {data[:40]!r}; an object with choices is needed")
        if event.get("error"):
            raise CalibrationError(f"{self._url} ends an answer with the error {str(event['error'])[:120]!r}")
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choices = event.get("choices")
        if choices is not None and not isinstance(choices, list):
            raise CalibrationError(f"{self._url} streams choices that are {type(choices).__name__}, no list")
        for choice in choices or ():
            if isinstance(choice, dict):
                self._choice(at_s, choice)

    def _choice(self, at_s: float, choice: Mapping[str, Any]) -> None:
        self._last_s = at_s
        tokens = choice.get("token_ids")
        if isinstance(tokens, list):
            if tokens:
                self._events.append((at_s, len(tokens)))
            return
        delta = choice.get("delta")
        said = (delta.get("content") or delta.get("reasoning_content")) if isinstance(delta, dict) else None
        if choice.get("text") or said:
            self._events.append((at_s, None))

    def reply(self, sent_s: float, known_tokens: int | None) -> Reply:
        """The whole answer.

        Raises:
            CalibrationError: when it has no token, or nothing says how long the prompt was.
        """
        prompt = _count(self._usage.get("prompt_tokens"))
        if known_tokens is not None:
            prompt = known_tokens
        if prompt is None:
            raise CalibrationError(
                f"{self._url} does not say in `usage` how many tokens a prompt has, and takes no token ids;"
                " without one of the two nothing can be fitted"
            )
        total = _count(self._usage.get("completion_tokens"))
        if not self._events and total and self._last_s is not None:  # no token of it has a text
            self._events.append((self._last_s, None))
        if not self._events:
            raise CalibrationError(f"{self._url} ends an answer without any token")
        counts = _tokens_of(self._events, total)
        times_s, spread = spread_times([at_s for at_s, _ in self._events], counts)
        details = self._usage.get("prompt_tokens_details")
        cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
        return Reply(sent_s, times_s, prompt, cached, spread)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None


def _tokens_of(events: Sequence[tuple[float, int | None]], total: int | None) -> list[int]:
    """Tokens of each event: what it says; else one each, and what the usage has beyond that spread over all."""
    if total is None or total < len(events) or all(count is not None for _, count in events):
        return [count or 1 for _, count in events]
    return [total * (k + 1) // len(events) - total * k // len(events) for k in range(len(events))]


def spread_times(events_s: Sequence[float], counts: Sequence[int]) -> tuple[tuple[float, ...], int]:
    """A time for each token, and how many tokens did not have an event of their own.

    Those of an event came one after the other since the event before, evenly; of the first event's, the first
    came then, and the rest until the second event.
    """
    times_s = [events_s[0]]
    owed = counts[0] - 1
    spread = counts[0] if owed else 0
    for before_s, at_s, count in zip(events_s, events_s[1:], counts[1:], strict=False):
        many = owed + count
        times_s += [before_s + (at_s - before_s) * (k + 1) / many for k in range(many)]
        spread += count if many > 1 else 0
        owed = 0
    return tuple(times_s + [events_s[-1]] * owed), spread


def learn(connection: ServerConnection, model: str) -> Dialect:
    """The best form that a server answers: token ids, else text, else chat; with as many options as it takes.

    Raises:
        CalibrationError: when it answers none of them, with its own words about the last.
    """
    refusal: StatusError | None = None
    for form in ("token ids", "text", "chat"):
        dialect = Dialect(model=model, form=form)
        while True:
            try:
                first = dialect.ask(connection, _trial(0), 0.0)
            except StatusError as error:
                refusal = error
                if error.status not in _REFUSES:
                    raise CalibrationError(f"{connection.url} refuses a completion with {error}") from None
                named = [name for name in dialect.extras if name in error.says]
                dropped = (named or list(dialect.extras[:1]))[:1]
                if not dropped or error.status in {404, 405, 501}:
                    break
                dialect = replace(dialect, extras=tuple(n for n in dialect.extras if n not in dropped))
                continue
            return dialect if form == "token ids" else _lengths(connection, dialect, first)
    raise CalibrationError(f"{connection.url} answers no form of completion; it says: {refusal}")


def _trial(which: int) -> Inquiry:
    tokens, output_tokens = _TRIAL[which]
    return Inquiry(random_tokens(tokens, which), output_tokens)


def _lengths(connection: ServerConnection, dialect: Dialect, first: Reply) -> Dialect:
    """The same dialect that knows how many tokens its texts have."""
    try:
        second = dialect.ask(connection, _trial(1), 0.0)
    except StatusError as error:
        raise CalibrationError(f"{connection.url} refuses a longer text with {error}") from None
    words = [tokens for tokens, _ in _TRIAL]
    slope = (second.prompt_tokens - first.prompt_tokens) / (words[1] - words[0])
    if not slope > 0:
        raise CalibrationError(
            f"{connection.url} counts {first.prompt_tokens} tokens for {words[0]} words and"
            f" {second.prompt_tokens} for {words[1]}; the second must be more"
        )
    return replace(dialect, tokens_per_word=slope, base_tokens=first.prompt_tokens - slope * words[0])
