"""Admission on the live cluster: a burst of requests in real processes, beside the same burst in simulation.

A metronome sets the pace of computing, so that the pools fill as they would on nodes of their own. Tokens,
KVCache, sockets and decisions are real. The simulator's latency model contains only that pace.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mooncake_lab import perf
from mooncake_lab.bench.machine import describe_machine
from mooncake_lab.book.chapters.live.experiment import warm_up
from mooncake_lab.book.chapters.live.requests import checked
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import named_admission
from mooncake_lab.core import SLO, Finished, Record, Rejected, Request, TracedRequest, blocks_for
from mooncake_lab.metrics import prefill_gpu_s, wasted_prefill_gpu_s
from mooncake_lab.serving import LiveCluster, LiveOptions, Pacer, WorkerProcesses
from mooncake_lab.simulation import Cluster

_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCrowd:
    """More requests than one decode worker has places for, one after the other, under several policies."""

    policies: tuple[str, ...] = ("after_prefill", "early", "predictive", "committed")
    requests: int = 24
    every_s: float = 0.15
    """Time between arrivals."""
    prefill_s: float = 0.18
    """Prefill of one prompt, by the metronome."""
    step_s: float = 0.012
    """Decode step without its share per request, by the metronome."""
    step_s_per_request: float = 0.006
    slots: int = 4
    """Requests that may decode at a time: one more would break the limit of TBT."""
    ttft_limit_s: float | None = None
    """Makes prefill scarce, too; None is a limit that no queue of this burst reaches."""
    prompt_tokens: int = 256
    answer_tokens: int = 40
    model: str = "random:lab-tiny"
    seed: int = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Two rows per policy, live and simulated: requests served, rejections by stage, what became of each."""
        requests, machine = self.arrivals(), str(describe_machine())
        with WorkerProcesses(self.options()) as pool:
            for policy in self.policies:
                spec = self.spec(policy)
                with LiveCluster(spec, self.options(), model=self.pace(), launcher=pool) as live:
                    warm_up(live)
                    log = checked(live.run(requests))
                yield {"policy": policy, "world": "live", **_counted(log), "machine": machine}
                log = Cluster(spec, self.pace()).run(requests)
                yield {"policy": policy, "world": "simulated", **_counted(log), "machine": machine}

    def arrivals(self) -> list[TracedRequest]:
        """The burst: requests of equal length that share no block."""
        blocks = blocks_for(self.prompt_tokens, _BLOCK_TOKENS)
        return [
            TracedRequest(
                Request(
                    id=i,
                    arrival_s=i * self.every_s,
                    input_tokens=self.prompt_tokens,
                    block_keys=tuple(range(i * blocks, (i + 1) * blocks)),
                    block_size_tokens=_BLOCK_TOKENS,
                ),
                self.answer_tokens,
            )
            for i in range(self.requests)
        ]

    def pace(self) -> perf.LatencyModel:
        """The latency model of the metronome, which the Conductor and the simulator use too."""
        prefill = perf.PrefillLatency(constant_s=self.prefill_s, per_token_s=0.0, per_token_squared_s=0.0)
        decode = perf.DecodeLatency(self.step_s, self.step_s_per_request, 0.0)
        return perf.LatencyModel(
            name=f"a metronome: {self.prefill_s:g} s a prompt, {self.step_s:g} s a step",
            shape=perf.model_shape(self.model.removeprefix("random:")),
            prefill=prefill,
            decode=decode,
            hybrid=perf.HybridLatency.of(prefill, decode),
            transfer=perf.LinkLatency(1e9),
            dram=perf.LinkLatency(1e9),
        )

    def options(self) -> LiveOptions:
        """What the live cluster runs, paced by the metronome."""
        return LiveOptions(
            model=self.model,
            seed=self.seed,
            device="cpu",
            backend="dense",
            pacer=Pacer.of(self.pace()),
            spares=0,
        )

    def spec(self, policy: str) -> ClusterSpec:
        """One prefill and one decode worker under an admission policy; t_d is an answer in a full pool."""
        pace = self.pace()
        full_s, beyond_s = (float(pace.decode.step_s(self.slots + more, 0)) for more in (0, 1))
        return ClusterSpec.small(
            block_size_tokens=_BLOCK_TOKENS,
            admission=named_admission(policy, decode_s=(self.answer_tokens - 1) * full_s),
            slo=SLO(ttft_s=self.ttft_limit_s or self.requests * self.prefill_s, tbt_s=beyond_s),
        )


def _counted(log: list[Record]) -> dict[str, Any]:
    rejected = {record.request_id: record for record in log if isinstance(record, Rejected)}
    stages = [record.stage for record in rejected.values()]
    finished = {record.request_id: "finished" for record in log if isinstance(record, Finished)}
    ends = finished | {number: _where(record) for number, record in rejected.items()}
    return {
        "finished": len(finished),
        "refused_on_arrival": sum(stage != "decode" for stage in stages),
        "refused_after_prefill": stages.count("decode"),
        "prefill_s": prefill_gpu_s(log),
        "wasted_prefill_s": wasted_prefill_gpu_s(log),
        "ends": ", ".join(ends[number] for number in sorted(ends)),
    }


def _where(rejected: Rejected) -> str:
    """Which pool refused a request, and when."""
    if rejected.stage == "decode":
        return "decode after prefill"
    return "prefill" if rejected.reason.startswith("prefill") else "decode on arrival"
