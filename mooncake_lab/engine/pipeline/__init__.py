"""One prompt prefilled by several processes: chunked pipeline parallelism (CPP), and KV-Runahead."""

from mooncake_lab.engine.pipeline.crew import Crew, CrewSpec, ProcessDiedError
from mooncake_lab.engine.pipeline.jobs import Activity, CppJob, DieJob, Job, RunaheadJob, Share
from mooncake_lab.engine.pipeline.prefill import Together, cpp_prefill, overlap_share, runahead_prefill

__all__ = [
    "Activity",
    "CppJob",
    "Crew",
    "CrewSpec",
    "DieJob",
    "Job",
    "ProcessDiedError",
    "RunaheadJob",
    "Share",
    "Together",
    "cpp_prefill",
    "overlap_share",
    "runahead_prefill",
]
