"""A cluster in virtual time: requests arrive, the coordinator decides, and an executor carries out its commands.

The coordinator (`mooncake_lab.cluster`) follows each request and keeps the log, as in the live cluster. What the
commands do is in `mooncake_lab.simulation.executors`.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import Final

import simpy

from mooncake_lab.cluster import (
    ClusterSpec,
    Coordinator,
    CoordinatorRules,
    Event,
    PrefillPool,
    carry_out,
    events,
)
from mooncake_lab.conductor import ClusterView, Decided, Estimator, LatencyEstimator
from mooncake_lab.core import Record, Request, RunEnded, TracedRequest
from mooncake_lab.perf import CppGroup, LatencyModel
from mooncake_lab.simulation.clock import EventLoop
from mooncake_lab.simulation.executors import CoupledExecutor, DisaggregatedExecutor
from mooncake_lab.simulation.options import SimulationOptions

_LONGEST_WAIT_S: Final = 600.0
"""No client that is refused is asked to wait longer, in the live cluster neither."""


class Cluster:
    """Instances under one coordinator, simulated with one latency model as its clock.

    It has `run`, `view`, `log` and `decisions`, as `serving.LiveCluster` does.

    Args:
        spec: nodes and policies.
        model: how long everything really takes.
        decode_model: how long everything takes on the decode nodes, where they are other machines.
        options: what only a simulation has, such as failures at set times.
        estimate: what the Conductor believes; the truth unless an experiment says otherwise.
        log: where records go instead of into a list, so that a run of any length needs no memory for them.
        env: a simpy environment of the caller's, whose processes share the cluster's time; see `start`.

    Raises:
        ValueError: when nodes have SSDs that the model does not know, decode nodes differ that are not there or
            run another model, or an unknown instance is to fail.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        model: LatencyModel,
        options: SimulationOptions | None = None,
        *,
        decode_model: LatencyModel | None = None,
        estimate: Estimator | None = None,
        log: Callable[[Record], None] | None = None,
        env: simpy.Environment | None = None,
    ) -> None:
        options = options or SimulationOptions()
        self.spec = spec
        self.log: list[Record] = []
        self.decisions: list[Decided] = []
        """What the Conductor decided, and on what view; only with `SimulationOptions.keep_decisions`."""
        self._loop = EventLoop(env)
        self.env = self._loop.env
        """The environment whose time is the cluster's, in seconds."""
        group, first = None, spec.pools[0]
        if isinstance(first, PrefillPool) and first.prefill_group > 1:
            group = CppGroup.of(model, nodes=first.prefill_group, chunk_tokens=first.chunk_tokens)
        self.estimate = estimate or LatencyEstimator(model, group, decode_model=decode_model)
        self.executor: DisaggregatedExecutor | CoupledExecutor
        """The instances, which carry out commands."""
        match spec.pools:
            case (prefill, decode):
                self.executor = DisaggregatedExecutor(
                    spec, prefill, decode, model=model, decode_model=decode_model or model, group=group,
                    loop=self._loop, report=self.report,
                )  # fmt: skip
            case (coupled,):
                if decode_model is not None:
                    raise ValueError(
                        f"decode nodes are {decode_model.name!r}; the cluster has none, and its nodes are alike"
                    )
                most = partial(options.max_tokens_of, coupled)
                self.executor = CoupledExecutor(
                    spec, coupled, most, model=model, loop=self._loop, report=self.report
                )
        self.coordinator = Coordinator(
            spec,
            self.estimate,
            CoordinatorRules(schedule_s=model.schedule_s, view_age_s=options.view_age_s),
            write=log or self.log.append,
            extend=self.executor.extend,
            observe=self.decisions.append if options.keep_decisions else None,
        )
        self.executor.retry_after_s = self._retry_after_s
        self._on = self.coordinator.on
        self._coming: Iterator[TracedRequest] = iter(())
        self._next: TracedRequest | None = None  # of those
        self._awaited: TracedRequest | None = None  # the one whose time of arrival is set
        self._submitted: list[TracedRequest] = []  # at this moment
        self.executor.come_up()
        for failure in options.failures:
            self._check_name(failure.instance, failure.at_s)
            self._loop.call_later(failure.at_s - self._loop.now_s, self.executor.fail, failure.instance)

    def run(self, requests: Iterable[TracedRequest] = (), until_s: float | None = None) -> list[Record]:
        """Serve requests in order of arrival until all are done, or until the horizon: `start`, time, `close`.

        With a horizon the log has what happened before it, every decode step that ended before it included, and
        ends with `RunEnded`.

        Returns:
            The run's log; empty where it went elsewhere.
        """
        self.start(requests, until_s)
        self._loop.run(inf if until_s is None else until_s)
        if until_s is not None:
            self.close()
        return self.log

    def start(self, requests: Iterable[TracedRequest] = (), until_s: float | None = None) -> None:
        """Let requests arrive, in order of arrival; the owner of the environment lets time pass.

        What arrives at a moment arrives after all else that happens then, such as failures.

        Args:
            requests: what is served, beside what `submit` brings.
            until_s: the horizon, where it is known: decode steps are then recorded before it, in order of time.
        """
        for instance in self.executor.decoding:
            instance.horizon_s = inf if until_s is None else until_s
        if self._next is None:
            self._coming = iter(requests)
        else:  # those of a run that was cut come, too
            left = ([self._next], self._coming, requests)
            self._coming = heapq.merge(*left, key=lambda traced: traced.request.arrival_s)
        self._next = next(self._coming, None)
        self._await_next()

    def submit(self, traced: TracedRequest) -> simpy.Event:
        """Let a client's request arrive now, after all else that happens now.

        Returns:
            An event whose value is a `RequestOutcome`, when the client has its answer or knows that none comes.

        Raises:
            ValueError: when a request with its id is in flight.
        """
        request = traced.request
        if request.id in self.executor.clients or request.id in self.executor.requests:
            raise ValueError(f"request {request.id} is in flight; a request needs an id of its own")
        if request.arrival_s != self._loop.now_s:
            traced = replace(traced, request=replace(request, arrival_s=self._loop.now_s))
        ended = self.executor.clients[request.id] = self.env.event()
        self._submitted.append(traced)
        if len(self._submitted) == 1:
            self._loop.call_last_at(self._loop.now_s, self._arrive)
        return ended

    def cancel(self, request_id: int, reason: str = "the client went away") -> None:
        """The client of a submitted request leaves, unless the request has ended.

        The step under way that computes a token of its answer ends first, as at a live instance.
        """
        if any(traced.request.id == request_id for traced in self._submitted):
            self._loop.call_last_at(self._loop.now_s, partial(self.cancel, request_id, reason))  # it arrives first
        elif request_id in self.executor.requests:
            self.executor.leave(request_id, reason)

    def fail(self, name: str) -> None:
        """Let an instance fail now; it loses all KVCache that it holds, and its requests are placed again.

        Raises:
            ValueError: when there is no such instance.
        """
        self._check_name(name, self._loop.now_s)
        self.executor.fail(name)

    def close(self, at_s: float | None = None) -> None:
        """End the log now: stretches of decode steps are cut behind their last step, and `RunEnded` is written.

        Requests in flight stay open in the log, and go on where time does.

        Args:
            at_s: the present, where the caller states it.

        Raises:
            ValueError: when it is not the present.
        """
        now_s = self._loop.now_s
        if at_s is not None and at_s != now_s:
            raise ValueError(f"a run cannot be closed at {at_s} s; it is at {now_s} s, let time pass until then")
        shown = dict[int, int]()
        for instance in self.executor.decoding:
            instance.cut()
            shown |= instance.tokens_shown()
        self.report(RunEnded(at_s=now_s, tokens=shown))

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about this request; looking changes nothing in the cluster."""
        return self.coordinator.view(request, self._loop.now_s)

    def report(self, event: Event) -> None:
        """Tell the coordinator what happened, and let the executor carry out what it asks."""
        commands = self._on(event, event.at_s)
        if commands:  # most events need nothing
            for command in commands:
                carry_out(command, self.executor)

    def _check_name(self, name: str, at_s: float) -> None:
        if name not in self.spec.roles:
            raise ValueError(f"no instance {name!r} to fail at {at_s} s; there are {', '.join(self.spec.roles)}")

    def _await_next(self) -> None:
        """Let the next request of those that come in order arrive at its time."""
        if self._next is not None and self._next is not self._awaited:
            self._awaited = self._next
            self._loop.call_last_at(self._next.request.arrival_s, self._arrive_next)

    def _arrive_next(self) -> None:
        self._awaited = None  # rounding may have left a moment until it arrives
        self._arrive()

    def _arrive(self) -> None:
        """All that arrives at this moment arrives."""
        now_s = self._loop.now_s
        while self._next is not None and self._next.request.arrival_s <= now_s:
            self._arrived(self._next)
            self._next = next(self._coming, None)
        self._await_next()
        submitted, self._submitted = self._submitted, []
        for traced in submitted:
            self._arrived(traced)

    def _arrived(self, traced: TracedRequest) -> None:
        self.executor.requests[traced.request.id] = traced
        self.report(events.RequestArrived(at_s=self._loop.now_s, request=traced.request))

    def _retry_after_s(self) -> int:
        """When a client that was refused may find a shorter queue: whole seconds, at least one."""
        now_s = self._loop.now_s
        instances = [
            instance.prefill.view(0, now_s)
            for instance in self.coordinator.instances.up
            if instance.role != "decode"
        ]
        backlog_s = min([view.backlog_s for view in instances], default=0.0)
        return math.ceil(min(_LONGEST_WAIT_S, max(1.0, backlog_s)))
