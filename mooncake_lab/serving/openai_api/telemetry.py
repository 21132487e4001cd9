"""What Prometheus scrapes: counters and latencies from the run log, gauges from the state of workers."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from mooncake_lab.cluster import COUPLED_SYSTEMS, ClusterSpec, InstanceState
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

_TTFT_BUCKETS_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_STEP_BUCKETS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


@final
class Telemetry:
    """Turns records into metrics. Mutable: it counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="mooncake", registry=self._registry)
        gauge = partial(Gauge, namespace="mooncake", registry=self._registry)
        histogram = partial(Histogram, namespace="mooncake", registry=self._registry)
        self._arrived = counter("requests", "Requests that arrived.")
        self._ended = counter("requests_ended", "Requests that ended, by how.", ["how"])
        self._placed = counter("placements", "Placements, repeated ones included.")
        self._tokens = counter("prompt_tokens", "Prompt tokens, by what they cost.", ["how"])
        self._generated = counter("generated_tokens", "Tokens shown to clients.")
        self._moved = counter("moved_bytes", "KVCache bytes that arrived on another worker.")
        says = "From an HTTP request to its first token, the front included."
        self._ttft = histogram("ttft_seconds", says, buckets=_TTFT_BUCKETS_S)
        says = "The part of it after the prompt was tokenised."
        self._placed_ttft = histogram("cluster_ttft_seconds", says, buckets=_TTFT_BUCKETS_S)
        self._step = histogram("decode_step_seconds", "Decode steps.", buckets=_STEP_BUCKETS_S)
        self._under_way = gauge("requests_under_way", "Requests in the cluster.")
        self._workers = gauge("workers", "Living workers.", ["role"])
        self._queued = gauge("queued_prompts", "Prompts queued or running.", ["worker"])
        self._context = gauge("context_tokens", "KVCache tokens decoding there.", ["worker"])
        says = "KVCache blocks that were damaged when they were read, and not used."
        self._damaged = counter("damaged_blocks", says, ["worker"])
        says = "How workers plan and what they hold, for who wants to simulate them."
        self._config = Info("config", says, namespace="mooncake", registry=self._registry)
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

    def describe(self, spec: ClusterSpec) -> None:
        """Show the settings of a cluster that decide when its requests run."""
        self._config.info({name: str(value) for name, value in config_of(spec).items()})

    def first_token(self, seconds: float) -> None:
        """An HTTP request has its first token, so long after it came."""
        self._ttft.observe(seconds)

    def page(self, workers: Iterable[InstanceState], damaged_blocks: Mapping[str, int], in_flight: int) -> bytes:
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
                self._queued.labels(worker.name).set(len(worker.prefill.prompts))
            if worker.role != "prefill":
                self._context.labels(worker.name).set(worker.decode.context_tokens)
        for name, blocks in damaged_blocks.items():
            self._damaged.labels(name).inc(blocks - self._told_damaged.get(name, 0))
        self._told_damaged = dict(damaged_blocks)
        return generate_latest(self._registry)


def config_of(spec: ClusterSpec) -> dict[str, str | int | bool | None]:
    """The settings of a cluster's workers by the names that vLLM gives them; a policy without a name has none."""
    match spec.pools:
        case (prefill, decode):
            return {
                "scheduler": "disaggregated",
                "max_num_seqs": decode.max_requests,
                "max_num_batched_tokens": prefill.pack_tokens,
                "kv_tokens": decode.device_tokens,
                "block_size": spec.block_size_tokens,
                "prefix_caching": prefill.prefix_caching,
            }
        case (coupled,):
            policy = coupled.batching
            named = (name for name, (known, _) in COUPLED_SYSTEMS.items() if type(known) is type(policy))
            return {
                "scheduler": next(named, ""),
                "max_num_seqs": coupled.max_requests,
                "max_num_batched_tokens": getattr(policy, "chunk_tokens", None) or coupled.max_batch_tokens,
                "kv_tokens": coupled.device_tokens,
                "block_size": coupled.memory_block_tokens,
                "prefix_caching": coupled.prefix_caching,
            }
