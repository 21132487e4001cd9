"""What arrives: traces, read and checked, fetched or generated, and their statistics."""

from mooncake_lab.workload.trace import Origin, Trace

__all__ = [
    "Origin",
    "Trace",
]
