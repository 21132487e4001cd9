"""What a peer's process answers: a question and an answer a line, JSON, on its own standard streams.

A peer lives in an environment of its own, so that neither its libraries nor its threads meet ours. A peer that
cannot go on says why, `{"error": ...}`, and ends.
"""  # noqa: INP001  # scripts, not a package

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Peer(Protocol):
    """An engine with a model loaded, decoding greedily."""

    version: str

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from a prompt to its first token, in an empty KVCache."""
        ...

    def begin(self, prompt: list[int], batch: int, most_tokens: int) -> None:
        """Compute the prompt of so many equal requests and their first token."""
        ...

    def turn(self, steps: int) -> float:
        """Generate `steps + 1` tokens a request; seconds from the first of them to the last."""
        ...

    def tokens(self) -> list[int]:
        """What the first request has generated."""
        ...


class Serving(Peer, Protocol):
    """A peer that batches requests which come and go, and reuses the prefixes that they share."""

    def serve(self, prompts: list[list[int]], new_tokens: list[int]) -> float:
        """Seconds until all requests, which come at once, have their tokens."""
        ...

    def reuse(self, prompt: list[int], reused_tokens: int) -> float:
        """Seconds from a prompt to its first token, where its first tokens were computed before."""
        ...


def answer(make: Callable[[Path, str, int], Peer]) -> None:
    """Load the model that the command line names, and answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, help="a Hugging Face directory, float32")
    parser.add_argument("dtype", choices=("float32", "bfloat16"))
    parser.add_argument("threads", type=int)
    chosen = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries like to print

    def say(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        peer = make(chosen.directory, chosen.dtype, chosen.threads)
        say(peer.version)
        for line in sys.stdin:
            question: dict[str, Any] = json.loads(line)
            say(getattr(peer, question.pop("do"))(**question))
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        say({"error": f"{type(error).__name__}: {reason[0]}"})
        raise
