"""What arrives: traces read and checked, fetched, described, and generated."""

from mooncake_lab.workload.reader import DEFAULT_BLOCK_SIZE_TOKENS, TraceError, read_trace
from mooncake_lab.workload.trace import Origin, Trace
from mooncake_lab.workload.writer import write_trace

__all__ = [
    "DEFAULT_BLOCK_SIZE_TOKENS",
    "Origin",
    "Trace",
    "TraceError",
    "read_trace",
    "write_trace",
]
