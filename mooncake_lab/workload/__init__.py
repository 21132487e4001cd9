"""What arrives: traces read and checked, fetched, described, and generated."""

from typing import TYPE_CHECKING

from mooncake_lab.core.process import lazy_names
from mooncake_lab.workload.formats import FORMATS
from mooncake_lab.workload.reader import TraceError, read_trace
from mooncake_lab.workload.releases import (
    DATA_VARIABLE,
    RELEASES,
    WORKLOADS,
    Release,
    check_workload,
    fetch_trace,
    file_sha256,
    find_trace,
    load,
    load_or_read,
    search_folders,
)
from mooncake_lab.workload.sessions import ClientRules, ClientSession, RequestOutcome, chat_sessions, sessions_of
from mooncake_lab.workload.trace import Trace, in_class
from mooncake_lab.workload.trace_summary import TraceStatistics, statistics
from mooncake_lab.workload.writer import write_trace

if TYPE_CHECKING:
    from mooncake_lab.workload.trace_statistics import (
        conversation_sizes,
        request_of_block,
        reusable_blocks,
        reuse_gaps_s,
        seen_before,
        use_counts,
    )
    from mooncake_lab.workload.transforms import (
        SharedPrefix,
        poisson_arrivals_s,
        tick_s,
        with_larger_blocks,
        with_poisson_arrivals,
        with_spread_arrivals,
    )

__all__ = [
    "DATA_VARIABLE",
    "FORMATS",
    "RELEASES",
    "WORKLOADS",
    "ClientRules",
    "ClientSession",
    "Release",
    "RequestOutcome",
    "SharedPrefix",
    "Trace",
    "TraceError",
    "TraceStatistics",
    "chat_sessions",
    "check_workload",
    "conversation_sizes",
    "fetch_trace",
    "file_sha256",
    "find_trace",
    "in_class",
    "load",
    "load_or_read",
    "poisson_arrivals_s",
    "read_trace",
    "request_of_block",
    "reusable_blocks",
    "reuse_gaps_s",
    "search_folders",
    "seen_before",
    "sessions_of",
    "statistics",
    "tick_s",
    "use_counts",
    "with_larger_blocks",
    "with_poisson_arrivals",
    "with_spread_arrivals",
    "write_trace",
]

__getattr__ = lazy_names(__name__, "trace_statistics", "transforms")
