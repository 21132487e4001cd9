"""Texts instead of lengths: ShareGPT, chat messages, and the prompts of vLLM's and AIPerf's benchmark files.

A tokenizer counts them. Block ids are chained hashes of the tokens, so what prompts share follows from their
texts. Each message is encoded alone, and no chat template is applied: its special tokens are neither counted
nor hashed.

A conversation is a session: the prompt of each turn is all that came before it, with the answers. Where a file
has the prompts of later turns but not the answers between them (AIPerf's `turns`), an answer is tokens of its
own. Such files have no times, or those that AIPerf reads (`timestamp` or `delay`, ms); without any, all begins
at 0.
"""

from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final, cast, final

import msgspec
import xxhash
from msgspec import Meta

from mooncake_lab.workload.formats.rows import (
    LARGEST_LENGTH,
    LENGTH,
    TIME,
    UNIT_NAMES,
    JsonRecord,
    LineError,
    Reading,
    Row,
)

_Length = Annotated[int, Meta(ge=1, le=LARGEST_LENGTH)]
_Time = Annotated[float, Meta(ge=0)]


class ContentPart(msgspec.Struct):
    """A part of a message."""

    type: str
    text: str | None = None


class TextMessage(msgspec.Struct):
    """A message of a conversation, under ShareGPT's names or those of the OpenAI API."""

    sender: str | None = msgspec.field(name="from", default=None)
    value: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None


class TextPrompt(msgspec.Struct, kw_only=True):
    """A prompt with what is known of its answer; under one of several names."""

    prompt: str | None = None
    text: str | None = None
    text_input: str | None = None
    texts: list[str] | None = None
    messages: list[TextMessage] | None = None
    completion: str | None = None
    output_length: _Length | None = None
    output_tokens: _Length | None = None
    max_tokens: _Length | None = None
    timestamp: _Time | None = None
    delay: _Time | None = None


class TextRecord(TextPrompt, kw_only=True):
    """A prompt, a conversation, or a list of turns."""

    session_id: str | None = None
    conversations: list[TextMessage] | None = None
    turns: list[TextPrompt] | None = None
    payload: TextPrompt | None = None


KEYS: Final = frozenset({"conversations", "messages", "turns", "prompt", "text", "texts", "text_input", "payload"})
"""A record has one of these."""
_ALLOWED: Final = {"output_length": LENGTH, "output_tokens": LENGTH, "max_tokens": LENGTH, "type": "'text'"}
_USERS: Final = frozenset({"human", "user"})
_ANSWERS: Final = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})


@final
class TextReader:
    """Rows of prompts and conversations.

    Raises:
        ValueError: when no tokenizer is given, or its file is none.
    """

    def __init__(self, reading: Reading) -> None:
        self._block_size_tokens = reading.block_size_tokens
        self._encode = tokenizer(reading.tokenizer)
        self._answer = reading.output_tokens
        unit = TIME.format(unit=UNIT_NAMES[reading.unit])
        self._records = JsonRecord(TextRecord, _ALLOWED | {"timestamp": unit, "delay": unit})
        self._number = 0
        self._rows = 0
        self._below = 0  # numbers below 0 stand for tokens that are not known
        self._turns: dict[str, tuple[int, float]] = {}

    def rows(self, record: bytes) -> list[Row]:
        """The turns of a record."""
        read = self._records.decode(record)
        told = [name for name in KEYS if getattr(read, name) is not None]
        if len(told) != 1:
            shown = " and ".join(sorted(told)) or "without a prompt"
            raise LineError(None, f"a record {shown}", f"one of the fields {', '.join(sorted(KEYS))}")
        self._number += 1
        if read.turns is not None:
            return self._of_turns(read.turns, read.session_id or f"session {self._number}")
        if read.payload is not None:
            return self._single(read.payload, read.session_id)
        messages = read.conversations or read.messages
        if messages is not None and (read.conversations or any(m.role in _ANSWERS for m in messages)):
            return self._of_messages(messages, read, read.session_id or f"session {self._number}")
        return self._single(read, read.session_id)

    def kept(self, row: Row) -> None:
        """Remember the latest turn of a session."""
        if row.session is not None and isinstance(row.request, int):
            self._turns[row.session] = (row.request, row.at)

    def finish(self) -> Iterable[Row]:
        """Nothing."""
        return ()

    def _single(self, read: TextPrompt, session: str | None) -> list[Row]:
        """A prompt alone; after others of its session, where the file names one."""
        tokens = self._tokens(read)
        number, at = self._turns.get(session, (0, 0.0)) if session is not None else (0, 0.0)
        self._rows += 1
        row = Row(
            at=at + (read.delay or 0.0) if read.timestamp is None else read.timestamp,
            input_tokens=len(tokens),
            output_tokens=self._answer_tokens(read, None),
            ids=self._ids(tokens),
            session=session,
            delay=read.delay if number else None,
            request=self._rows,
            wait_for=(number,) if number else (),
        )
        return [row]

    def _of_turns(self, turns: list[TextPrompt], session: str) -> list[Row]:
        """Turns whose answers are known by their lengths only."""
        tokens, rows, at = list[int](), list[Row](), 0.0
        for place, turn in enumerate(turns):
            tokens += self._tokens(turn)
            answer = self._answer_tokens(turn, f"turns[{place}].output_length")
            if turn.timestamp is not None and turn.timestamp < at:
                raise LineError(
                    f"turns[{place}].timestamp",
                    f"{turn.timestamp:.15g}",
                    f"at least {at:.15g}, that of an earlier turn",
                )
            at = at + (turn.delay or 0.0) if turn.timestamp is None else turn.timestamp
            rows.append(self._turn(tokens, answer, session, rows, at, turn.delay))
            self._below -= answer
            tokens += range(self._below, self._below + answer)
        return rows

    def _of_messages(self, messages: list[TextMessage], read: TextRecord, session: str) -> list[Row]:
        """A turn for each answer in a conversation; what precedes it is its prompt."""
        tokens, rows = list[int](), list[Row]()
        for place, message in enumerate(messages):
            who = message.sender or message.role
            name = "conversations" if read.conversations else "messages"
            said = self._encode(_text(message, f"{name}[{place}]"))
            if who in _ANSWERS and tokens and said:
                rows.append(self._turn(tokens, len(said), session, rows, read.timestamp or 0.0, None))
            tokens += said
        if not rows:
            raise LineError(name_of(read), "a list without an answer", "a prompt and an answer with a token each")
        return rows

    def _turn(
        self, tokens: list[int], answer: int, session: str, rows: list[Row], at: float, delay: float | None
    ) -> Row:
        self._rows += 1
        return Row(
            at=at,
            input_tokens=len(tokens),
            output_tokens=answer,
            ids=self._ids(tokens),
            session=session,
            delay=delay if rows else None,
            request=self._rows,
            wait_for=(cast("int", rows[-1].request),) if rows else (),
        )

    def _tokens(self, read: TextPrompt) -> list[int]:
        """Of one prompt.

        Raises:
            LineError: when it has none.
        """
        if read.messages is not None:
            texts = [_text(message, f"messages[{place}]") for place, message in enumerate(read.messages)]
        else:
            texts = read.texts or [read.prompt or read.text or read.text_input or ""]
        tokens = [token for text in texts for token in self._encode(text)]
        if not tokens:
            raise LineError(name_of(read), "a text without a token", "a prompt of at least one token")
        return tokens

    def _answer_tokens(self, read: TextPrompt, where: str | None) -> int:
        """How long the answer is.

        Raises:
            LineError: when neither the record nor the caller says so.
        """
        told = read.output_length or read.output_tokens or read.max_tokens
        if told is None and read.completion:
            told = len(self._encode(read.completion))
        told = told or self._answer
        if told is None:
            raise LineError(
                where or "output_length", "missing", f"{LENGTH}, unless --output-tokens gives it for all"
            )
        return told

    def _ids(self, tokens: list[int]) -> list[int]:
        """Hashes of the blocks, each chained to that before it."""
        size, key, ids = self._block_size_tokens or 1, 0, list[int]()
        numbers = array("q", tokens)
        for start in range(0, len(numbers), size):
            key = xxhash.xxh3_64_intdigest(numbers[start : start + size].tobytes(), seed=key)
            ids.append(key)
        return ids


def name_of(read: TextPrompt) -> str:
    """The field of a record that holds its prompt."""
    return next((name for name in sorted(KEYS) if getattr(read, name, None) is not None), "prompt")


def _text(message: TextMessage, where: str) -> str:
    """What a message says.

    Raises:
        LineError: when it has a part that is no text.
    """
    content = message.value if message.content is None else message.content
    if isinstance(content, list):
        for place, part in enumerate(content):
            if part.type != "text":
                raise LineError(f"{where}.content[{place}].type", repr(part.type), "'text'")
        return "".join(part.text or "" for part in content)
    return content or ""


def tokenizer(path: str | None) -> Callable[[str], list[int]]:
    """What encodes a text as tokens, without special ones.

    Raises:
        ValueError: when the path is none, or that of no tokenizer.
    """
    if path is None:
        raise ValueError("the file holds texts; name a tokenizer for it, with --tokenizer of `trace convert`")
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"{file} is no file; allowed is a tokenizer.json of Hugging Face, or its folder")
    try:
        from tokenizers import Tokenizer

        loaded: Any = Tokenizer.from_file(str(file))
    except ImportError as error:
        raise ValueError("a tokenizer needs the package tokenizers (pip install mooncake-lab[serve])") from error
    except Exception as error:  # tokenizers raises nothing more special
        raise ValueError(f"{file} is no tokenizer of Hugging Face: {error}") from error
    return lambda text: cast("list[int]", loaded.encode(text, add_special_tokens=False).ids)
