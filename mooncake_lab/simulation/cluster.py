"""A cluster in virtual time: requests arrive, the coordinator decides, and an executor carries out its commands.

The coordinator (`mooncake_lab.cluster`) follows each request and keeps the log, as in the live cluster. What the
commands do is in `mooncake_lab.simulation.executors`.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf

import simpy

from mooncake_lab.cluster import ClusterSpec, Coordinator, CoordinatorRules, Event, PrefillPool, carry_out, events
from mooncake_lab.conductor import ClusterView, Decided, Estimator, LatencyEstimator
from mooncake_lab.core import Record, Request, RunEnded, TracedRequest
from mooncake_lab.perf import CppGroup, LatencyModel
from mooncake_lab.simulation.clock import EventLoop
from mooncake_lab.simulation.executors import CoupledExecutor, DisaggregatedExecutor
from mooncake_lab.simulation.options import SimulationOptions


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
        self._on = self.coordinator.on
        self._until_s: float | None = None
        self.executor.come_up()
        for failure in options.failures:
            if failure.instance not in spec.roles:
                known = ", ".join(spec.roles)
                raise ValueError(
                    f"no instance {failure.instance!r} to fail at {failure.at_s} s; there are {known}"
                )
            self._loop.call_later(failure.at_s - self._loop.now_s, self.executor.fail, failure.instance)

    def run(self, requests: Iterable[TracedRequest], until_s: float | None = None) -> list[Record]:
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

    def start(self, requests: Iterable[TracedRequest], until_s: float | None = None) -> None:
        """Let requests arrive, in order of arrival; whoever owns the environment lets time pass.

        Args:
            requests: what is served.
            until_s: the horizon, if there is one: `env.run(until_s)` and `close` belong to it.
        """
        self._until_s = until_s
        for instance in self.executor.decoding:
            instance.horizon_s = inf if until_s is None else until_s
        self._arrive(iter(requests))

    def close(self) -> None:
        """End the log at the horizon, whose last decode steps are in it.

        Raises:
            ValueError: when the cluster was started without a horizon, or it is not the present.
        """
        if self._until_s is None or self._until_s != self._loop.now_s:
            raise ValueError(
                f"a run until {self._until_s} is closed at {self._loop.now_s} s; close it at its horizon"
            )
        shown = dict[int, int]()
        for instance in self.executor.decoding:
            shown |= instance.tokens_shown()
        self.report(RunEnded(at_s=self._until_s, tokens=shown))

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about this request; looking changes nothing in the cluster."""
        return self.coordinator.view(request, self._loop.now_s)

    def report(self, event: Event) -> None:
        """Tell the coordinator what happened, and let the executor carry out what it asks."""
        commands = self._on(event, event.at_s)
        if commands:  # most events need nothing
            for command in commands:
                carry_out(command, self.executor)

    def _arrive(self, requests: Iterator[TracedRequest], traced: TracedRequest | None = None) -> None:
        """A request arrives, and those that come at the same moment; then the next one is awaited."""
        traced = traced or next(requests, None)
        while traced is not None:
            request = traced.request
            wait_s = request.arrival_s - self._loop.now_s
            if wait_s > 0:
                self._loop.call_later(wait_s, self._arrive, requests, traced)
                return
            self.executor.requests[request.id] = traced
            self.report(events.RequestArrived(at_s=self._loop.now_s, request=request))
            traced = next(requests, None)
