"""The second simulator: clusters of prefill and decode nodes, and clusters of vLLM.

It is small because of what depends on what. Prefill queues depend on arrivals only, so a loop over the requests
computes them. A decode node is a list of the times at which its iterations end: a request that joins at iteration
i and has n tokens left reads its gaps from this list.
"""

import csv
import heapq
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from own_caches import Lru
from own_traces import BLOCK, Job

from mooncake_lab.book import paper


def printed(name: str) -> float:
    """A constant of the papers, or a fit to one of their figures."""
    return paper.constant(name).value


@dataclass(frozen=True)
class Machine:
    """How long a node takes; the fits to FAST'25 Figure 14 (see `data/paper/constants.csv`)."""

    start: float = printed("prefill_joint_c0")
    token: float = printed("prefill_joint_c1")
    token_squared: float = printed("prefill_joint_c2")
    token_loaded: float = printed("prefill_joint_c3")
    step: float = printed("decode_combined_base")
    step_request: float = printed("decode_combined_per_request")
    step_token: float = printed("decode_combined_slope")
    host: float = 0.0
    host_free: float = 1.5
    """Seconds that the host adds to a step for every request beyond so many free ones (B37)."""

    def prefill(self, prompt: int, cached: int = 0, *, loaded: bool = True) -> float:
        """A prompt, of which a prefix is cached; the prefix may have to be loaded into GPU memory first."""
        return self.start + self.work(prompt, cached) + (self.token_loaded * cached if loaded else 0.0)

    def work(self, prompt: int, cached: int = 0) -> float:
        """A prompt without what every iteration costs."""
        return self.token * (prompt - cached) + self.token_squared * (prompt**2 - cached**2)

    def decode(self, requests: float, tokens: float) -> float:
        """One token for each of so many requests, which hold so many tokens."""
        host = self.host * max(0.0, requests - self.host_free)
        return self.step + self.step_request * requests + self.step_token * tokens + host


def slower(machine: Machine, prefill: float, decode: float, step: float) -> Machine:
    """The node of the arXiv edition: prefill and the growth of a decode step are slower by these factors."""
    return replace(
        machine,
        start=machine.start * prefill,
        token=machine.token * prefill,
        token_squared=machine.token_squared * prefill,
        step=step,
        step_request=machine.step_request * decode,
        step_token=machine.step_token * decode,
    )


def with_host() -> Machine:
    """The node with the host that the book fits to Mooncake's own curves (B37): a setting, read from a file."""
    with (paper.data_dir().parent / "measured" / "host_fit.csv").open(encoding="utf-8", newline="") as file:
        best = min(csv.DictReader(file), key=lambda row: float(row["error"]))
    return Machine(host=float(best["host_s"]), host_free=float(best["host_free"]))


def arxiv_node() -> Machine:
    """The node that the book fits to arXiv Figures 8 and 13: a setting, read where it is recorded."""
    record = paper.data_dir().parent / "measured" / "arxiv_testbed.json"
    found = json.loads(record.read_text(encoding="utf-8"))["optimum"]
    return slower(Machine(), found["prefill"], found["decode"], found["constant_s"])


KV_BYTES = printed("kv_bytes_per_token")
NETWORK = printed("transfer_bandwidth_fig14") * 1e9
"""Bytes per second from node to node."""
TO_GPU = printed("load_bandwidth_fig14") * 1e9
"""Bytes per second from host memory to GPU memory."""
NODE_TOKENS = printed("local_cache_tokens")
GPU_TOKENS = printed("vllm_node_kv_tokens")
BALANCE = 1.5
"""B01: a prefix is fetched if another node has more than 1.5 times as much of it."""


@dataclass
class Served:
    """What became of a request."""

    job: Job
    prefill_start: float = 0.0
    prefill_end: float = 0.0
    cached: int = 0
    first: float = math.nan
    """When its first token was there."""
    gaps: "np.ndarray | None" = None
    refused: str = ""
    """Where it was refused, if it was."""

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first - self.job.at

    @property
    def tbt(self) -> float:
        """The mean of the longest tenth of the gaps; NaN for an answer of one token, which has none (B17)."""
        if self.gaps is None or not len(self.gaps):
            return math.nan
        longest = math.ceil(len(self.gaps) / 10)
        return float(np.partition(self.gaps, -longest)[-longest:].mean())


def within(served: Sequence[Served], tbt: float) -> float:
    """Percent of the requests with gaps whose TBT is within a limit in seconds."""
    measured = [s.tbt for s in served if not math.isnan(s.tbt)]
    return 100 * sum(each <= tbt for each in measured) / len(measured)


def effective(served: Sequence[Served], tbt: float, ttft: float = 30.0) -> float:
    """Percent of all requests within both limits; an answer of one token has to meet the first one only."""
    return 100 * sum(s.ttft <= ttft and not s.tbt > tbt for s in served) / len(served)


# --- prefill nodes: one queue each, in order of arrival ---


class PrefillPool:
    """Prefill nodes with a cache each, and the queue of each as the moment at which it is empty.

    Blocks are in a node's cache once their prompt is in its queue, because a later prompt of the same node is
    computed later. Other nodes can fetch them once they are computed.
    """

    def __init__(self, nodes: int, machine: Machine, room: float = NODE_TOKENS, network: float = NETWORK) -> None:
        self.machine = machine
        self.network = network
        self.free = [0.0] * nodes
        self.caches = [Lru(room) for _ in range(nodes)]
        self.computed: list[dict[int, float]] = [{} for _ in range(nodes)]
        """For each node: when a block was computed or fetched there last."""

    def offers(self, job: Job, *, fetch: bool) -> list[tuple[float, float, int]]:
        """For each node: the start, the end, and the cached tokens, if the request went there (Algorithm 1)."""
        found = [cache.match(job.blocks) for cache in self.caches]
        best = max(map(self.fetchable, [job] * len(found), range(len(found)), found)) if fetch else 0
        offers: list[tuple[float, float, int]] = []
        for here, free in zip(found, self.free, strict=True):
            moved = best - here if best > BALANCE * here else 0
            start = max(job.at + moved * BLOCK * KV_BYTES / self.network, free)
            cached = min((here + moved) * BLOCK, job.prompt - 1)
            offers.append((start, start + self.machine.prefill(job.prompt, cached), cached))
        return offers

    def fetchable(self, job: Job, node: int, found: int) -> int:
        """How many of the blocks that match in a node's cache are computed already."""
        computed = self.computed[node]
        return next((i for i in range(found) if computed[job.blocks[i]] > job.at), found)

    def take(self, job: Job, node: int, offer: tuple[float, float, int]) -> Served:
        """Put the request into the queue of a node."""
        start, end, cached = offer
        self.free[node] = end
        held = self.caches[node].sizes
        new = [block for block in job.blocks if block not in held]
        self.caches[node].use(job)
        self.computed[node].update(dict.fromkeys(new, end))
        return Served(job, prefill_start=start, prefill_end=end, cached=cached)


Placement = Callable[[PrefillPool, Job], tuple[int, tuple[float, float, int]]]
"""Chooses a node for a request, and says what the request gets there."""


def cache_aware(pool: PrefillPool, job: Job, *, fetch: bool) -> tuple[int, tuple[float, float, int]]:
    """The node with the earliest end, counting what it has cached, or could fetch."""
    offers = pool.offers(job, fetch=fetch)
    node = min(range(len(offers)), key=lambda i: offers[i][1])
    return node, offers[node]


def everywhere(pool: PrefillPool, job: Job) -> tuple[int, tuple[float, float, int]]:
    """KVCache-centric: prefixes of other nodes count as well."""
    return cache_aware(pool, job, fetch=True)


def own_cache(pool: PrefillPool, job: Job) -> tuple[int, tuple[float, float, int]]:
    """Cache-aware: a node sees its own cache."""
    return cache_aware(pool, job, fetch=False)


def least_queued(pool: PrefillPool, job: Job) -> tuple[int, tuple[float, float, int]]:
    """Load balancing: the node with the fewest seconds in its queue (B04)."""
    node = min(range(len(pool.free)), key=lambda i: max(pool.free[i] - job.at, 0.0))
    return node, pool.offers(job, fetch=False)[node]


def at_random(seed: int = 0) -> Placement:
    """Any node."""
    draw = random.Random(seed)

    def place(pool: PrefillPool, job: Job) -> tuple[int, tuple[float, float, int]]:
        node = draw.randrange(len(pool.free))
        return node, pool.offers(job, fetch=False)[node]

    return place


def longest_prefix(pool: PrefillPool, job: Job) -> tuple[int, tuple[float, float, int]]:
    """The node with the most of the prompt, whatever its queue (B13); the first of equals."""
    found = [cache.match(job.blocks) for cache in pool.caches]
    node = found.index(max(found))
    return node, pool.offers(job, fetch=False)[node]


def prefilled(jobs: Sequence[Job], pool: PrefillPool, place: Placement) -> list[Served]:
    """Every request through the prefill nodes."""
    return [pool.take(job, *place(pool, job)) for job in jobs]


def mean_wait_streamed(jobs: Sequence[Job], nodes: int, network: float) -> float:
    """Mean seconds until the KVCache of a prompt is on its decode node, at so many bytes per second.

    A node sends one prompt at a time, from the moment at which its prefill begins.
    """
    pool = PrefillPool(nodes, Machine(), network=network)
    sent = [0.0] * nodes
    waits: list[float] = []
    for job in jobs:
        node, offer = everywhere(pool, job)
        served = pool.take(job, node, offer)
        start = max(sent[node], served.prefill_start)
        sent[node] = max(start + job.prompt * KV_BYTES / network, served.prefill_end)
        waits.append(sent[node] + job.prompt * KV_BYTES / TO_GPU - job.at)
    return float(np.mean(waits))


# --- decode nodes ---


class DecodeNode:
    """Requests that decode together, and the end of each of their iterations."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clock = 0.0
        self.requests = 0
        self.tokens = 0
        self.ends: list[float] = []
        self.coming: list[tuple[float, int, Served]] = []
        self.leaving: dict[int, list[tuple[int, int, float, Served]]] = defaultdict(list)
        self.joined = 0

    def add(self, ready: float, served: Served) -> None:
        """A request whose KVCache is on the GPU at a moment that is not over yet."""
        self.joined += 1
        heapq.heappush(self.coming, (ready, self.joined, served))

    def advance(self, until: float) -> None:
        """Run all iterations that begin before this moment."""
        while self.clock < until:
            if not self.requests:
                if not self.coming or self.coming[0][0] >= until:
                    return
                self.clock = max(self.clock, self.coming[0][0])
            self.join()
            if self.requests:
                self.iterate()

    def join(self) -> None:
        """Requests that are ready join between two iterations: here their first token is there (B18)."""
        while self.coming and self.coming[0][0] <= self.clock:
            _, _, served = heapq.heappop(self.coming)
            served.first = self.clock
            left = served.job.answer - 1
            if not left:
                served.gaps = np.empty(0)
                continue
            self.requests += 1
            self.tokens += served.job.prompt
            i = len(self.ends)
            self.leaving[i + left].append((i, served.job.prompt + left, self.clock, served))

    def iterate(self) -> None:
        """One token for each request."""
        self.clock += self.machine.decode(self.requests, self.tokens)
        self.ends.append(self.clock)
        self.tokens += self.requests
        for i, tokens, start, served in self.leaving.pop(len(self.ends), ()):
            self.requests -= 1
            self.tokens -= tokens
            served.gaps = np.diff(np.array([start, *self.ends[i:]]))


def mooncake(
    jobs: Sequence[Job], prefill_nodes: int, decode_nodes: int, machine: Machine, place: Placement = everywhere
) -> list[Served]:
    """A disaggregated cluster that admits everything."""
    pool = PrefillPool(prefill_nodes, machine)
    nodes = [DecodeNode(machine) for _ in range(decode_nodes)]
    promised = [(0, 0)] * decode_nodes
    on_the_way: list[tuple[float, int, int]] = []
    result: list[Served] = []
    for job in jobs:
        served = pool.take(job, *place(pool, job))
        result.append(served)
        for node in nodes:
            node.advance(job.at)
        while on_the_way and on_the_way[0][0] <= job.at:
            _, node, prompt = heapq.heappop(on_the_way)
            promised[node] = (promised[node][0] - 1, promised[node][1] - prompt)
        ready = served.prefill_end + (job.prompt * KV_BYTES) / NETWORK + (job.prompt * KV_BYTES) / TO_GPU
        chosen = min(
            range(decode_nodes),
            key=lambda i: machine.decode(nodes[i].requests + promised[i][0], nodes[i].tokens + promised[i][1]),
        )
        nodes[chosen].add(ready, served)
        promised[chosen] = (promised[chosen][0] + 1, promised[chosen][1] + job.prompt)
        heapq.heappush(on_the_way, (ready, chosen, job.prompt))
    for node in nodes:
        node.advance(math.inf)
    return result


# --- vLLM ---


@dataclass
class Vllm:
    """One instance of vLLM 0.5.1: prompts first, all that wait in one iteration, and decodes otherwise (B16)."""

    machine: Machine
    caching: bool = False
    """Whether blocks of earlier prompts stay in free GPU memory."""
    clock: float = 0.0
    requests: int = 0
    """Waiting or decoding."""
    decoding: int = 0
    tokens: int = 0
    """Held by requests that decode."""
    prefill_seconds: float = 0.0
    waiting: list[Served] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    leaving: dict[int, list[tuple[int, int, float, Served]]] = field(default_factory=lambda: defaultdict(list))
    cache: Lru = field(default_factory=lambda: Lru(GPU_TOKENS))

    def add(self, job: Job) -> Served:
        """A request arrives; the instance has been advanced to this moment."""
        served = Served(job)
        if not self.requests:
            self.clock = max(self.clock, job.at)
        self.requests += 1
        self.waiting.append(served)
        return served

    def advance(self, until: float) -> None:
        """Run all iterations that begin before this moment."""
        while self.requests and self.clock < until:
            if self.waiting:
                self.prompts()
            else:
                self.decodes()

    def prompts(self) -> None:
        """Prefill what waits, up to the window of 200,000 tokens, and as GPU memory allows."""
        batch: list[Served] = []
        size = 0
        while self.waiting and (not batch or size + self.waiting[0].job.prompt <= 200_000):
            size += self.waiting[0].job.prompt
            batch.append(self.waiting.pop(0))
        if self.tokens + size > GPU_TOKENS:
            raise OverflowError("GPU memory is full; this simulator does not model preemption")
        for served in batch:
            if self.caching:
                self.cache.room = GPU_TOKENS - self.tokens - size
                served.cached = min(self.cache.use(served.job) * BLOCK, served.job.prompt - 1)
        seconds = self.machine.start + sum(self.machine.work(s.job.prompt, s.cached) for s in batch)
        self.prefill_seconds += seconds
        self.clock += seconds
        for served in batch:
            served.prefill_start, served.prefill_end = self.clock - seconds / len(batch), self.clock
            self.begin(served)

    def begin(self, served: Served) -> None:
        """The first token is there; the others follow in the next iterations."""
        served.first = self.clock
        left = served.job.answer - 1
        if not left:
            self.requests -= 1
            served.gaps = np.empty(0)
            return
        self.decoding += 1
        self.tokens += served.job.prompt
        i = len(self.ends)
        self.leaving[i + left].append((i, served.job.prompt + left, self.clock, served))

    def decodes(self) -> None:
        """One token for each request that decodes."""
        self.clock += self.machine.decode(self.decoding, self.tokens)
        self.ends.append(self.clock)
        self.tokens += self.decoding
        for i, tokens, start, served in self.leaving.pop(len(self.ends), ()):
            self.requests -= 1
            self.decoding -= 1
            self.tokens -= tokens
            served.gaps = np.diff(np.array([start, *self.ends[i:]]))


def vllm(jobs: Sequence[Job], machine: Machine, *, caching: bool = False, nodes: int = 16) -> list[Served]:
    """A cluster of vLLM; a request goes to the instance with the fewest requests (B39)."""
    cluster = [Vllm(machine, caching) for _ in range(nodes)]
    result: list[Served] = []
    for job in jobs:
        for each in cluster:
            each.advance(job.at)
        result.append(min(cluster, key=lambda each: each.requests).add(job))
    for each in cluster:
        each.advance(math.inf)
    return result
