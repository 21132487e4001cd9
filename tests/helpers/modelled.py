"""A runtime that does what a test says, in any order, and checks the coordinator against a model of its own."""

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import flat
import pytest

from mooncake_lab import cluster as c
from mooncake_lab.cluster import events as e
from mooncake_lab.conductor import AdmitAll, Rejection, decide
from mooncake_lab.core import (
    Arrived,
    DecodeStretch,
    Finished,
    FirstToken,
    Moved,
    Placed,
    Prefilled,
    Rejected,
    Request,
)


class Estimate:
    """A second for each 1,000 tokens to compute, a tenth of that to transfer."""

    fetches_by_layer = False

    def prefill_s(self, request_id, input_tokens, reused_tokens):
        """Of the tokens that are not reused."""
        del request_id
        return (input_tokens - reused_tokens) / 1000

    def transfer_s(self, tokens, flows):
        """Shared with the flows under way."""
        return tokens * (flows + 1) / 10_000

    def beside_load_s(self, compute_s, load_s):
        """Layer by layer, of which there are four."""
        return max(compute_s, load_s) + min(compute_s, load_s) / 4

    def decode_step_s(self, requests, context_tokens):
        """Grows with the batch."""
        return 0.01 * requests + 1e-6 * context_tokens


@dataclass(frozen=True)
class RefusesSome:
    """Refuses each third request when its KVCache has arrived."""

    def admit(self, request, proposed, view, *, estimate, slo):
        """All are admitted on arrival."""
        del request, view, estimate, slo
        return proposed

    def double_check(self, request, decode, *, estimate, slo):
        """Not each third."""
        del estimate, slo
        assert request.id in {served.request_id for served in decode.coming}
        return Rejection(request_id=request.id, stage="decode", reason="third") if request.id % 3 == 2 else None


def extend(request, tokens):
    """Longer by so many tokens, with keys of its own; no token is left after 30."""
    if request.input_tokens + tokens > 2030:
        return None
    grown = request.input_tokens + tokens
    keys = range(len(request.block_keys), -(-grown // 512))
    own = tuple(request.id * 100 + k for k in keys)
    return replace(request, input_tokens=grown, block_keys=(*request.block_keys, *own))


@dataclass
class Job:
    """An attempt as the instances know it."""

    command: e.RunPrefill
    fetched: bool = True
    read: bool = False
    started: bool = False
    prefilled: bool = False
    sources: set[str] = field(default_factory=set)
    arrived: bool = False
    start: e.StartDecode | None = None
    loaded: bool = False
    decoding: bool = False
    cached: int = 0  # of a coupled instance: tokens that it has computed and kept
    showed_first: bool = False  # whether a coupled instance showed its very first token
    cancelled: set = field(default_factory=set)

    @property
    def attempt(self):
        """Whose it is."""
        return self.command.attempt

    @property
    def placement(self):
        """Where it is."""
        return self.command.placement


class Runtime:
    """Carries out commands at once, and makes events of them when the test says so."""

    def __init__(self, spec, rules):
        self.actions = {
            e.SetTimer: self.set_timer,
            e.PrepareDecode: self.prepare_decode,
            e.RunPrefill: self.run_prefill,
            e.StartDecode: self.start_decode,
            e.CancelAttempt: self.cancel_attempt,
            e.ConfirmInstances: self.confirm_instances,
            e.Reject: self.ended_so,
            e.Finish: self.ended_so,
        }
        self.now, self.spec, self.rules, self.estimate = 0.0, spec, rules, Estimate()
        self.log, self.seen, self.events, self.ended = [], [], [], Counter()
        self.coordinator = c.Coordinator(
            spec, self.estimate, rules, write=self.log.append, extend=extend, observe=self.seen.append
        )
        self.up, self.timers, self.jobs, self.prompts = {}, [], {}, defaultdict(dict)
        self.steps, self.asked, self.held, self.original = {}, [], defaultdict(set), {}
        self.prefilled, self.moved, self.tokens = Counter(), Counter(), Counter()
        self.latest, self.assigned, self.stepped_s = {}, Counter(), {}

    def tell(self, kind, **what):
        """Report an event, and carry out the commands."""
        event = kind(at_s=self.now, **what)
        self.events.append(event)
        return self.report(event)

    def report(self, event):
        """Carry out what an event leads to."""
        commands = self.coordinator.on(event, self.now)
        for command in commands:
            self.actions[type(command)](command)
        return commands

    # commands

    def set_timer(self, command):
        self.timers.append(command.request_id)

    def prepare_decode(self, command):
        assert self.up[command.instance] in {"decode", "coupled"}

    def run_prefill(self, command):
        placement, request = command.placement, command.request
        assert self.up[placement.prefill] in {"prefill", "coupled"}
        job = self.jobs[command.attempt] = Job(command, fetched=placement.fetch_from is None)
        self.prompts[placement.prefill][command.attempt] = job
        self.steps[command.attempt] = 0
        self.assigned[placement.prefill] += 1
        shown = self.shown(request.id)
        grown = request.input_tokens - self.original[request.id].input_tokens
        assert grown in ({shown} if shown != 1 else {0, 1})

    def start_decode(self, command):
        job = self.jobs[command.attempt]
        assert job.start is None
        job.start = command
        shown = self.shown(command.attempt.request_id)
        in_prompt = job.command.request.input_tokens - self.original[command.attempt.request_id].input_tokens
        assert command.shown_tokens == shown
        assert in_prompt + 1 == shown + command.shows_computed  # the next token is the one after those shown
        assert command.instance == job.placement.decode

    def cancel_attempt(self, command):
        job = self.jobs[command.attempt]
        assert command.instance in {job.placement.prefill, job.placement.decode}
        assert command.instance in self.up
        job.cancelled.add(command.instance)

    def confirm_instances(self, command):
        assert set(command.instances) <= self.up.keys()
        self.asked += command.instances

    def ended_so(self, command):
        self.ended[command.request_id] += 1

    # what the log says

    def shown(self, request_id):
        """Tokens that a client has, by the log."""
        tokens = 0
        for record in self.log:
            if isinstance(record, FirstToken) and record.request_id == request_id:
                assert not tokens
                tokens = 1
            elif isinstance(record, DecodeStretch) and request_id in record.request_ids:
                assert tokens
                tokens += record.steps
        return tokens

    def live(self):
        """Jobs of current attempts, by request."""
        states = self.coordinator.requests.values()
        return {state.request.id: self.jobs[state.attempt] for state in states if state.placement is not None}

    # laws

    def begin_count(self, name):
        """An instance that comes up counts as assigned as many requests as the one of its role that has fewest."""
        same = [self.assigned[one] for one, role in self.up.items() if role == self.up[name] and one != name]
        self.assigned[name] = min(same, default=0)

    def check(self):
        """What is believed of each instance equals a recount, and the log keeps its laws."""
        live = self.live()
        for name, role in self.up.items():
            instance = self.coordinator.instances.by_name[name]
            assert instance.up
            prompts = self.prompts[name]
            assert instance.prefill.prompts.keys() == prompts.keys()
            view = instance.prefill.view(7, self.now)
            waiting = [job for job in prompts.values() if not job.started]
            queued_s = math.fsum(self.estimated_s(job) for job in waiting)
            latest, until_s = self.latest.get(name, (None, 0.0))
            running_s = max(0.0, until_s - self.now) if latest in prompts else 0.0
            assert view.backlog_s == pytest.approx(queued_s + running_s, abs=1e-12)
            assert (view.name, view.queued_requests, view.matched_blocks) == (name, len(prompts), 7)
            assert view.assigned_requests == self.assigned[name]
            here = {i: job for i, job in live.items() if job.placement.decode == name}
            contexts = {i: job.command.request.input_tokens + self.steps[job.attempt] for i, job in here.items()}
            assert {i: instance.decode.tokens_of(i) for i in instance.decode.contexts} == contexts
            if role == "coupled":
                contexts = {i: max(job.command.request.input_tokens, job.cached) for i, job in here.items()}
            seen = instance.decode.view()
            assert (seen.name, seen.requests, seen.context_tokens) == (name, len(here), sum(contexts.values()))
            present = {i for i, job in here.items() if job.arrived or job.loaded}
            assert {one.request_id for one in seen.coming} == here.keys() - present
            assert {one.request_id for one in seen.decoding} == present
            assert instance.decode.started == {i for i, job in here.items() if job.decoding}
            assert role != "decode" or not prompts
        self.check_views()
        for request_id, state in self.coordinator.requests.items():
            assert request_id == state.request.id
            assert not self.ended[request_id]

    def check_views(self):
        """What the Conductor sees is of now, and has the leading blocks that each instance holds of a prompt."""
        instances = self.coordinator.instances
        caches = {name for name, role in self.up.items() if role != "decode"}
        assert set(instances.index.instances) == caches
        for name in caches:
            assert instances.cached(name) == self.held[name]
        made = request(-1, 2048, family=len(self.events) % 3)
        matched = {name: self.matched(name, made) for name in caches}
        assert {name: instances.matched_blocks(name, made) for name in caches} == matched
        up = [instances.by_name[name] for name in self.names if name in self.up]
        view = self.coordinator.view(made, self.now)
        assert view.taken_at_s == self.now
        assert view.decode == tuple(one.decode.view() for one in up if one.role != "prefill")
        assert view.prefill == tuple(
            one.prefill.view(matched[one.name], self.now) for one in up if one.role != "decode"
        )

    def matched(self, name, made):
        """Leading blocks of a prompt in the cache of an instance; a coupled one computes the last token."""
        most = (made.input_tokens - (self.up[name] == "coupled")) // made.block_size_tokens
        return sum(1 for _ in itertools.takewhile(self.held[name].__contains__, made.block_keys[:most]))

    def estimated_s(self, job):
        """How long its prefill was expected to take: where layers come one by one, beside its fetch."""
        request, placement = job.command.request, job.placement
        compute_s = self.estimate.prefill_s(request.id, request.input_tokens, placement.reused_tokens)
        if placement.fetch_from is None or not self.estimate.fetches_by_layer:
            return compute_s
        return self.estimate.beside_load_s(compute_s, self.estimate.transfer_s(placement.fetched_tokens, 0))

    def check_log(self):
        """One end for each arrival, times in order, decisions that replay, all tokens once."""
        arrived = Counter(r.request_id for r in self.log if isinstance(r, Arrived))
        ends = Counter(r.request_id for r in self.log if isinstance(r, Finished | Rejected))
        assert max(arrived.values(), default=1) == 1
        assert max(ends.values(), default=1) == 1
        assert ends == +self.ended
        assert arrived.keys() == ends.keys() | self.coordinator.requests.keys()
        times = [record.at_s for record in self.log]
        assert times == sorted(times)
        for record in self.log:
            if isinstance(record, Finished):
                assert record.output_tokens == self.shown(record.request_id)
        assert self.prefilled == Counter(r.request_id for r in self.log if isinstance(r, Prefilled))
        assert +self.moved == Counter(
            (r.request_id, r.source, r.destination) for r in self.log if isinstance(r, Moved)
        )
        self.check_decisions()

    def check_decisions(self):
        """Each Placed record is what the Conductor says about the view that was seen."""
        placed = [record for record in self.log if isinstance(record, Placed)]
        tries, number = Counter(), 0
        for one in self.seen:
            request = one.request
            assert one.is_first == (tries[request.id] == 0)
            decision = decide(
                request, one.view, placement=self.spec.placement, estimate=self.estimate, slo=self.spec.slo,
                admission=self.spec.admission if one.is_first else AdmitAll(),
            )  # fmt: skip
            assert decision == one.decision
            if isinstance(decision, Rejection):
                continue
            record, number = placed[number], number + 1
            tries[request.id] += 1
            assert (record.request_id, record.prefill_instance, record.decode_instance) == (
                request.id, decision.prefill, decision.decode,
            )  # fmt: skip
            assert record.reason.endswith(decision.reason)
            if not self.rules.wait_for_instances:
                assert (record.reason == decision.reason) == (tries[request.id] == 1)
        assert number == len(placed)


def make_runtime(instances=("prefill-0", "prefill-1", "decode-0", "decode-1"), **knobs):
    """A runtime of a spec and of rules, with the instances that are named."""
    rules = flat.options_of(c.CoordinatorRules, knobs)
    make = c.ClusterSpec.small_coupled if instances[0].startswith("coupled") else c.ClusterSpec.small
    runtime = Runtime(make(**knobs), rules)
    runtime.names = instances
    for name in instances:
        bring_up(runtime, name)
    return runtime


def bring_up(runtime, name):
    """An instance comes up, with an empty cache."""
    role = name.split("-")[0]
    runtime.up[name] = role
    runtime.prompts.pop(name, None)
    runtime.latest.pop(name, None)
    runtime.stepped_s[name] = runtime.now
    runtime.begin_count(name)
    runtime.held[name] = set()
    return runtime.tell(
        e.InstanceUp, instance=name, role=role, capacity_tokens=100_000, cache=None if role == "decode" else name
    )


def request(i, input_tokens=2000, family=0, at_s=0.0):
    """Blocks of a family are shared."""
    keys = tuple(family * 10 + k for k in range(-(-input_tokens // 512)))
    return Request(id=i, arrival_s=at_s, input_tokens=input_tokens, block_keys=keys)
