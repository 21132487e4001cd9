"""The whole cluster, slow and obvious: one agenda, every token a moment of its own, every byte moved at each.

It shares with the package what decides (`decide`, the policies, how a `LengthHistogram` counts) and how long
things take (`LatencyModel`, which is also what is believed); queues, caches, the network, batches and views are
its own. It knows neither stretches nor timers that are replaced. Nodes are single ones with DRAM under LRU, blocks
have 512 tokens, views are of the present, and nobody dies.
"""

import heapq
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from mooncake_lab.conductor import (
    ClusterView,
    DecodeView,
    LatencyEstimator,
    LengthHistogram,
    PrefillView,
    RecentView,
    Rejection,
    ServedView,
    decide,
)
from mooncake_lab.core import (
    Arrived,
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
    Rejected,
    TracedRequest,
    blocks_for,
)


@dataclass(eq=False)
class Flow:
    source: str
    destination: str
    left: float
    pace: float
    arrived: object
    rate: float = 0.0


@dataclass(eq=False)
class Job:
    traced: TracedRequest
    placement: object
    believed_s: float
    fetches: list = field(default_factory=list)  # those under way that it waits for
    stream: Flow | None = None
    computed_s: float = 0.0

    @property
    def ready(self):
        return not self.fetches


@dataclass(eq=False)
class Prefill:
    name: str
    capacity_blocks: int
    held: list = field(default_factory=list)  # block keys, the longest unused first
    fetching: dict = field(default_factory=dict)  # by block on its way, the jobs that wait for it
    queue: list = field(default_factory=list)
    running: Job | None = None
    until_s: float = 0.0
    assigned: int = 0

    @property
    def queued_s(self):
        return math.fsum(job.believed_s for job in self.queue)

    def matched(self, keys):
        return sum(1 for _ in itertools.takewhile(lambda key: key in self.held, keys))

    def keep(self, keys):
        for key in keys:
            if key in self.held:
                self.held.remove(key)
            elif len(self.held) == self.capacity_blocks:
                self.held.pop(0)
            self.held.append(key)


@dataclass(eq=False)
class Member:
    traced: TracedRequest
    cached: int
    produced: int


@dataclass(eq=False)
class Decode:
    name: str
    members: list = field(default_factory=list)
    waiting: list = field(default_factory=list)
    coming: dict = field(default_factory=dict)
    loading: dict = field(default_factory=dict)
    present: dict = field(default_factory=dict)
    batch_tokens: int = 0  # as of the last change of the batch
    busy: bool = False
    link_free_s: float = 0.0  # into GPU memory
    held_back: bool = False  # somebody had to stay outside

    @property
    def context(self):
        return sum(member.cached for member in self.members)


class Reference:
    def __init__(self, spec, model):
        self.spec, self.model, self.estimate = spec, model, LatencyEstimator(model)
        self.bytes = model.shape.kv_bytes_per_token
        self.prefill_pool, self.decode_pool = spec.pools
        blocks = self.prefill_pool.cache_tokens // spec.block_size_tokens
        self.prefill = {f"prefill-{i}": Prefill(f"prefill-{i}", blocks) for i in range(self.prefill_pool.nodes)}
        self.decode = {f"decode-{i}": Decode(f"decode-{i}") for i in range(self.decode_pool.nodes)}
        self.now, self.order, self.agenda, self.flows = 0.0, itertools.count(), [], []
        self.log, self.lengths, self.tokens = [], LengthHistogram(), defaultdict(list)

    def at(self, at_s, act, *what):
        heapq.heappush(self.agenda, (at_s, next(self.order), act, what))

    def note(self, record):
        self.log.append(record)

    def recent(self):
        """Who reached decode in the last minute: at the first token, or at the refusal where one came after."""
        refused = {r.request_id: r.at_s for r in self.log if isinstance(r, Rejected) and r.stage == "decode"}
        reached = {r.request_id: r.at_s for r in self.log if isinstance(r, FirstToken)} | refused
        late = {i for i, at_s in reached.items() if at_s > self.now - 60.0}
        return RecentView(60.0, len(late), len(late & refused.keys()))

    def move(self, request, source, destination, start_s, tokens):
        self.note(
            Moved(
                at_s=self.now,
                request_id=request.id,
                source=source,
                destination=destination,
                start_s=start_s,
                bytes=tokens * self.bytes,
            )
        )

    def run(self, requests):
        for traced in requests:
            self.at(traced.request.arrival_s, self.arrive, traced)
        while self.agenda or self.flows:
            ends = [self.now + flow.left / flow.rate for flow in self.flows if flow.pace == math.inf]
            then = min([*ends, *(entry[0] for entry in self.agenda[:1])])
            for flow in self.flows:
                flow.left -= flow.rate * (then - self.now)
            self.now = then
            through = [flow for flow in self.flows if flow.pace == math.inf and flow.left <= flow.rate * 1e-9]
            for flow in through:
                self.flows.remove(flow)
                self.at(then + self.model.transfer.latency_s, flow.arrived)
            while self.agenda and self.agenda[0][0] <= then:
                _, _, act, what = heapq.heappop(self.agenda)
                act(*what)
            self.share()
        return self

    def share(self):
        """All rates rise together; who has its pace, or a full card, rises no more."""
        capacity = self.model.transfer.bytes_per_s
        for flow in self.flows:
            flow.rate = 0.0
        rising = list(self.flows)

        def users(flow, end):
            return [other for other in self.flows if getattr(other, end) == getattr(flow, end)]

        def room(flow, end):
            return capacity - sum(other.rate for other in users(flow, end))

        while rising:
            step = min(flow.pace - flow.rate for flow in rising)
            for flow, end in itertools.product(rising, ("source", "destination")):
                step = min(step, room(flow, end) / sum(other in rising for other in users(flow, end)))
            for flow in rising:
                flow.rate += step
            rising = [
                flow
                for flow in rising
                if flow.rate < flow.pace * (1 - 1e-12)
                and min(room(flow, "source"), room(flow, "destination")) > capacity * 1e-12
            ]

    # the Conductor

    def arrive(self, traced):
        request = traced.request
        self.note(Arrived(at_s=self.now, request_id=request.id, input_tokens=request.input_tokens))
        self.at(self.now + self.model.schedule_s, self.place, traced)

    def view(self, request):
        prefill = tuple(
            PrefillView(
                node.name,
                node.queued_s + (max(0.0, node.until_s - self.now) if node.running else 0.0),
                len(node.queue) + (node.running is not None),
                node.assigned,
                node.matched(request.block_keys),
                sum(flow.source == node.name and flow.pace == math.inf for flow in self.flows),
            )
            for node in self.prefill.values()
        )
        decode = tuple(self.decode_view(node) for node in self.decode.values())
        return ClusterView(self.now, prefill, decode, self.lengths, self.recent())

    def decode_view(self, node):
        not_there = (*node.coming.values(), *node.loading.values())
        outside = sum(m.cached for m in node.waiting) + sum(seen.input_tokens for seen in not_there)
        requests = len(node.members) + len(node.waiting) + len(not_there)
        return DecodeView(
            node.name,
            requests,
            node.batch_tokens + outside,
            self.decode_pool.device_tokens,
            (*node.present.values(), *node.loading.values()),
            tuple(node.coming.values()),
        )

    def place(self, traced):
        request, spec = traced.request, self.spec
        decision = decide(
            request,
            self.view(request),
            placement=spec.placement,
            admission=spec.admission,
            estimate=self.estimate,
            slo=spec.slo,
        )
        if isinstance(decision, Rejection):
            self.refuse(request, decision.stage)
            return
        self.note(
            Placed(
                at_s=self.now,
                request_id=request.id,
                prefill_instance=decision.prefill,
                decode_instance=decision.decode,
                reused_tokens=decision.reused_tokens,
                fetched_tokens=decision.fetched_tokens,
            )
        )
        starts_s = self.now + decision.expected_ttft_s
        self.decode[decision.decode].coming[request.id] = ServedView(request.id, request.input_tokens, starts_s)
        node = self.prefill[decision.prefill]
        believed_s = self.model.prefill.seconds(request.input_tokens, decision.reused_tokens)
        job = Job(traced, decision, believed_s)
        node.queue.append(job)
        node.assigned += 1
        if decision.fetch_from:
            self.fetch(node, job)
        self.start(node)

    def fetch(self, node, job):
        """Copy what is neither there nor coming; the prompt waits for both, until the deadline."""
        request, decision, start_s = job.traced.request, job.placement, self.now
        first = (decision.reused_tokens - decision.fetched_tokens) // 512
        keys, tokens = (
            list(request.block_keys[first : blocks_for(decision.reused_tokens, 512)]),
            decision.fetched_tokens,
        )
        while keys and keys[0] in node.fetching:
            fetch = node.fetching[keys.pop(0)]
            fetch.add(job)
            job.fetches.append(fetch)
            tokens -= 512
        if not keys:
            return
        waiting = {job}
        job.fetches.append(waiting)
        node.fetching |= dict.fromkeys(keys, waiting)

        def ended(arrived):
            if all(node.fetching.get(key) is not waiting for key in keys):
                return
            node.fetching = {key: fetch for key, fetch in node.fetching.items() if fetch is not waiting}
            if arrived:
                self.move(request, decision.fetch_from, node.name, start_s, tokens)
                node.keep(keys)
            elif flow in self.flows:  # the rest is not sent
                self.flows.remove(flow)
            for each in waiting:
                each.fetches.remove(waiting)
            self.start(node)

        flow = Flow(decision.fetch_from, node.name, tokens * self.bytes, math.inf, lambda: ended(True))
        self.flows.append(flow)
        self.at(self.now + self.prefill_pool.fetch_timeout_s, ended, False)

    def refuse(self, request, stage):
        self.note(Rejected(at_s=self.now, request_id=request.id, stage=stage, reason=""))

    # prefill, and the way to decode

    def start(self, node):
        ready = [job for job in node.queue if job.ready]
        if node.running or not ready or not (self.prefill_pool.overtaking or node.queue[0].ready):
            return
        job = node.running = ready[0]
        request = job.traced.request
        node.queue.remove(job)
        node.until_s = self.now + job.believed_s
        matched = node.matched(request.block_keys)
        node.keep(request.block_keys[:matched])
        reused = min(matched * 512, request.input_tokens - 1)
        seconds = self.model.prefill.seconds(request.input_tokens, reused)
        if self.spec.streams_layers:
            made = request.input_tokens * self.bytes * (1 - 1 / self.model.shape.layers)
            job.stream = self.send(job, made / seconds)
        self.at(self.now + seconds, self.computed, node, job, self.now, reused)

    def send(self, job, pace):
        size = job.traced.request.input_tokens * self.bytes
        stream = Flow(job.placement.prefill, job.placement.decode, size, pace, lambda: self.arrived(job))
        self.flows.append(stream)
        return stream

    def computed(self, node, job, start_s, reused):
        request = job.traced.request
        node.keep(request.block_keys)
        self.note(
            Prefilled(
                at_s=self.now,
                request_id=request.id,
                instance=node.name,
                start_s=start_s,
                computed_tokens=request.input_tokens - reused,
                reused_tokens=reused,
            )
        )
        if self.spec.first_shown_by == "prefill":
            self.show(request)
        job.computed_s = self.now
        if job.stream:
            job.stream.pace = math.inf
        else:
            self.send(job, math.inf)
        node.running = None
        self.start(node)

    def show(self, request):
        self.note(FirstToken(at_s=self.now, request_id=request.id))
        self.tokens[request.id].append(self.now)

    def arrived(self, job):
        request, node = job.traced.request, self.decode[job.placement.decode]
        self.move(request, job.placement.prefill, node.name, job.computed_s, request.input_tokens)
        rejection = self.spec.admission.double_check(
            request, self.decode_view(node), estimate=self.estimate, slo=self.spec.slo
        )
        del node.coming[request.id]
        if rejection:
            self.refuse(request, rejection.stage)
        else:
            node.loading[request.id] = ServedView(request.id, request.input_tokens, self.now)
            node.link_free_s = max(self.now, node.link_free_s) + self.model.dram_load_s(request.input_tokens)
            self.at(node.link_free_s, self.join, node, job.traced)

    # decode

    def join(self, node, traced):
        request = traced.request
        del node.loading[request.id]
        node.present[request.id] = ServedView(request.id, request.input_tokens, self.now)
        node.waiting.append(Member(traced, request.input_tokens, len(self.tokens[request.id])))
        if not node.busy:
            node.busy = True
            self.at(self.now, self.boundary, node)

    def boundary(self, node, changed=False):
        """Between two steps: who may joins, who has no room goes, and the next step begins."""
        changed = changed or bool(node.waiting and not node.held_back)
        self.let_in(node)
        while node.members and node.context + len(node.members) > self.decode_pool.device_tokens:
            changed = True
            newest = node.members.pop()
            if node.members:
                node.waiting.insert(0, newest)
            else:  # it has all the memory, and outgrows it
                self.leave(node, newest)
                self.refuse(newest.traced.request, "capacity")
                self.let_in(node)
        node.held_back = bool(node.waiting)
        if changed:
            node.batch_tokens = node.context
        node.busy = bool(node.members)
        if node.busy:
            step_s = self.model.decode.step_s(len(node.members), node.context)
            self.at(self.now + step_s, self.step_ended, node)

    def let_in(self, node):
        while node.waiting:
            member = node.waiting[0]
            needs = node.context + len(node.members) + member.cached
            if node.members and needs >= self.decode_pool.device_tokens:
                return
            node.waiting.pop(0)
            if not member.produced:
                self.show(member.traced.request)
                member.produced = 1
            node.members.append(member)
            self.end(node, member)

    def step_ended(self, node):
        for member in node.members:
            member.cached += 1
            member.produced += 1
            self.tokens[member.traced.request.id].append(self.now)
        ended = [self.end(node, member) for member in list(node.members)]
        self.boundary(node, any(ended))

    def end(self, node, member):
        """Whether it has all its tokens; it is gone then."""
        if member.produced < member.traced.output_tokens:
            return False
        request_id, tokens = member.traced.request.id, member.traced.output_tokens
        node.members.remove(member)
        self.leave(node, member)
        self.lengths = self.lengths.with_answer(member.traced.request.input_tokens, tokens)
        self.note(Finished(at_s=self.now, request_id=request_id, output_tokens=tokens))
        return True

    def leave(self, node, member):
        del node.present[member.traced.request.id]


@pytest.fixture(scope="session")
def reference():
    """What runs a cluster token by token."""
    return lambda spec, model, requests: Reference(spec, model).run(requests)
