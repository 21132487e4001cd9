"""From tokens to the text a client sees: characters when they are whole, and nothing after a stop sequence."""

from collections.abc import Sequence
from typing import final

from mooncake_lab.serving.openai_api.tokenizer import TextStream


@final
class Writer:
    """One answer as it grows. Mutable: it holds back what may still become a stop sequence.

    Args:
        text: turns tokens into text.
        stops: sequences that end the answer and are not part of it.
        least_tokens: a sequence that begins before so many tokens are out does not end it.
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
