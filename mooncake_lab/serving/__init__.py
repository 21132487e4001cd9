"""The cluster in real time: workers that really compute, a Messenger between them, the same Conductor and log."""

from mooncake_lab.serving.cluster import LiveCluster
from mooncake_lab.serving.hall import Hall
from mooncake_lab.serving.journal import in_order
from mooncake_lab.serving.launch.local import WorkerError, WorkerPool
from mooncake_lab.serving.metronome import Metronome
from mooncake_lab.serving.placing import Decided
from mooncake_lab.serving.prompts import prompt_of, scaled_down
from mooncake_lab.serving.spec import LiveSpec
from mooncake_lab.serving.ticket import FailedError, RejectedError, Ticket

__all__ = [
    "Decided",
    "FailedError",
    "Hall",
    "LiveCluster",
    "LiveSpec",
    "Metronome",
    "RejectedError",
    "Ticket",
    "WorkerError",
    "WorkerPool",
    "in_order",
    "prompt_of",
    "scaled_down",
]
