"""The run log: what happened, in one format for the simulated and the real world.

A log is a sequence of records in order of their time. Records say what happened and never what it
means: latencies, goodput and hit rates are computed from them by `metrics`. A stretch of decoding
between two changes of a batch is one record with a closed form, so logs stay small and exact.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

from mooncake_lab.core.files import complete_file
from mooncake_lab.core.request import BlockKey


class _Event(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="event", forbid_unknown_fields=True):
    """Fields every record shares."""

    at_s: float
    """When it happened; for something that lasts, when it ended (s since the run began)."""


class Arrived(_Event, frozen=True, kw_only=True, gc=False, tag="arrived", omit_defaults=True):
    """A request reached the cluster."""

    request_id: int
    input_tokens: int
    completion_id: str | None = None
    """The id of the HTTP response that it is answered in; several prompts of one HTTP request share it."""
    wall_s: float | None = None
    """The same moment as `at_s` on the wall clock (s since 1970), where a client's request came over HTTP."""


class Placed(_Event, frozen=True, kw_only=True, gc=False, tag="placed"):
    """The Conductor chose instances for a request."""

    request_id: int
    prefill_instance: str
    decode_instance: str
    reused_tokens: int
    """Prefix tokens that need no computation."""
    fetched_tokens: int = 0
    """Tokens among them that must first come from another instance."""
    reason: str = ""


class Rejected(_Event, frozen=True, kw_only=True, gc=False, tag="rejected"):
    """A request was not served, or not to its end."""

    request_id: int
    stage: str
    """Where: `frontdoor` (too many in flight), `capacity` (it cannot fit), `admission` (on arrival), `decode` (the
    double check after prefill), `batching` (the policy of its instance), `failed` (an error, or too many attempts)
    or `client` (it left)."""
    reason: str


class Prefilled(_Event, frozen=True, kw_only=True, gc=False, tag="prefilled"):
    """A span of prefill computation for one request ended."""

    request_id: int
    instance: str
    start_s: float
    computed_tokens: int
    reused_tokens: int
    """Prompt tokens found in a cache; a preempted request that finds its own blocks again counts none."""


class Moved(_Event, frozen=True, kw_only=True, gc=False, tag="moved"):
    """KVCache bytes arrived somewhere: another instance, or another tier of the same one."""

    request_id: int
    source: str
    destination: str
    start_s: float
    bytes: int


class FirstToken(_Event, frozen=True, kw_only=True, gc=False, tag="first_token"):
    """The user received a request's first token."""

    request_id: int


class DecodeStretch(_Event, frozen=True, kw_only=True, gc=False, tag="decode_stretch"):
    """`steps` decode steps of one unchanged batch; step `k` from 0 lasts `first_step_s + k * step_growth_s`."""

    instance: str
    start_s: float
    steps: int
    first_step_s: float
    step_growth_s: float
    request_ids: tuple[int, ...]


class Finished(_Event, frozen=True, kw_only=True, gc=False, tag="finished"):
    """A request received its last token."""

    request_id: int
    output_tokens: int


class RunEnded(_Event, frozen=True, kw_only=True, gc=False, tag="run_ended"):
    """A simulated run was cut at its horizon; the decode steps that ended before it are in the log."""

    tokens: dict[int, int]
    """How many tokens each request that is not served yet has received, by id; those without a token are left out.
    The instances count them on their own, so that the log can be checked against it."""


class CacheChanged(_Event, frozen=True, kw_only=True, gc=False, tag="cache_changed", omit_defaults=True):
    """KVCache blocks entered a node's cache, on any of its tiers, then others left it or moved between its tiers.

    The log has this event for simulated prefill nodes only, and without moves. The real cluster reports it to its
    index and does not log it. A cache in GPU memory, such as that of a coupled instance, is not logged either.
    """

    instance: str
    """Whose cache; of one store for all nodes, the first of them."""
    added: tuple[BlockKey, ...]
    removed: tuple[BlockKey, ...]
    promoted: tuple[BlockKey, ...] = ()
    """Blocks that are in DRAM now, and were on SSD only."""
    demoted: tuple[BlockKey, ...] = ()
    """Blocks that are on SSD only now."""


Record: TypeAlias = (
    Arrived
    | Placed
    | Rejected
    | Prefilled
    | Moved
    | FirstToken
    | DecodeStretch
    | Finished
    | CacheChanged
    | RunEnded
)
"""Anything a run log holds."""


@contextmanager
def log_writer(path: Path) -> Generator[Callable[[Record], None]]:
    """A function that writes one record after the other as JSON lines, and keeps none.

    The file has its name once all is written; where the writing fails, what was there before stays.
    """
    encode = msgspec.json.Encoder().encode
    with complete_file(path) as file:

        def write(record: Record) -> None:
            file.write(encode(record))
            file.write(b"\n")

        yield write


def write_log(path: Path, records: Iterable[Record]) -> None:
    """Write records as JSON lines; the file appears complete or not at all."""
    with log_writer(path) as write:
        for record in records:
            write(record)


def read_log(path: Path) -> Iterator[Record]:
    """Records of a log file, one at a time.

    Raises:
        ValueError: naming file, line and what is wrong with it.
    """
    decoder = msgspec.json.Decoder(Record)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}:{number}: not a record of a run log: {error}") from error
