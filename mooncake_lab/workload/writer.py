"""Writing a trace as a file in the released traces' format."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from mooncake_lab.workload.reader import DEFAULT_BLOCK_SIZE_TOKENS
from mooncake_lab.workload.trace import Trace


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a trace as a file that `read_trace` gives back; the file appears complete or not at all.

    Times are written in milliseconds. A time that was read from a file, or is a whole number of
    milliseconds, comes back bit for bit; any other within one rounding of a float.
    """
    path = Path(path)
    encoder = msgspec.json.Encoder()
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        for line in _lines_of(trace):
            file.write(encoder.encode(line) + b"\n")
    partial.replace(path)


def _lines_of(trace: Trace) -> Iterator[dict[str, Any]]:
    for traced in trace.requests():
        request = traced.request
        line: dict[str, Any] = {
            "timestamp": _milliseconds(request.arrival_s),
            "input_length": request.input_tokens,
            "output_length": traced.output_tokens,
            "hash_ids": request.block_keys,
        }
        if trace.sessions is not None:
            line["session_id"] = request.session
        if request.max_tokens is not None:
            line["max_tokens"] = request.max_tokens
        if trace.block_size_tokens != DEFAULT_BLOCK_SIZE_TOKENS:
            line["trace_block_size"] = trace.block_size_tokens
        yield line


def _milliseconds(arrival_s: float) -> int | float:
    """A number of ms that divided by 1000 gives the time again, where one does; a whole number if possible."""
    product = arrival_s * 1000
    near = (float(round(product)), product, math.nextafter(product, -math.inf), math.nextafter(product, math.inf))
    found = next((value for value in near if value / 1000 == arrival_s), product)
    return int(found) if found.is_integer() else found
