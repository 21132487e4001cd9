"""The cluster in real time: processes that compute and send KVCache, under the simulator's coordinator."""

from mooncake_lab.serving.cluster import LiveCluster, in_order
from mooncake_lab.serving.launch import WorkerError
from mooncake_lab.serving.launch.local import WorkerPool
from mooncake_lab.serving.metronome import Metronome
from mooncake_lab.serving.runtime import ClusterRuntime
from mooncake_lab.serving.spec import LiveSpec
from mooncake_lab.serving.stream import FailedError, RejectedError, RequestStream

__all__ = [
    "ClusterRuntime",
    "FailedError",
    "LiveCluster",
    "LiveSpec",
    "Metronome",
    "RejectedError",
    "RequestStream",
    "WorkerError",
    "WorkerPool",
    "in_order",
]
