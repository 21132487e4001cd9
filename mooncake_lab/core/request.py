"""What a request is: the part that is known on arrival, the part only the future knows, and its latency limits."""

import math
from dataclasses import dataclass

from mooncake_lab.core.units import blocks_for

BlockKey = int | bytes
"""Names a KVCache block together with everything before it: a trace's dense id, or a chained hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as a scheduler may see it. Its output length is unknown here, by type.

    Raises:
        ValueError: when a field is out of range, or the number of block keys does not fit the input length.
    """

    id: int
    """Unique within a run; ties break on it."""
    arrival_s: float
    """Seconds since the run began."""
    input_tokens: int
    block_keys: tuple[BlockKey, ...]
    """One key per block of the prompt, the last block possibly partial (Mooncake: `hash_ids`).

    A key stands for the tokens of its block and all before them: a partial block that gets more tokens gets
    another key."""
    block_size_tokens: int = 512
    session: str | None = None
    """The conversation it belongs to, where the trace says so."""
    priority: int = 0
    """How urgent it is: from 0, higher is served longer when the cluster is full."""
    max_tokens: int | None = None
    """The most tokens its client allows for the answer, as in the OpenAI API; None where it states nothing."""
    wait_for: tuple[int, ...] = ()
    """Ids of the requests whose answers its client has before it sends this one, where the trace says so."""
    delay_s: float | None = None
    """Seconds that its client lets pass after these answers, or after that of its session's turn before."""
    retry_of: int | None = None
    """The id of the request that was refused, where its client sends it again."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise ValueError(f"request {self.id} arrives at {self.arrival_s!r} s; allowed are finite times from 0")
        if self.input_tokens < 1:
            raise ValueError(f"request {self.id} has {self.input_tokens} input tokens; at least 1 is needed")
        if self.priority < 0:
            raise ValueError(f"request {self.id} has priority {self.priority!r}; allowed are 0 and above")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(
                f"request {self.id} has max_tokens {self.max_tokens!r}; at least 1 is needed, or None"
            )
        expected = blocks_for(self.input_tokens, self.block_size_tokens)
        if len(self.block_keys) != expected:
            raise ValueError(
                f"request {self.id} has {len(self.block_keys)} block keys for {self.input_tokens} input tokens;"
                f" blocks of {self.block_size_tokens} tokens make it {expected}"
            )


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request and its future. Clusters replay it; policies only ever get `.request`.

    Raises:
        ValueError: when the output length is below 1, the token that prefill produces, or above what its client
            allows.
    """

    request: Request
    output_tokens: int

    def __post_init__(self) -> None:
        if self.output_tokens < 1:
            raise ValueError(
                f"request {self.request.id} has {self.output_tokens} output tokens; at least 1 is needed"
            )
        most = self.request.max_tokens
        if most is not None and self.output_tokens > most:
            raise ValueError(
                f"request {self.request.id} has {self.output_tokens} output tokens; its max_tokens allow {most}"
            )

    def max_tokens_or(self, default: int) -> int:
        """What its client allows; where it states nothing, `default`, doubled until the recorded answer fits.

        The doubling shows little of the future to a policy that reserves room for it: nothing of an answer up to
        the default, and of a longer one, which its client must have allowed, only its order of magnitude.
        """
        if self.request.max_tokens is not None:
            return self.request.max_tokens
        while default < self.output_tokens:
            default *= 2
        return default


@dataclass(frozen=True, slots=True)
class SLO:
    """The latency limits a request must meet to count as effective (FAST'25 §5.1: 30 s and 0.1, 0.2, 0.3 s).

    Raises:
        ValueError: when a limit is not a positive number of seconds; `math.inf` means no limit.
    """

    ttft_s: float = 30.0
    """Longest allowed time to first token (s)."""
    tbt_s: float = 0.1
    """Longest allowed time between tokens (s)."""

    def __post_init__(self) -> None:
        for name, value in (("ttft_s", self.ttft_s), ("tbt_s", self.tbt_s)):
            if math.isnan(value) or value <= 0:
                raise ValueError(f"SLO.{name} is {value!r}; it must be a positive number of seconds")
