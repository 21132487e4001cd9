"""Writing a trace as a file in the released traces' format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

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
    ids: list[int] = trace.block_ids.view(np.uint64).tolist()
    bounds: list[int] = trace.block_starts.tolist()
    columns = zip(
        _milliseconds(trace.arrival_s), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True
    )
    for i, (timestamp, input_length, output_length) in enumerate(columns):
        line: dict[str, Any] = {
            "timestamp": timestamp,
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": ids[bounds[i] : bounds[i + 1]],
        }
        if trace.sessions is not None:
            line["session_id"] = trace.sessions[i]
        if trace.max_tokens is not None and trace.max_tokens[i]:
            line["max_tokens"] = int(trace.max_tokens[i])
        if trace.block_size_tokens != DEFAULT_BLOCK_SIZE_TOKENS:
            line["trace_block_size"] = trace.block_size_tokens
        yield line


def _milliseconds(arrival_s: npt.NDArray[np.float64]) -> list[int | float]:
    """Each time in ms such that dividing by 1000 gives the time again, as a whole number where one does."""
    product = arrival_s * 1000
    best = np.rint(product)
    for candidate in (product, np.nextafter(product, -np.inf), np.nextafter(product, np.inf)):
        best = np.where(best / 1000 == arrival_s, best, candidate)
    best = np.where(best / 1000 == arrival_s, best, product)
    return [int(value) if value.is_integer() else value for value in best.tolist()]
