"""The cluster in virtual time: requests arrive, the Conductor decides, instances act, the log remembers."""

from collections.abc import Callable, Iterable, Sequence
from math import inf

import simpy

from mooncake_lab.conductor import (
    ClusterView,
    Estimator,
    Experience,
    GroupEstimator,
    LatencyEstimator,
    Placement,
)
from mooncake_lab.core import BlockKey, CacheChanged, Record, Request, RunEnded, TracedRequest
from mooncake_lab.perf import CppGroup, LatencyModel
from mooncake_lab.simulation.decode import DecodeInstance
from mooncake_lab.simulation.fetching import Fetcher
from mooncake_lab.simulation.frontdoor import FrontDoor
from mooncake_lab.simulation.handover import Handover
from mooncake_lab.simulation.journeys import Journeys
from mooncake_lab.simulation.network import Network
from mooncake_lab.simulation.notice_board import NoticeBoard
from mooncake_lab.simulation.pool import PrefixPool
from mooncake_lab.simulation.prefill import Job, PrefillInstance
from mooncake_lab.simulation.service import PrefillService
from mooncake_lab.simulation.spec import ClusterSpec, plan_deaths


class Cluster:
    """Prefill and decode pools under one Conductor, simulated with one latency model as its clock.

    Args:
        spec: nodes and policies.
        model: how long everything really takes.
        estimate: what the Conductor believes; the truth unless an experiment says otherwise.
        log: where records go instead of into a list, so that a run of any length needs no memory for them.
        seen: told each view that a decision is made on, so that decisions can be replayed.

    Raises:
        ValueError: when nodes have SSDs that the model does not know, or somebody unknown is to die.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        model: LatencyModel,
        estimate: Estimator | None = None,
        *,
        log: Callable[[Record], None] | None = None,
        seen: Callable[[Request, ClusterView], None] | None = None,
    ) -> None:
        if spec.ssd_tokens and model.ssd is None:
            raise ValueError(
                f"nodes hold {spec.ssd_tokens} tokens on SSD; latency model {model.name!r} has no ssd"
            )
        self.log: list[Record] = []
        self._keep = log or self.log.append
        self._seen = seen
        self._spec = spec
        self._model = model
        group = None
        if spec.prefill_group > 1:
            group = CppGroup.of(model, nodes=spec.prefill_group, chunk_tokens=spec.prefill_chunk_tokens)
        self._service = PrefillService(model, group)
        self.estimate = estimate or (GroupEstimator(model, group) if group else LatencyEstimator(model))
        self._env = simpy.Environment()
        self._journeys = Journeys()
        self._experience = Experience()
        names = [f"prefill-{i}" for i in range(spec.prefill_nodes // spec.prefill_group)]
        cards = dict.fromkeys(names, spec.prefill_group)
        self._network = Network(self._env, model.transfer.bytes_per_s, model.transfer.latency_s, cards=cards)
        self.pool = PrefixPool(
            names,
            capacity_tokens=spec.cache_tokens * spec.prefill_group,
            ssd_tokens=spec.ssd_tokens * spec.prefill_group,
            bytes_per_token=model.shape.kv_bytes_per_token,
            block_size_tokens=spec.block_size_tokens,
            eviction=spec.eviction,
            shared=spec.shared_cache,
            changed=self._cache_changed,
        )
        self._decode = {
            name: DecodeInstance(self._env, name, model, spec.decode_tokens, self._write, self._resume)
            for name in (f"decode-{i}" for i in range(spec.decode_nodes))
        }
        self._door = self._front_door()
        self._handover = Handover(
            self._env,
            model,
            self._network,
            self._journeys,
            self._decode,
            first_shown_by=spec.first_shown_by,
            streams_layers=spec.streams_layers,
            double_check=self._door.double_check,
            log=self._write,
        )
        self._fetcher = self._make_fetcher()
        self._prefill = {name: self._prefill_instance(name) for name in names}
        plan_deaths(self._env, spec.failures, (*self._prefill, *self._decode), self._die)
        self._board = NoticeBoard(self._env, spec.view_age_s, self._look, names)

    def _front_door(self) -> FrontDoor:
        return FrontDoor(
            env=self._env,
            placement=self._spec.placement,
            admission=self._spec.admission,
            estimate=self.estimate,
            slo=self._spec.slo,
            schedule_s=self._model.schedule_s,
            view=self._view_to_decide,
            place=self._place,
            log=self._write,
        )

    def run(self, requests: Iterable[TracedRequest], until_s: float | None = None) -> list[Record]:
        """Serve requests in order of arrival until all are done, or until the horizon.

        With a horizon the log has what happened before it, every decode step that ended before it included, and
        ends with `RunEnded`.

        Returns:
            The run's log; empty where it went elsewhere.
        """
        for instance in self._decode.values():
            instance.horizon_s = inf if until_s is None else until_s
        self._door.serve(requests)
        self._env.run(until=until_s)
        if until_s is not None:
            shown = self._journeys.tokens_shown()
            for instance in self._decode.values():
                shown |= instance.tokens_shown()
            self._write(RunEnded(at_s=until_s, tokens=shown))
        return self.log

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about this request; looking changes nothing in the cluster."""
        view = self._board.view(self.pool.matches(request))
        if not self._spec.ssd_tokens:
            return view
        below = self.pool.on_ssd
        return view._replace(
            prefill=tuple(
                p._replace(matched_on_ssd=below(p.name, request, p.matched_blocks)) for p in view.prefill
            )
        )

    def _view_to_decide(self, request: Request) -> ClusterView:
        view = self.view(request)
        if self._seen is not None:
            self._seen(request, view)
        return view

    def _look(self, matched_blocks: Sequence[int]) -> ClusterView:
        flows_from, now_s = self._network.flows_from, self._env.now
        prefill = [
            instance.view(matched, flows_from(name), now_s)
            for (name, instance), matched in zip(self._prefill.items(), matched_blocks, strict=True)
            if instance.alive
        ]
        decode = [instance.view() for instance in self._decode.values() if instance.alive]
        learned = self._experience
        return ClusterView(now_s, tuple(prefill), tuple(decode), learned.lengths, learned.recent(now_s))

    def _write(self, record: Record) -> None:
        self._keep(record)
        self._experience.note(record)

    def _cache_changed(self, node: str, came: Sequence[BlockKey], left: Sequence[BlockKey]) -> None:
        self._keep(CacheChanged(at_s=self._env.now, instance=node, added=tuple(came), removed=tuple(left)))

    def _prefill_instance(self, name: str) -> PrefillInstance:
        return PrefillInstance(
            self._env,
            name,
            self._service,
            self.pool,
            log=self._keep,
            started=self._handover.stream,
            rose=self._fetcher.rose,
            computed=self._handover.hand_over,
            wanted=lambda job: self._journeys.is_current(job.traced.request.id, job.placement),
            overtaking=self._spec.overtaking,
        )

    def _make_fetcher(self) -> Fetcher:
        return Fetcher(
            self._env,
            self._model,
            self._network,
            self.pool,
            self._journeys,
            alive=lambda name: self._prefill[name].alive,
            log=self._keep,
        )

    def _place(self, traced: TracedRequest, placement: Placement) -> None:
        request = traced.request
        self._journeys.begin(traced, placement)
        self._decode[placement.decode].promise(traced, self._env.now + placement.expected_ttft_s)
        believed_s = self.estimate.prefill_s(request.id, request.input_tokens, placement.reused_tokens)
        fetched = self._fetcher.fetch(request, placement) if placement.fetch_from else None
        self._prefill[placement.prefill].submit(Job(traced, placement, believed_s, fetched))

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
        self._network.cancel(name)
        self._fetcher.cancel(name)
        for traced, placement in self._journeys.interrupt(name):
            if self._decode[placement.decode].alive:
                self._decode[placement.decode].break_promise(traced)
            self._door.decide(traced, f"placed again after {name} died: ", again=True)

    def _resume(self, traced: TracedRequest, shown_tokens: int) -> None:
        """A request whose decode instance died: its prompt and the tokens it has shown are prefilled anew."""
        longer = self._journeys.longer(traced, shown_tokens)
        self._door.decide(longer, "placed again after its decode instance died: ", again=True)
