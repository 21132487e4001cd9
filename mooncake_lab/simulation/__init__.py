"""The cluster in virtual time: the same policies, stores and log as the real one."""

from mooncake_lab.simulation.cluster import Cluster
from mooncake_lab.simulation.coupled import CoupledInstance
from mooncake_lab.simulation.decode import DecodeInstance
from mooncake_lab.simulation.device_memory import CachedBlocks, DeviceCache
from mooncake_lab.simulation.event_loop import EventLoop
from mooncake_lab.simulation.network import Network
from mooncake_lab.simulation.pipeline import (
    PipelineRequest,
    PipelineRun,
    PipelineSpec,
    StageClock,
    plan_s,
    run_pipeline,
    simulate_cpp,
)
from mooncake_lab.simulation.pool import NodeCache, PrefixPool
from mooncake_lab.simulation.prefill import PrefillInstance, PrefillService
from mooncake_lab.simulation.spec import (
    COUPLED_SYSTEMS,
    DEFAULT_MAX_TOKENS,
    DEVICE_TOKENS,
    ClusterSpec,
    CoupledPool,
    DecodePool,
    Failure,
    PrefillPool,
)

__all__ = [
    "COUPLED_SYSTEMS",
    "DEFAULT_MAX_TOKENS",
    "DEVICE_TOKENS",
    "CachedBlocks",
    "Cluster",
    "ClusterSpec",
    "CoupledInstance",
    "CoupledPool",
    "DecodeInstance",
    "DecodePool",
    "DeviceCache",
    "EventLoop",
    "Failure",
    "Network",
    "NodeCache",
    "PipelineRequest",
    "PipelineRun",
    "PipelineSpec",
    "PrefillInstance",
    "PrefillPool",
    "PrefillService",
    "PrefixPool",
    "StageClock",
    "plan_s",
    "run_pipeline",
    "simulate_cpp",
]
