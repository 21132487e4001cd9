"""What arrives: traces read and checked, fetched, described, and generated."""

from mooncake_lab.workload.fetch import fetch_trace
from mooncake_lab.workload.locate import DATA_VARIABLE, find_trace, search_folders
from mooncake_lab.workload.reader import DEFAULT_BLOCK_SIZE_TOKENS, TraceError, read_trace
from mooncake_lab.workload.releases import RELEASES, WORKLOADS, Release
from mooncake_lab.workload.trace import Origin, Trace
from mooncake_lab.workload.writer import write_trace

__all__ = [
    "DATA_VARIABLE",
    "DEFAULT_BLOCK_SIZE_TOKENS",
    "RELEASES",
    "WORKLOADS",
    "Origin",
    "Release",
    "Trace",
    "TraceError",
    "fetch_trace",
    "find_trace",
    "read_trace",
    "search_folders",
    "write_trace",
]
