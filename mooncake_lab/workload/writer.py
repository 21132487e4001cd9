"""Writing a trace in Mooncake's format, with its additions for sessions."""

import gzip
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from mooncake_lab.core import complete_file
from mooncake_lab.workload.formats.rows import DEFAULT_BLOCK_SIZE_TOKENS
from mooncake_lab.workload.trace import Trace


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a trace as a file that `read_trace` gives back; the file appears complete or not at all.

    A name that ends in `.gz` is written compressed; equal traces give equal bytes, as the file holds no time.
    Times are written in milliseconds. A time that was read from a file, or is a whole number of
    milliseconds, comes back bit for bit; any other within one rounding of a float. A trace without block ids is
    written without them.

    Raises:
        ValueError: when the name is that of another compression.
        OSError: when the file cannot be written.
    """
    if Path(path).suffix in {".zst", ".xz", ".bz2", ".zip"}:
        raise ValueError(f"{path} would not be what its name says; allowed are plain files and .gz")
    encoder = msgspec.json.Encoder()
    with ExitStack() as opened:
        file: BinaryIO | gzip.GzipFile = opened.enter_context(complete_file(Path(path)))
        if Path(path).suffix == ".gz":
            file = opened.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
        for line in _lines_of(trace):
            file.write(encoder.encode(line) + b"\n")


def _lines_of(trace: Trace) -> Iterator[dict[str, Any]]:
    waited_for = {i for waits in trace.wait_for or () for i in waits}
    for traced in trace.requests():
        request = traced.request
        line: dict[str, Any] = {
            "timestamp": _milliseconds(request.arrival_s),
            "input_length": request.input_tokens,
            "output_length": traced.output_tokens,
        }
        if trace.ids != "none":
            line["hash_ids"] = request.block_keys
        if trace.sessions is not None:
            line["session_id"] = request.session
        if request.id in waited_for:
            line["request_id"] = request.id
        if request.wait_for:
            line["wait_for"] = request.wait_for
        if request.delay_s is not None and (request.session is not None or request.wait_for):
            line["delay"] = _milliseconds(request.delay_s)
        if request.max_tokens is not None:
            line["max_tokens"] = request.max_tokens
        if trace.block_size_tokens != DEFAULT_BLOCK_SIZE_TOKENS:
            line["trace_block_size"] = trace.block_size_tokens
        yield line


def _milliseconds(seconds: float) -> int | float:
    """A number of ms that divided by 1000 gives the time again, where one does; a whole number if possible."""
    product = seconds * 1000
    near = (float(round(product)), product, math.nextafter(product, -math.inf), math.nextafter(product, math.inf))
    found = next((value for value in near if value / 1000 == seconds), product)
    return int(found) if found.is_integer() else found
