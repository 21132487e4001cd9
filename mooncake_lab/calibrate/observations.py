"""What is asked of a server and what its client sees: the same for a real server and for a simulated one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

LEAST_TOKEN = 10
MOST_TOKEN = 249
"""Prompts are made of these token ids: every vocabulary has them; those that end answers are lower or higher."""

Tokens = npt.NDArray[np.int64]


class CalibrationError(ValueError):
    """Why a server cannot be calibrated, in one sentence."""


@dataclass(frozen=True, slots=True, eq=False)
class Inquiry:
    """One request: its prompt as token ids, and how many tokens its answer has."""

    tokens: Tokens
    """Shape (n,). A server that takes only text gets a text of about as many tokens."""
    output_tokens: int
    at_s: float = 0.0
    """The earliest moment at which it is sent, from when its lanes began."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client saw of one request; times count from when its lanes began."""

    sent_s: float
    times_s: tuple[float, ...] = ()
    """When each token of the answer came."""
    prompt_tokens: int = 0
    """As the server counts them, where it says so."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were found in a cache; None where the server does not say."""
    spread_tokens: int = 0
    """Tokens that came several in one event; their times are spread evenly since the event before."""
    failure: str | None = None
    """Why there is no complete answer."""

    @property
    def ttft_s(self) -> float:
        """From sending the request to its first token."""
        return self.times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """From sending the request to its last token."""
        return self.times_s[-1] - self.sent_s


Lanes = Sequence[Sequence[Inquiry]]
"""Clients that send their requests one after the other: one lane each in an open loop, a few in a closed one."""


class ServedModel(Protocol):
    """A server that is calibrated."""

    takes_token_ids: bool
    """Whether prompts are sent as token ids, so that their lengths are exact."""

    def replies(self, lanes: Lanes, note: Callable[[Reply], None]) -> list[list[Reply]]:
        """Send the requests of all lanes at once, and wait for all answers.

        Args:
            lanes: each sends its next request when the last one is answered, but not before its time.
            note: told each reply as it ends.

        Raises:
            CalibrationError: when the server cannot be talked to.
        """
        ...

    def reused_tokens(self) -> float | None:
        """Prompt tokens that the server ever found in its cache, as its metrics say; None where they do not."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Empty the server's cache of prefixes; whether it offers that."""
        ...


def random_tokens(count: int, *seed: int) -> Tokens:
    """Token ids that depend on the seed alone."""
    return np.random.default_rng(seed).integers(LEAST_TOKEN, MOST_TOKEN + 1, count)
