"""The cluster in virtual time: the same policies, stores and log as the real one."""

from mooncake_lab.simulation.clients import SimulatedClients
from mooncake_lab.simulation.clock import EventLoop
from mooncake_lab.simulation.cluster import Cluster
from mooncake_lab.simulation.options import DEFAULT_MAX_TOKENS, Failure, SimulationOptions
from mooncake_lab.simulation.pipeline import (
    PipelineRun,
    PipelineSpec,
    StageClock,
    plan_s,
    run_pipeline,
    simulate_cpp,
)

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "Cluster",
    "EventLoop",
    "Failure",
    "PipelineRun",
    "PipelineSpec",
    "SimulatedClients",
    "SimulationOptions",
    "StageClock",
    "plan_s",
    "run_pipeline",
    "simulate_cpp",
]
