"""The cluster in virtual time: requests arrive, the Conductor decides, instances act, the log remembers."""

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import simpy

from mooncake_lab.conductor import (
    ClusterView,
    Estimator,
    Experience,
    LatencyEstimator,
    Placement,
)
from mooncake_lab.core import Moved, Record, Request, TracedRequest
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.decode import DecodeInstance
from mooncake_lab.simulation.frontdoor import FrontDoor
from mooncake_lab.simulation.handover import Handover
from mooncake_lab.simulation.journeys import Journeys
from mooncake_lab.simulation.network import Network
from mooncake_lab.simulation.notice_board import NoticeBoard
from mooncake_lab.simulation.pool import PrefixPool
from mooncake_lab.simulation.prefill import Job, PrefillInstance
from mooncake_lab.simulation.spec import ClusterSpec, Failure


class Cluster:
    """Prefill and decode pools under one Conductor, simulated with one latency model as its clock.

    Args:
        spec: nodes and policies.
        model: how long everything really takes.
        estimate: what the Conductor believes; the truth unless an experiment says otherwise.
    """

    def __init__(self, spec: ClusterSpec, model: LatencyModel, estimate: Estimator | None = None) -> None:
        self.log: list[Record] = []
        self._spec = spec
        self._model = model
        self.estimate = estimate or LatencyEstimator(model)
        self._env = simpy.Environment()
        self._journeys = Journeys()
        self._experience = Experience()
        self._network = Network(self._env, model.transfer.bytes_per_s, model.transfer.latency_s)
        names = [f"prefill-{i}" for i in range(spec.prefill_nodes)]
        self.pool = PrefixPool(
            names,
            capacity_tokens=spec.cache_tokens,
            bytes_per_token=model.shape.kv_bytes_per_token,
            block_size_tokens=spec.block_size_tokens,
            eviction=spec.eviction,
            shared=spec.shared_cache,
        )
        self._decode = {
            name: DecodeInstance(self._env, name, model, spec.decode_tokens, self._write, self._resume)
            for name in (f"decode-{i}" for i in range(spec.decode_nodes))
        }
        self._door = FrontDoor(
            env=self._env,
            placement=spec.placement,
            admission=spec.admission,
            estimate=self.estimate,
            slo=spec.slo,
            schedule_s=model.schedule_s,
            view=self.view,
            place=self._place,
            log=self._write,
        )
        self._handover = Handover(
            self._env,
            model,
            self._network,
            self._journeys,
            self._decode,
            first_shown_by=spec.first_shown_by,
            double_check=self._door.double_check,
            log=self._write,
        )
        self._prefill = {name: self._prefill_instance(name) for name in names}
        for failure in spec.failures:
            self._plan_death(failure)
        self._board = NoticeBoard(self._env, spec.view_age_s, self._look, names)

    def run(self, requests: Iterable[TracedRequest], until_s: float | None = None) -> list[Record]:
        """Serve requests in order of arrival until all are done, or until the horizon; the run's log."""
        self._door.serve(requests)
        self._env.run(until=until_s)
        return self.log

    def watch(self, every_s: float, look: Callable[[float], None]) -> None:
        """Look at the cluster every so many seconds from now on; such a run needs a horizon."""
        self._env.process(self._watching(every_s, look))

    def _watching(self, every_s: float, look: Callable[[float], None]) -> Generator[simpy.Event, Any, None]:
        while True:
            look(self._env.now)
            yield self._env.timeout(every_s)

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about this request; looking changes nothing in the cluster."""
        return self._board.view(self.pool.matches(request))

    def _look(self, matched_blocks: Sequence[int]) -> ClusterView:
        flows_from = self._network.flows_from
        prefill = [
            instance.view(matched, flows_from(name))
            for (name, instance), matched in zip(self._prefill.items(), matched_blocks, strict=True)
            if instance.alive
        ]
        decode = [instance.view() for instance in self._decode.values() if instance.alive]
        learned = self._experience
        return ClusterView(
            self._env.now, tuple(prefill), tuple(decode), learned.lengths, learned.recent(self._env.now)
        )

    def _write(self, record: Record) -> None:
        self.log.append(record)
        self._experience.note(record)

    def _prefill_instance(self, name: str) -> PrefillInstance:
        return PrefillInstance(
            self._env,
            name,
            self._model,
            self.pool,
            log=self.log.append,
            started=self._handover.stream,
            computed=self._handover.hand_over,
            wanted=lambda job: self._journeys.is_current(job.traced, job.placement),
        )

    def _place(self, traced: TracedRequest, placement: Placement) -> None:
        request = traced.request
        self._journeys.begin(traced, placement)
        self._decode[placement.decode].promise(traced, self._env.now + placement.expected_ttft_s)
        believed_s = self.estimate.prefill_s(request.id, request.input_tokens, placement.reused_tokens)
        fetched = self._fetch(request, placement) if placement.fetch_from else None
        self._prefill[placement.prefill].submit(Job(traced, placement, believed_s, fetched))

    def _fetch(self, request: Request, placement: Placement) -> simpy.Event:
        """Copy prefix blocks from their holder; they stay, which is how hot blocks spread (FAST'25 §4.2)."""
        source = str(placement.fetch_from)
        size = placement.fetched_tokens * self._model.shape.kv_bytes_per_token
        done = self._network.transfer(source, placement.prefill, size)
        start_s = self._env.now

        def arrived(_: simpy.Event) -> None:
            if not (self._prefill[source].alive and self._prefill[placement.prefill].alive):
                return  # the bytes died with their sender, or with who was to keep them
            blocks = -(-placement.reused_tokens // request.block_size_tokens)
            self.pool.keep(placement.prefill, request, blocks)
            self._moved(request, source, placement.prefill, start_s, size)

        done.callbacks.append(arrived)
        return done

    def _moved(self, request: Request, source: str, destination: str, start_s: float, size: int) -> None:
        self.log.append(
            Moved(
                at_s=self._env.now,
                request_id=request.id,
                source=source,
                destination=destination,
                start_s=start_s,
                bytes=size,
            )
        )

    def _plan_death(self, failure: Failure) -> None:
        """Let an instance die.

        Raises:
            ValueError: when there is no instance of that name.
        """
        if failure.instance not in self._prefill and failure.instance not in self._decode:
            known = ", ".join([*self._prefill, *self._decode])
            raise ValueError(f"no instance {failure.instance!r} to die at {failure.at_s} s; there are {known}")

        def die(_: simpy.Event) -> None:
            self._die(failure.instance)

        self._env.timeout(failure.at_s).callbacks.append(die)

    def _die(self, name: str) -> None:
        """An instance is gone: whoever was on the way through it is placed again, in order of id."""
        if not (self._prefill.get(name) or self._decode[name]).alive:
            return  # dead already
        self._board.clear()
        if name in self._prefill:
            self._prefill[name].die()
            self.pool.drop(name)
        else:
            self._decode[name].die()
        for traced, placement in self._journeys.interrupt(name):
            if self._decode[placement.decode].alive:
                self._decode[placement.decode].break_promise(traced)
            self._door.decide(traced, f"placed again after {name} died: ")

    def _resume(self, traced: TracedRequest, shown_tokens: int) -> None:
        """A request whose decode instance died: its prompt and the tokens it has shown are prefilled anew."""
        longer = self._journeys.longer(traced, shown_tokens)
        self._door.decide(longer, "placed again after its decode instance died: ")
