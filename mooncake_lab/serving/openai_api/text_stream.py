"""Text from tokens as they come: what is shown is always the beginning of what `decode` makes of all of them."""

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LONGEST_TAIL: Final = 32
"""Tokens that are decoded together; then the first ones are forgotten."""
_KEPT: Final = 8
"""Tokens that remain then: a token's text depends on those before it, but on few of them."""
_LONGEST_RUN: Final = 128
"""Bytes of complete characters that are held back; see `TokenStream`."""
_CLEANED: Final = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""What `clean_up_tokenization_spaces` replaces, in this order."""
_LOST: Final = "\ufffd"
"""Stands for bytes that form no character."""


@final
class ByteStream:
    """Ids below 256 are bytes of UTF-8, any other is U+FFFD. Mutable: it holds back unfinished characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """What is certain after one more token."""
        if token < 256:
            return self._decoder.decode(bytes([token]))
        return self._decoder.decode(b"", final=True) + _LOST

    def finish(self) -> str:
        """What was held back."""
        return self._decoder.decode(b"", final=True)


@final
class Detokenizer:
    """Text of tokens, as `decode` of transformers with `skip_special_tokens` gives it. Immutable.

    Args:
        tokenizer: of the model.
        cleans: whether spaces before punctuation are removed.
    """

    def __init__(self, tokenizer: "Tokenizer", *, cleans: bool = False) -> None:
        self._tokenizer = tokenizer
        self.cleans = cleans
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, found in added.items() if found.special)
        self.bytes: dict[int, int] = {}
        """The tokens that stand for one byte each, where runs of them are characters."""
        if tokenizer.decoder is not None and tokenizer.decoder.decode(["<0x41>"]) == "A":
            names = ((f"<0x{byte:02{case}}>", byte) for byte in range(256) for case in "xX")
            found = ((tokenizer.token_to_id(name), byte) for name, byte in names)
            self.bytes = {token: byte for token, byte in found if token is not None}

    def is_text(self, token: int) -> bool:
        """Whether a token has text: special ones have none, nor those beyond the vocabulary."""
        return token not in self._special and self._tokenizer.id_to_token(token) is not None

    def text(self, tokens: Sequence[int]) -> str:
        """The text of all tokens."""
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        for before, after in _CLEANED if self.cleans else ():
            text = text.replace(before, after)
        return text


@final
class TokenStream:
    """The text of one answer as it grows. Mutable; work and memory per token are bounded.

    A run of byte tokens, as byte-fallback tokenizers have them, is U+FFFD for each byte as soon as one byte of it
    forms no character, also for the characters before that. So a run is held back until it ends or is known to be
    wrong. One of more than 128 bytes is shown as it grows, since an answer may be a single run: only there would
    `decode` make U+FFFD of characters that were shown already.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._of = detokenizer
        self._tail: list[int] = []
        self._shown = 0
        """Characters of the tail's text that were shown."""
        self._run: list[int] = []
        """Byte tokens after the tail that were not shown."""
        self._characters = codecs.getincrementaldecoder("utf-8")("strict")
        """A decoder that fails once the run can no longer become characters."""
        self._shown_run: codecs.IncrementalDecoder | None = None
        """Turns bytes of a run that is shown as it grows into text."""
        self._is_wrong = False
        """Whether the run forms no characters, so that each of its bytes is shown as U+FFFD."""

    def push(self, token: int) -> str:
        """What is certain after one more token."""
        if not self._of.is_text(token):
            return ""
        if token in self._of.bytes:
            return self._push_byte(token)
        before = self._end_shown_run()
        self._tail += [*self._run, token]
        self._restart_run()
        text = self._of.text(self._tail)
        fresh = text[self._shown : len(text) - self._uncertain(text)]
        self._shown += len(fresh)
        if len(self._tail) > _LONGEST_TAIL:
            self._tail = self._tail[-_KEPT:]
            self._shown += len(self._of.text(self._tail)) - len(text)
        return before + fresh

    def finish(self) -> str:
        """What was held back."""
        if self._is_wrong:
            return ""
        if self._shown_run is not None:
            return self._shown_run.decode(b"", final=True)
        return self._rest()

    def _push_byte(self, token: int) -> str:
        byte = bytes([self._of.bytes[token]])
        if self._is_wrong:
            return _LOST
        if self._shown_run is not None:
            return self._shown_run.decode(byte)
        self._run.append(token)
        try:
            self._characters.decode(byte)
        except UnicodeDecodeError:
            self._is_wrong = True
            return self._rest()
        is_complete = not self._characters.getstate()[0]
        if len(self._run) <= _LONGEST_RUN or not is_complete:
            return ""
        self._shown_run = codecs.getincrementaldecoder("utf-8")("replace")
        return self._rest()

    def _rest(self) -> str:
        """What was not shown of the tail and the run."""
        return self._of.text([*self._tail, *self._run])[self._shown :]

    def _end_shown_run(self) -> str:
        """What is left of a run that was shown as it grew; its last byte is then the tail."""
        if not (self._is_wrong or self._shown_run is not None):
            return ""
        rest = "" if self._shown_run is None or self._is_wrong else self._shown_run.decode(b"", final=True)
        self._tail = self._run[-1:]
        self._shown = len(self._of.text(self._tail))
        self._restart_run()
        return rest

    def _restart_run(self) -> None:
        self._run = []
        self._is_wrong, self._shown_run = False, None
        self._characters.reset()

    def _uncertain(self, text: str) -> int:
        """How many characters at its end may become others: an unfinished one, or a space to be removed."""
        if text.endswith(_LOST):
            return 1
        space = text.find(" ", max(0, len(text) - 3)) if self._of.cleans else -1
        return 0 if space < 0 else len(text) - space


TextStream: TypeAlias = ByteStream | TokenStream


def text_of(stream: TextStream, tokens: Iterable[int]) -> str:
    """The text of a whole answer."""
    return "".join(map(stream.push, tokens)) + stream.finish()
