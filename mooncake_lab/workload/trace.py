"""A trace: what arrived when, how long it was, and which KVCache blocks it shares."""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypeVar

from mooncake_lab.core import Request, TracedRequest, keyed_uniform
from mooncake_lab.core.extras import naming_extra

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]
    Integers: TypeAlias = npt.NDArray[np.int64]


Origin: TypeAlias = Literal["released", "twin", "file", "generated"]
"""Where a trace comes from: the authors' published file, our stand-in for it, any other file, or a recipe."""


IdOrigin: TypeAlias = Literal["recorded", "minted", "hashed", "none"]
"""Where block ids come from: the file; the lengths of shared prefixes in the file, so that prompts share only with
their own session; the tokens of a text; or nowhere, so that nothing is known of what prompts share."""


Value = TypeVar("Value")


class _Column(Generic[Value]):
    """A field that reads as a numpy array and may be given as an array of the standard library.

    Reading the field makes the numpy array, a view without a copy, so that a trace can be loaded and replayed
    where there is no numpy.
    """

    def __init__(self, *default: Value) -> None:
        self.default = default
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trace: "Trace | None", owner: type) -> Value:
        if trace is None:  # a dataclass asks for the default
            if not self.default:
                raise AttributeError(f"{owner.__name__}.{self.name} has no default")
            return self.default[0]
        column: Any = vars(trace)[self.name]
        if isinstance(column, array):
            with naming_extra("stats"):
                import numpy as np

            # unsigned numbers, which are block ids, read as signed ones
            vars(trace)[self.name] = np.frombuffer(column, np.float64 if column.typecode == "d" else np.int64)
        return vars(trace)[self.name]

    def __set__(self, trace: "Trace", column: "Value | array[float] | array[int]") -> None:
        vars(trace)[self.name] = column


_PER_REQUEST: Final = ("sessions", "wait_for", "delay_s", "max_tokens")
"""Optional fields with one entry for each request."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """A trace of n requests as columns, in order of arrival (FAST'25 Appendix A, arXiv §4).

    Block ids are one flat array cut at `block_starts`, so whole-trace arithmetic is a numpy expression. Arrays of
    the standard library are taken as well: "d" for times, "q" for integers, "Q" for block ids.

    Raises:
        ValueError: when the columns do not fit each other.
    """

    name: str
    origin: Origin
    block_size_tokens: int = 512
    arrival_s: "_Column[Floats]" = _Column()
    """Shape (n,), seconds since the trace began, never decreasing."""
    input_tokens: "_Column[Integers]" = _Column()
    """Shape (n,), prompt lengths."""
    output_tokens: "_Column[Integers]" = _Column()
    """Shape (n,), answer lengths: the future, which no policy sees."""
    block_ids: "_Column[Integers]" = _Column()
    """Shape (total blocks,): the ids of request 0, then those of request 1, and so on.

    Ids are unsigned 64-bit numbers; those of 2**63 and above are stored less 2**64 here. The block keys of
    `requests()` are the unsigned ids."""
    block_starts: "_Column[Integers]" = _Column()
    """Shape (n + 1,): request i owns `block_ids[block_starts[i]:block_starts[i + 1]]`."""
    sessions: tuple[str | None, ...] | None = None
    """The conversation of each request, where the file says so."""
    wait_for: tuple[tuple[int, ...], ...] | None = None
    """For each request, those whose answers its client has before it sends this one, where the file says so."""
    delay_s: "_Column[Floats | None]" = _Column(None)
    """Shape (n,), seconds from these answers, or from that of the turn before, to the arrival; NaN: not stated."""
    ids: IdOrigin = "recorded"
    """Where `block_ids` come from; with "none" each block has an id of its own, and no hit rate follows."""
    max_tokens: "_Column[Integers | None]" = _Column(None)
    """Shape (n,), the most tokens a client allows for its answer, 0 where it states nothing; None: none does."""
    skipped: int = 0
    """Lines a lenient reading left out."""
    skipped_reasons: tuple[str, ...] = ()
    """Why, for the first few of them."""
    renamed_blocks: int = 0
    """Blocks whose id stood for another block earlier in the file; each is counted as a block of its own."""
    format: str = "mooncake"
    """Of the file that it was read from."""
    source: str
    """One line for the footer of a figure: which trace this is and how it came about."""

    def __post_init__(self) -> None:
        n, column = len(self), vars(self)
        inputs, outputs, starts = (len(column[name]) for name in ("input_tokens", "output_tokens", "block_starts"))
        if not inputs == outputs == starts - 1 == n:
            raise ValueError(
                f"trace {self.name!r} has {n} arrivals, {inputs} input lengths, {outputs} output lengths and"
                f" {starts} block starts; the lengths must be n, n, n and n + 1"
            )
        first, last, blocks = column["block_starts"][0], column["block_starts"][-1], len(column["block_ids"])
        if first != 0 or last != blocks:
            raise ValueError(
                f"trace {self.name!r} has {blocks} block ids, but its block starts run from {first} to {last};"
                " they must run from 0 to the number of ids"
            )
        for name in _PER_REQUEST:
            if column[name] is not None and len(column[name]) != n:
                raise ValueError(f"trace {self.name!r} has {n} requests and {len(column[name])} {name}; one each")

    def __len__(self) -> int:
        """The number of requests."""
        return len(vars(self)["arrival_s"])

    def blocks_of(self, i: int) -> "Integers":
        """The block ids of request `i`, front to back, without copying.

        Raises:
            IndexError: when there is no request `i`; indices run from 0 to `len(trace) - 1`.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"trace {self.name!r} has no request {i}; allowed are 0 to {len(self) - 1}")
        return self.block_ids[self.block_starts[i] : self.block_starts[i + 1]]

    def requests(self) -> Iterator[TracedRequest]:
        """The requests with their futures, one at a time, numbered from 0 in order of arrival."""
        column = vars(self)
        ids = memoryview(memoryview(column["block_ids"]).tobytes()).cast("Q")
        bounds: list[int] = column["block_starts"].tolist()
        columns = zip(
            column["arrival_s"].tolist(),
            column["input_tokens"].tolist(),
            column["output_tokens"].tolist(),
            self.sessions or [None] * len(self),
            [None] * len(self) if column["max_tokens"] is None else column["max_tokens"].tolist(),
            self.wait_for or [()] * len(self),
            [math.nan] * len(self) if column["delay_s"] is None else column["delay_s"].tolist(),
            strict=True,
        )
        for i, (arrival_s, input_tokens, output_tokens, session, max_tokens, wait_for, delay_s) in enumerate(
            columns
        ):
            request = Request(
                id=i,
                arrival_s=arrival_s,
                input_tokens=input_tokens,
                block_keys=tuple(ids[bounds[i] : bounds[i + 1]].tolist()),
                block_size_tokens=self.block_size_tokens,
                session=session,
                max_tokens=max_tokens or None,
                wait_for=wait_for,
                delay_s=None if math.isnan(delay_s) else delay_s,
            )
            yield TracedRequest(request, output_tokens)

    def with_max_tokens(self, default: int) -> "Trace":
        """The same requests, each with a stated limit; where it had none, that of `TracedRequest.max_tokens_or`.

        Raises:
            ValueError: when the default is not positive.
        """
        if default < 1:
            raise ValueError(f"clients cannot allow {default} tokens; at least 1 is needed")
        stated = array("q", (traced.max_tokens_or(default) for traced in self.requests()))
        return self.replaced(max_tokens=stated, source=f"{self.source}, max_tokens {default:,}")

    def at_speed(self, speed: float) -> "Trace":
        """The same requests, arriving so many times as fast, from clients that let so much less time pass.

        Raises:
            ValueError: when the speed is not a positive number.
        """
        if not 0 < speed < math.inf:
            raise ValueError(
                f"a trace cannot be replayed at {speed!r} times its speed; positive numbers are allowed"
            )
        arrivals_s = vars(self)["arrival_s"].tolist()
        delays_s = vars(self)["delay_s"]
        return self.replaced(
            arrival_s=array("d", (at_s / speed for at_s in arrivals_s)),
            delay_s=None if delays_s is None else array("d", (delay_s / speed for delay_s in delays_s.tolist())),
        )

    def head(self, n: int) -> "Trace":
        """The first `n` requests, or all of them when there are fewer; the source line says so.

        Raises:
            ValueError: when `n` is negative.
        """
        if n < 0:
            raise ValueError(f"cannot take the first {n} requests of trace {self.name!r}; at least 0 is needed")
        if n >= len(self):
            return self
        names = ("arrival_s", "input_tokens", "output_tokens", *_PER_REQUEST)
        column = vars(self)
        return self.replaced(
            **{name: None if column[name] is None else column[name][:n] for name in names},
            block_ids=column["block_ids"][: column["block_starts"][n]],
            block_starts=column["block_starts"][: n + 1],
            source=f"{self.source}, first {n:,} requests",
        )

    def replaced(self, **changes: Any) -> "Trace":
        """The same trace with other values of some fields: `dataclasses.replace` without numpy.

        Raises:
            ValueError: when the columns do not fit each other.
        """
        return Trace(**(vars(self) | changes))


def in_class(traced: TracedRequest, urgent_share: float, *, seed: int = 0) -> TracedRequest:
    """The request with priority 1 for a share of requests, else 0; it does not depend on the other requests."""
    urgent = keyed_uniform(seed, "urgent", traced.request.id) < urgent_share
    return replace(traced, request=replace(traced.request, priority=int(urgent)))
