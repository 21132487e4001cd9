"""A trace: what arrived when, how long it was, and which KVCache blocks it shares."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import Request, TracedRequest

Origin: TypeAlias = Literal["released", "twin", "file", "generated"]
"""Where a trace comes from: the authors' published file, our stand-in for it, any other file, or a recipe."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """A trace of n requests as columns, in order of arrival (FAST'25 Appendix A, arXiv §4).

    Block ids are one flat array cut at `block_starts`, so whole-trace arithmetic is a numpy expression.

    Raises:
        ValueError: when the columns do not fit each other.
    """

    name: str
    origin: Origin
    block_size_tokens: int = 512
    arrival_s: npt.NDArray[np.float64]
    """Shape (n,), seconds since the trace began, never decreasing."""
    input_tokens: npt.NDArray[np.int64]
    """Shape (n,), prompt lengths."""
    output_tokens: npt.NDArray[np.int64]
    """Shape (n,), answer lengths: the future, which no policy sees."""
    block_ids: npt.NDArray[np.int64]
    """Shape (total blocks,): the ids of request 0, then those of request 1, and so on.

    Ids are unsigned 64-bit numbers; those of 2**63 and above are stored less 2**64 here. The block keys of
    `requests()` are the unsigned ids."""
    block_starts: npt.NDArray[np.int64]
    """Shape (n + 1,): request i owns `block_ids[block_starts[i]:block_starts[i + 1]]`."""
    sessions: tuple[str | None, ...] | None = None
    """The conversation of each request, where the file says so."""
    max_tokens: npt.NDArray[np.int64] | None = None
    """Shape (n,), the most tokens a client allows for its answer, 0 where it states nothing; None: none does."""
    skipped: int = 0
    """Lines a lenient reading left out."""
    skipped_reasons: tuple[str, ...] = ()
    """Why, for the first few of them."""
    source: str
    """One line for the footer of a figure: which trace this is and how it came about."""

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        if not (len(self.input_tokens) == len(self.output_tokens) == len(self.block_starts) - 1 == n):
            raise ValueError(
                f"trace {self.name!r} has {n} arrivals, {len(self.input_tokens)} input lengths,"
                f" {len(self.output_tokens)} output lengths and {len(self.block_starts)} block starts;"
                " the lengths must be n, n, n and n + 1"
            )
        if self.block_starts[0] != 0 or self.block_starts[-1] != len(self.block_ids):
            raise ValueError(
                f"trace {self.name!r} has {len(self.block_ids)} block ids, but its block starts run from"
                f" {self.block_starts[0]} to {self.block_starts[-1]}; they must run from 0 to the number of ids"
            )
        if self.sessions is not None and len(self.sessions) != n:
            raise ValueError(f"trace {self.name!r} has {n} requests and {len(self.sessions)} sessions; one each")
        if self.max_tokens is not None and len(self.max_tokens) != n:
            raise ValueError(
                f"trace {self.name!r} has {n} requests and {len(self.max_tokens)} max_tokens; one each"
            )

    def __len__(self) -> int:
        """The number of requests."""
        return len(self.arrival_s)

    def blocks_of(self, i: int) -> npt.NDArray[np.int64]:
        """The block ids of request `i`, front to back, without copying.

        Raises:
            IndexError: when there is no request `i`; indices run from 0 to `len(trace) - 1`.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"trace {self.name!r} has no request {i}; allowed are 0 to {len(self) - 1}")
        return self.block_ids[self.block_starts[i] : self.block_starts[i + 1]]

    def requests(self) -> Iterator[TracedRequest]:
        """The requests with their futures, one at a time, numbered from 0 in order of arrival."""
        ids: list[int] = self.block_ids.view(np.uint64).tolist()
        bounds: list[int] = self.block_starts.tolist()
        columns = zip(
            self.arrival_s.tolist(),
            self.input_tokens.tolist(),
            self.output_tokens.tolist(),
            self.sessions or [None] * len(self),
            [None] * len(self) if self.max_tokens is None else self.max_tokens.tolist(),
            strict=True,
        )
        for i, (arrival_s, input_tokens, output_tokens, session, max_tokens) in enumerate(columns):
            request = Request(
                id=i,
                arrival_s=arrival_s,
                input_tokens=input_tokens,
                block_keys=tuple(ids[bounds[i] : bounds[i + 1]]),
                block_size_tokens=self.block_size_tokens,
                session=session,
                max_tokens=max_tokens or None,
            )
            yield TracedRequest(request, output_tokens)

    def with_max_tokens(self, default: int) -> "Trace":
        """The same requests, each with a stated limit; where it had none, that of `TracedRequest.max_tokens_or`.

        Raises:
            ValueError: when the default is not positive.
        """
        if default < 1:
            raise ValueError(f"clients cannot allow {default} tokens; at least 1 is needed")
        stated = np.array([traced.max_tokens_or(default) for traced in self.requests()], dtype=np.int64)
        return replace(self, max_tokens=stated, source=f"{self.source}, max_tokens {default:,}")

    def head(self, n: int) -> "Trace":
        """The first `n` requests, or all of them when there are fewer; the source line says so.

        Raises:
            ValueError: when `n` is negative.
        """
        if n < 0:
            raise ValueError(f"cannot take the first {n} requests of trace {self.name!r}; at least 0 is needed")
        if n >= len(self):
            return self
        return replace(
            self,
            arrival_s=self.arrival_s[:n],
            input_tokens=self.input_tokens[:n],
            output_tokens=self.output_tokens[:n],
            block_ids=self.block_ids[: self.block_starts[n]],
            block_starts=self.block_starts[: n + 1],
            sessions=None if self.sessions is None else self.sessions[:n],
            max_tokens=None if self.max_tokens is None else self.max_tokens[:n],
            source=f"{self.source}, first {n:,} requests",
        )
