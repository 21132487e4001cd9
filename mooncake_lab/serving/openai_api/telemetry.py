"""What Prometheus scrapes: counters and latencies from the run log, gauges from the state of workers."""

from collections.abc import Iterable, Mapping
from typing import Final, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from mooncake_lab.cluster import WorkerState
from mooncake_lab.core import (
    Arrived,
    CacheChanged,
    DecodeStretch,
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
    Record,
    Rejected,
    RunEnded,
)

_PREFIX: Final = "mooncake_"
_TTFT_BUCKETS_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_STEP_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


@final
class Telemetry:
    """Turns records into metrics. Mutable: it counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._arrived = self._counter("requests", "Requests that arrived.")
        self._ended = self._counter("requests_ended", "Requests that ended, by how.", "how")
        self._placed = self._counter("placements", "Placements, repeated ones included.")
        self._tokens = self._counter("prompt_tokens", "Prompt tokens, by what they cost.", "how")
        self._generated = self._counter("generated_tokens", "Tokens shown to clients.")
        self._moved = self._counter("moved_bytes", "KVCache bytes that arrived on another worker.")
        self._ttft = self._histogram(
            "ttft_seconds",
            "From an HTTP request to its first token, the front included.",
            _TTFT_BUCKETS_S,
        )
        self._placed_ttft = self._histogram(
            "cluster_ttft_seconds", "The part of it after the prompt was tokenised.", _TTFT_BUCKETS_S
        )
        self._step = self._histogram("decode_step_seconds", "Decode steps.", _STEP_BUCKETS_S)
        self._under_way = self._gauge("requests_under_way", "Requests in the cluster.")
        self._workers = self._gauge("workers", "Living workers.", "role")
        self._queued = self._gauge("queued_prompts", "Prompts queued or running.", "worker")
        self._context = self._gauge("context_tokens", "KVCache tokens decoding there.", "worker")
        self._damaged = self._counter(
            "damaged_blocks", "KVCache blocks that were damaged when they were read, and not used.", "worker"
        )
        self._arrivals_s: dict[int, float] = {}
        self._told_damaged: dict[str, int] = {}

    def note(self, record: Record) -> None:
        """Count one record."""
        match record:
            case Arrived():
                self._arrived.inc()
                self._arrivals_s[record.request_id] = record.at_s
            case Placed():
                self._placed.inc()
            case Prefilled():
                self._tokens.labels("computed").inc(record.computed_tokens)
                self._tokens.labels("reused").inc(record.reused_tokens)
            case Moved():
                self._moved.inc(record.bytes)
            case FirstToken():
                self._generated.inc()
                self._placed_ttft.observe(record.at_s - self._arrivals_s[record.request_id])
            case DecodeStretch():
                self._generated.inc(len(record.request_ids))
                if record.first_step_s:
                    self._step.observe(record.first_step_s)
            case Finished() | Rejected():
                how = "finished" if isinstance(record, Finished) else record.stage
                self._ended.labels(how).inc()
                self._arrivals_s.pop(record.request_id, None)
            case CacheChanged() | RunEnded():
                pass  # records of simulated runs

    def first_token(self, seconds: float) -> None:
        """An HTTP request has its first token, so long after it came."""
        self._ttft.observe(seconds)

    def page(self, workers: Iterable[WorkerState], damaged_blocks: Mapping[str, int], in_flight: int) -> bytes:
        """The metrics now, in Prometheus' text format.

        Args:
            workers: those that are up.
            damaged_blocks: how many the workers of each name have found.
            in_flight: requests in the cluster.
        """
        self._under_way.set(in_flight)
        self._workers.clear()
        self._queued.clear()
        self._context.clear()
        for worker in workers:
            self._workers.labels(worker.role).inc()
            if worker.role != "decode":
                self._queued.labels(worker.name).set(len(worker.prompts))
            if worker.role != "prefill":
                self._context.labels(worker.name).set(worker.context_tokens)
        for name, blocks in damaged_blocks.items():
            self._damaged.labels(name).inc(blocks - self._told_damaged.get(name, 0))
        self._told_damaged = dict(damaged_blocks)
        return generate_latest(self._registry)

    def _counter(self, name: str, says: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, says, labels, registry=self._registry)

    def _gauge(self, name: str, says: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, says, labels, registry=self._registry)

    def _histogram(self, name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, says, buckets=buckets, registry=self._registry)
