"""A run as a timeline: the log in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from mooncake_lab.core import (
    Arrived,
    CacheChanged,
    DecodeStretch,
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
    Record,
    Rejected,
    RunEnded,
    complete_file,
)

_Span: TypeAlias = Prefilled | DecodeStretch | Moved
_INSTANCES, _TRANSFERS, _REQUESTS = 1, 2, 3
"""The three groups of tracks; the format calls them processes."""


def trace_events(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """The events of a log, times in microseconds as the format wants them.

    One track an instance shows prefills and decode stretches; one track a pair of nodes (or tiers) shows moves.
    What overlaps there, as transfers of one pair do, has another track of the same name, for spans of a track must
    not. Requests are asynchronous spans from arrival to end, with their decisions as instants. What caches hold is
    a counter each.
    """
    tracks, held = _Tracks(), Counter[str]()
    for group, name in ((_INSTANCES, "instances"), (_TRANSFERS, "transfers"), (_REQUESTS, "requests")):
        yield _named("process_name", group, 0, name)
    for record in records:
        match record:
            case Prefilled(instance=instance):
                yield from tracks.show(record, _INSTANCES, instance, f"prefill {record.request_id}")
            case DecodeStretch(instance=instance):
                yield from tracks.show(record, _INSTANCES, instance, f"decode of {len(record.request_ids)}")
            case Moved(source=source, destination=destination):
                pair = f"{source} to {destination}"
                yield from tracks.show(record, _TRANSFERS, pair, f"KVCache of {record.request_id}")
            case CacheChanged(instance=instance):
                held[instance] += len(record.added) - len(record.removed)
                yield {
                    "ph": "C",
                    "name": f"KVCache blocks of {instance}",
                    "pid": _INSTANCES,
                    "ts": record.at_s * 1e6,
                    "args": {"blocks": held[instance]},
                }
            case Arrived() | Placed() | FirstToken() | Finished() | Rejected():
                yield _of_request(record)
            case RunEnded():
                pass  # spans that are open then have no end


@dataclass(slots=True)
class _Tracks:
    """Which track each span is on; it grows with the log."""

    count: int = 0
    last: dict[tuple[int, str], dict[int, tuple[float, float]]] = field(default_factory=dict)
    """By group and name, the last span of each track: its start and end (s)."""

    def show(self, record: _Span, group: int, name: str, said: str) -> Iterator[dict[str, Any]]:
        """The span on the first track of its name that is free, or shows the very same stretch of time."""
        span = record.start_s, record.at_s
        tracks = self.last.setdefault((group, name), {})
        thread = next((t for t, last in tracks.items() if last[1] <= span[0] or last == span), None)
        if thread is None:
            self.count += 1
            thread = self.count
            yield _named("thread_name", group, thread, name)
        tracks[thread] = span
        yield _span(record, group, thread, said)


def write_perfetto(path: Path, records: Iterable[Record]) -> None:
    """Write a log as a file that ui.perfetto.dev opens; it appears complete or not at all."""
    encoder = msgspec.json.Encoder()
    with complete_file(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(trace_events(records)):
            file.write(b",\n" if number else b"")
            file.write(encoder.encode(event))
        file.write(b"\n]}\n")


def _named(kind: str, group: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": group, "tid": thread, "args": {"name": name}}


def _span(record: _Span, group: int, thread: int, name: str) -> dict[str, Any]:
    """A complete event; what the record says besides is shown when it is clicked."""
    return {
        "ph": "X",
        "name": name,
        "cat": type(record).__name__.lower(),
        "pid": group,
        "tid": thread,
        "ts": record.start_s * 1e6,
        "dur": (record.at_s - record.start_s) * 1e6,
        "args": _rest(record),
    }


def _of_request(record: Arrived | Placed | FirstToken | Finished | Rejected) -> dict[str, Any]:
    """The begin, an instant or the end of a request's own span."""
    phase = "b" if isinstance(record, Arrived) else "e" if isinstance(record, (Finished, Rejected)) else "n"
    return {
        "ph": phase,
        "name": f"request {record.request_id}",
        "cat": "request",
        "id": record.request_id,
        "pid": _REQUESTS,
        "tid": 0,
        "ts": record.at_s * 1e6,
        "args": {"event": type(record).__name__.lower(), **_rest(record)},
    }


def _rest(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__ if name not in {"at_s", "start_s"}}
