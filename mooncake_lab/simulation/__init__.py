"""The cluster in virtual time: the same policies, stores and log as the real one."""

from mooncake_lab.simulation.clock import EventLoop
from mooncake_lab.simulation.cluster import Cluster
from mooncake_lab.simulation.pipeline import (
    PipelineRun,
    PipelineSpec,
    StageClock,
    plan_s,
    run_pipeline,
    simulate_cpp,
)
from mooncake_lab.simulation.spec import (
    COUPLED_SYSTEMS,
    DEFAULT_MAX_TOKENS,
    ClusterSpec,
    CoupledPool,
    Failure,
    PrefillPool,
)

__all__ = [
    "COUPLED_SYSTEMS",
    "DEFAULT_MAX_TOKENS",
    "Cluster",
    "ClusterSpec",
    "CoupledPool",
    "EventLoop",
    "Failure",
    "PipelineRun",
    "PipelineSpec",
    "PrefillPool",
    "StageClock",
    "plan_s",
    "run_pipeline",
    "simulate_cpp",
]
