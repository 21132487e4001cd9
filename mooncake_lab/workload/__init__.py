"""What arrives: traces read and checked, fetched, described, and generated."""

from typing import TYPE_CHECKING

from mooncake_lab.core.lazy import lazy_names
from mooncake_lab.workload.classes import in_class
from mooncake_lab.workload.fetch import fetch_trace
from mooncake_lab.workload.load import check_workload, load, load_or_read
from mooncake_lab.workload.locate import DATA_VARIABLE, find_trace, search_folders
from mooncake_lab.workload.reader import DEFAULT_BLOCK_SIZE_TOKENS, TraceError, read_trace
from mooncake_lab.workload.releases import RELEASES, WORKLOADS, Release, file_sha256
from mooncake_lab.workload.trace import Origin, Trace
from mooncake_lab.workload.writer import write_trace

if TYPE_CHECKING:
    from mooncake_lab.workload.arrivals import poisson_arrivals_s, with_poisson_arrivals
    from mooncake_lab.workload.coarsen import with_larger_blocks
    from mooncake_lab.workload.shared_prefix import SharedPrefix
    from mooncake_lab.workload.sharing import (
        conversation_sizes,
        request_of_block,
        reusable_blocks,
        reuse_gaps_s,
        seen_before,
        use_counts,
    )
    from mooncake_lab.workload.trace_statistics import Spread, TraceStatistics, statistics

__all__ = [
    "DATA_VARIABLE",
    "DEFAULT_BLOCK_SIZE_TOKENS",
    "RELEASES",
    "WORKLOADS",
    "Origin",
    "Release",
    "SharedPrefix",
    "Spread",
    "Trace",
    "TraceError",
    "TraceStatistics",
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
    "statistics",
    "use_counts",
    "with_larger_blocks",
    "with_poisson_arrivals",
    "write_trace",
]

__getattr__ = lazy_names(
    __name__,
    {
        "arrivals": ("poisson_arrivals_s", "with_poisson_arrivals"),
        "coarsen": ("with_larger_blocks",),
        "shared_prefix": ("SharedPrefix",),
        "sharing": (
            "conversation_sizes",
            "request_of_block",
            "reusable_blocks",
            "reuse_gaps_s",
            "seen_before",
            "use_counts",
        ),
        "trace_statistics": ("Spread", "TraceStatistics", "statistics"),
    },
)
