"""One prompt prefilled by several processes: chunked pipeline parallelism (CPP), and KV-Runahead."""

from mooncake_lab.engine.pipeline.crew import (
    Crew,
    ProcessDiedError,
    Together,
    cpp_prefill,
    overlap_share,
    runahead_prefill,
)
from mooncake_lab.engine.pipeline.jobs import Activity, CppJob, CrewSpec, RunaheadJob, Share

__all__ = [
    "Activity",
    "CppJob",
    "Crew",
    "CrewSpec",
    "ProcessDiedError",
    "RunaheadJob",
    "Share",
    "Together",
    "cpp_prefill",
    "overlap_share",
    "runahead_prefill",
]
