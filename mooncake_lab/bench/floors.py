"""Floors: the least time that work can take at the highest rates that anything on the machine reached.

The peaks of `peaks` are candidates, and so is every program that was timed, ours and others: what one of them did
the machine can do. So no time lies below its floor.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mooncake_lab.perf import Hardware


class Rates(NamedTuple):
    """How fast a machine is."""

    bytes_per_s: float
    flops_per_s: float


def rates_of(peaks: Hardware, bytes_per_element: int) -> Rates:
    """The peaks that bound numbers of this size: what has fewer bits can be computed in float32, too."""
    rate = peaks.float32_flops_per_s
    if bytes_per_element < 4:
        rate = max(rate, peaks.bfloat16_flops_per_s)
    return Rates(peaks.device_memory_bytes_per_s, rate)


def floor_seconds(bytes_moved: float, flops: float, rates: Rates) -> tuple[float, Literal["bandwidth", "compute"]]:
    """The least seconds for this work at these rates, and which of the two sets them."""
    memory_s, compute_s = bytes_moved / rates.bytes_per_s, flops / rates.flops_per_s
    return (memory_s, "bandwidth") if memory_s >= compute_s else (compute_s, "compute")


def with_floors(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a benchmark with floors from the highest rates that any of them knows of.

    Args:
        rows: each with `threads`, `dtype`, `bytes_moved`, `flops`, `seconds`, `peer_seconds` (or None), `peaks`.
    """
    found: list[dict[str, Any]] = []
    for row in rows:
        rates = _highest(row, rows)
        floor_s, bound = floor_seconds(row["bytes_moved"], row["flops"], rates)
        found.append({**row, "floor_seconds": floor_s, "bound_by": bound, "peaks": rates._asdict()})
    return found


def _highest(row: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Rates:
    """The highest rates for a row: with as many threads, and FLOPs of its type of numbers or of a wider one."""
    bytes_per_s = flops_per_s = 0.0
    for other in rows:
        if other["threads"] != row["threads"]:
            continue
        shortest_s = min(filter(None, (other["seconds"], other["peer_seconds"])))
        peaks = other.get("peaks", {})
        bytes_per_s = max(bytes_per_s, peaks.get("bytes_per_s", 0.0), other["bytes_moved"] / shortest_s)
        if other["dtype"] in (row["dtype"], "float32"):
            flops_per_s = max(flops_per_s, peaks.get("flops_per_s", 0.0), other["flops"] / shortest_s)
    return Rates(bytes_per_s, flops_per_s)
