"""The second simulator under overload: who is refused, and where (arXiv §7)."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from own_clusters import KV_BYTES, NETWORK, TO_GPU, DecodeNode, Machine, PrefillPool, Served, everywhere
from own_traces import Job


@dataclass(frozen=True)
class Limits:
    """What a request must meet, and at which share of it a request is refused."""

    ttft: float
    tbt: float
    on_arrival: float = 1.0
    after_prefill: float = 1.0


@dataclass
class Overloaded:
    """A disaggregated cluster that refuses requests; it changes with every request.

    All policies check the decode instance again after prefill. `early` asks on arrival as well whether the request
    would fit on the mean decode instance as it is now; `prediction`, as it will be when the request comes out of
    prefill, if every answer takes `decode_seconds`.
    """

    machine: Machine
    limits: Limits
    policy: str
    decode_seconds: float
    prefill_nodes: int = 8
    decode_nodes: int = 8
    result: list[Served] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = PrefillPool(self.prefill_nodes, self.machine)
        self.nodes = [DecodeNode(self.machine) for _ in range(self.decode_nodes)]
        self.coming: list[dict[int, tuple[float, Served]]] = [{} for _ in self.nodes]
        """By number: when decoding is expected to begin, and the request. They are in prefill or in transfer."""
        self.present: list[dict[int, tuple[float, Served]]] = [{} for _ in self.nodes]
        """The same for requests that have passed the second check."""
        self.checks: list[tuple[float, int, int]] = []

    def replay(self, jobs: Sequence[Job]) -> list[Served]:
        """All requests in order."""
        for number, job in enumerate(jobs):
            self.second_checks(job.at)
            for i in range(len(self.nodes)):
                self.look_at(i, job.at)
            self.arrive(number, job)
        self.second_checks(math.inf)
        return self.result

    def look_at(self, i: int, now: float) -> None:
        """Bring an instance to this moment, and forget who has left it."""
        self.nodes[i].advance(now)
        for number in [n for n, (_, served) in self.present[i].items() if served.gaps is not None]:
            del self.present[i][number]

    def held(self, i: int) -> tuple[int, int]:
        """Requests and tokens of an instance: those that decode, and those that are being loaded."""
        node = self.nodes[i]
        loading = [served.job.prompt for _, _, served in node.coming]
        return node.requests + len(loading), node.tokens + sum(loading)

    def arrive(self, number: int, job: Job) -> None:
        """The checks on arrival, then prefill."""
        node, offer = everywhere(self.pool, job)
        ready = offer[1] + job.prompt * KV_BYTES / NETWORK + job.prompt * KV_BYTES / TO_GPU
        if (ready - job.at) / self.limits.ttft >= self.limits.on_arrival:
            self.result.append(Served(job, refused="prefill"))
            return
        if self.policy != "baseline" and self.mean_load(job, ready) >= self.limits.on_arrival:
            self.result.append(Served(job, refused="decode"))
            return
        served = self.pool.take(job, node, offer)
        self.result.append(served)
        chosen = min(range(len(self.nodes)), key=self.promised)
        self.coming[chosen][number] = (ready, served)
        heapq.heappush(self.checks, (ready - job.prompt * KV_BYTES / TO_GPU, number, chosen))

    def promised(self, i: int) -> float:
        """How long a step of an instance takes with all that are on their way to it."""
        requests, tokens = self.held(i)
        coming = self.coming[i].values()
        return self.machine.decode(requests + len(coming), tokens + sum(s.job.prompt for _, s in coming))

    def mean_load(self, job: Job, then: float) -> float:
        """The load of the mean decode instance with the whole request, now or then."""
        if self.policy == "early":
            held = [self.held(i) for i in range(len(self.nodes))]
        else:
            held = []
            for present, coming in zip(self.present, self.coming, strict=True):
                there = [
                    served.job.prompt
                    for starts, served in (*present.values(), *coming.values())
                    if starts <= then < starts + self.decode_seconds
                ]
                held.append((len(there), sum(there)))
        requests = sum(n for n, _ in held) / len(held) + 1
        tokens = sum(n for _, n in held) / len(held) + job.prompt
        return self.machine.decode(requests, tokens) / self.limits.tbt

    def second_checks(self, until: float) -> None:
        """The instance itself looks again once the KVCache is there."""
        while self.checks and self.checks[0][0] <= until:
            now, number, i = heapq.heappop(self.checks)
            self.look_at(i, now)
            ready, served = self.coming[i].pop(number)
            requests, tokens = self.held(i)
            step = self.machine.decode(requests + 1, tokens + served.job.prompt)
            if step / self.limits.tbt >= self.limits.after_prefill:
                served.refused = "decode, after prefill"
                continue
            self.nodes[i].add(ready, served)
            self.present[i][number] = (ready, served)


def length_biased_mean(jobs: Sequence[Job]) -> float:
    """The mean answer among the requests that decode at a moment: long answers are there more often."""
    return sum(job.answer**2 for job in jobs) / sum(job.answer for job in jobs)
