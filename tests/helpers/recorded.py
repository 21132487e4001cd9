"""What a coordinator was told and what it asked, in either runtime, and a model that follows such a recording."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from modelled import Runtime

from mooncake_lab import cluster as c
from mooncake_lab.cluster import events as e
from mooncake_lab.core import CacheChanged, DecodeStretch


class Step(NamedTuple):
    """One call of `Coordinator.on`."""

    event: c.Event
    now_s: float
    commands: tuple[c.Command, ...]


@contextmanager
def recording() -> Iterator[dict[c.Coordinator, list[Step]]]:
    """The steps of each coordinator that is told anything meanwhile, in either runtime."""
    steps: dict[c.Coordinator, list[Step]] = {}
    on = c.Coordinator.on

    def record(self, event, now_s):
        commands = on(self, event, now_s)
        steps.setdefault(self, []).append(Step(event, now_s, tuple(commands)))
        return commands

    c.Coordinator.on = record
    try:
        yield steps
    finally:
        c.Coordinator.on = on


def decisions(steps):
    """Placements and refusals, in order."""
    found = []
    for _, _, commands in steps:
        for command in commands:
            if isinstance(command, e.RunPrefill):
                where = command.placement
                reuse = (where.reused_tokens, where.fetched_tokens, where.fetch_from)
                found.append((command.attempt, where.prefill, where.decode, *reuse))
            elif isinstance(command, e.Reject):
                found.append((command.request_id, command.stage))
    return found


def orders(steps):
    """What each instance computed, in order: prompts with their reused tokens, and requests that began to decode.

    Two instances report one prompt: a decode instance repeats what it heard with the KVCache.
    """
    decodes_at, found = {}, defaultdict(dict)
    for event, _, commands in steps:
        for command in commands:
            if isinstance(command, e.RunPrefill):
                decodes_at[command.attempt] = command.placement.decode
        if isinstance(event, e.PrefillDone | e.ChunkDone):
            found[event.instance, "computes"][event.attempt, event.computed_tokens, event.reused_tokens] = None
        elif isinstance(event, e.DecodeStarted):
            found[decodes_at[event.attempt], "decodes"][event.attempt] = None
    return {where: list(done) for where, done in found.items()}


class Follower(Runtime):
    """Tells a fresh coordinator what another one was told, and keeps the model by which its laws are checked.

    Args:
        spec: of the cluster.
        rules: of the coordinator.
        estimate: what it believes about time.
        extend: see `Coordinator`.
    """

    def __init__(self, spec, rules, estimate, extend):
        super().__init__(spec, rules)
        self.names, self.estimate = [], estimate
        self.coordinator = c.Coordinator(
            spec, estimate, rules, write=self.log.append, extend=extend, observe=self.seen.append
        )
        self._actions = {
            e.RequestArrived: self._arrived,
            e.PrefixFetched: self._fetched,
            e.PrefillStarted: self._started,
            e.PrefillDropped: self._dropped,
            e.PrefillDone: self._prefilled,
            e.ChunkDone: self._chunk,
            e.KVArrived: self._kv_arrived,
            e.KVLoaded: self._loaded,
            e.DecodeStarted: self._decodes,
            DecodeStretch: self._stepped,
            e.InstanceUp: self._came_up,
            e.InstanceDown: self._went_down,
            CacheChanged: self._cached,
        }

    def follow(self, steps):
        """Repeat a recording: the commands are the same where it has them, and the laws hold after each moment."""
        ends = [step[0].at_s for step in steps[1:]]
        for (event, now_s, *asked), next_s in zip(steps, [*ends, None], strict=True):
            self.now = now_s
            note = self._actions.get(type(event))
            if note is not None:
                note(event)
            commands = tuple(self.report(event))
            assert [commands] == (asked or [commands])
            if event.at_s != next_s:  # else the iteration that it is about is told only in part
                self.check()
                for name in self.up:
                    assert self.coordinator.instances.cached(name) == self.held[name]

    def _arrived(self, event):
        self.original[event.request.id] = event.request

    def _job(self, event):
        """The job of an attempt that is still the current one, or None."""
        state = self.coordinator.requests.get(event.attempt.request_id)
        current = state is not None and state.placement is not None and state.attempt == event.attempt
        return self.jobs[event.attempt] if current else None

    def _fetched(self, event):
        job = self.jobs[event.attempt]
        job.fetched = True
        if event.source not in job.sources:  # two instances report it
            job.sources.add(event.source)
            self.moved[event.attempt.request_id, event.source, event.instance] += event.bytes > 0

    def _started(self, event):
        job = self.prompts[event.instance].get(event.attempt)
        if job is None or job.started:
            return
        job.started = True
        _, until_s = self.latest.get(event.instance, (None, 0.0))
        self.latest[event.instance] = (
            job.attempt,
            max(event.at_s, until_s) + self.estimated_s(job),
        )

    def _dropped(self, event):
        self.prompts[event.instance].pop(event.attempt, None)
        self._free(event)

    def _free(self, event):
        if self.latest.get(event.instance, (None,))[0] == event.attempt:
            del self.latest[event.instance]

    def _prefilled(self, event):
        job = self.prompts[event.instance].pop(event.attempt, None)
        if job is not None:
            job.prefilled = True
            self.prefilled[event.attempt.request_id] += 1
            self._free(event)

    def _chunk(self, event):
        self.jobs[event.attempt].cached = event.context_tokens
        self.prefilled[event.attempt.request_id] += 1

    def _kv_arrived(self, event):
        job = self._job(event)
        if job is not None:
            self.moved[event.attempt.request_id, job.placement.prefill, job.placement.decode] += not job.arrived
            job.arrived = job.arrived or event.is_last

    def _loaded(self, event):
        job = self._job(event)
        if job is not None:
            job.loaded = True

    def _decodes(self, event):
        job = self._job(event)
        if job is not None:
            job.loaded = job.decoding = True
            self.prompts[job.placement.decode].pop(event.attempt, None)

    def _stepped(self, event):
        for request_id, job in self.live().items():
            if request_id in event.request_ids and job.placement.decode == event.instance and job.decoding:
                self.steps[job.attempt] += event.steps
                if job.cached >= job.command.request.input_tokens:  # else its prompt was computed in this step
                    job.cached += event.steps

    def _came_up(self, event):
        self.up[event.instance] = event.role
        if event.instance not in self.names:
            self.names.append(event.instance)
        self.prompts.pop(event.instance, None)
        self.latest.pop(event.instance, None)
        self.begin_count(event.instance)
        self.held[event.instance] = set()

    def _went_down(self, event):
        del self.up[event.instance]

    def _cached(self, event):
        self.held[event.instance] |= set(event.added)
        self.held[event.instance] -= set(event.removed)
