"""Text to token ids and back: a model's own tokenizer, or bytes for models that have none."""

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

Message = dict[str, str]
"""One turn of a conversation: `role` and `content`."""


@final
class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8; any higher id, which a random model may emit, reads as U+FFFD.

    `encode` and `encode_chat` of a tokenizer run on another thread than its streams.
    """

    most_characters_a_token = 1
    """The length of its longest token: a text of more characters than this times `n` has over `n` tokens."""

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """`role: content` lines."""
        turns = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return self.encode(turns + "assistant:")

    def stream(self) -> "_ByteStream":
        """A stream that holds back unfinished characters."""
        return _ByteStream()


@final
class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token < 256:
            return self._decoder.decode(bytes([token]))
        return self._decoder.decode(b"", final=True) + "\ufffd"

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


@final
class HuggingFaceTokenizer:
    """The tokenizer of a model directory, with its chat template."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.most_characters_a_token = max(map(len, self._tokenizer.get_vocab()))
        self._tokenizer.encode("")  # sets what truncates and pads, which later calls then leave as it is

    def encode(self, text: str) -> list[int]:
        """Its token ids, with whatever it puts before a prompt."""
        return list(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Its chat template's token ids.

        Raises:
            ValueError: when the model has no chat template, or it refuses the conversation.
        """
        try:
            found = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:
            raise ValueError(f"the model's chat template refuses this conversation: {error}") from error
        return list(found)

    def stream(self) -> "_HuggingFaceStream":
        """A stream that holds back unfinished characters."""
        return _HuggingFaceStream(self._tokenizer)


@final
class _HuggingFaceStream:
    """Decodes from the last certain place on: a token's text depends on those before it, but on few of them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown_text = ""

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode()
        if text.endswith("\ufffd"):
            return ""  # in the middle of a character
        fresh = text[len(self._shown_text) :]
        keep = self._tokens[-8:]
        self._tokens = keep
        self._shown_text = self._decode()
        return fresh

    def finish(self) -> str:
        return self._decode()[len(self._shown_text) :]

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))


TextStream: TypeAlias = _ByteStream | _HuggingFaceStream
"""Turns tokens into text as they come: `push` gives what is certain, `finish` what was held back."""
Tokenizer: TypeAlias = ByteTokenizer | HuggingFaceTokenizer


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model directory, or bytes where it has none, as random models.

    Raises:
        OSError: when the directory has a tokenizer that cannot be read.
    """
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    directory = Path(model)
    if any((directory / name).is_file() for name in names):
        return HuggingFaceTokenizer(directory)
    return ByteTokenizer()
