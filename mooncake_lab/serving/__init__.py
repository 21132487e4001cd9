"""The cluster in real time: processes that compute and send KVCache, under the simulator's coordinator."""

from mooncake_lab.core.extras import naming_extra

with naming_extra("engine"):
    from mooncake_lab.serving.cluster import LiveCluster
    from mooncake_lab.serving.launch import WorkerError
    from mooncake_lab.serving.launch.local import WorkerProcesses
    from mooncake_lab.serving.pacer import Pacer
    from mooncake_lab.serving.runtime import ClusterRuntime
    from mooncake_lab.serving.spec import LiveOptions
    from mooncake_lab.serving.stream import FailedError, RejectedError, RequestStream

__all__ = [
    "ClusterRuntime",
    "FailedError",
    "LiveCluster",
    "LiveOptions",
    "Pacer",
    "RejectedError",
    "RequestStream",
    "WorkerError",
    "WorkerProcesses",
]
