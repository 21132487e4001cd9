"""A cluster of coupled instances in virtual time: what Mooncake is compared with."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Final

import simpy

from mooncake_lab.batching import (
    VLLM,
    BatchingPolicy,
    Limits,
    Orca,
    RequestLevel,
    Sarathi,
    SarathiServe,
    SplitFuse,
    TensorRTLLM,
    VLLMChunked,
)
from mooncake_lab.conductor import (
    AdmissionPolicy,
    AdmitAll,
    ClusterView,
    Estimator,
    FewestRequests,
    History,
    LatencyEstimator,
    Placement,
    PlacementPolicy,
    check_needs,
)
from mooncake_lab.core import SLO, Record, Request, RunEnded, TracedRequest
from mooncake_lab.perf import LatencyModel
from mooncake_lab.simulation.cluster import extend
from mooncake_lab.simulation.coupled import CoupledInstance
from mooncake_lab.simulation.device_cache import DeviceCache
from mooncake_lab.simulation.frontdoor import FrontDoor
from mooncake_lab.simulation.notice_board import NoticeBoard
from mooncake_lab.simulation.spec import Failure, plan_deaths, refuse_age

DEFAULT_MAX_TOKENS: Final = 2000
"""What a client that states no max_tokens is taken to allow (assumption B52)."""

COUPLED_SYSTEMS: Final[Mapping[str, tuple[BatchingPolicy, bool]]] = MappingProxyType(
    {
        "vllm": (VLLM(), False),
        "vllm_prefix": (VLLM(), True),
        "vllm_chunked": (VLLMChunked(chunk_tokens=512), False),
        "request_level": (RequestLevel(), False),
        "orca": (Orca(), False),
        "splitfuse": (SplitFuse(chunk_tokens=512), False),
        "tensorrt_llm": (TensorRTLLM(), False),
        "tensorrt_llm_max_utilization": (TensorRTLLM(capacity="max_utilization"), False),
        "sarathi": (Sarathi(chunk_tokens=512), False),
        "sarathi_serve": (SarathiServe(chunk_tokens=512), False),
    }
)
"""Coupled systems by the names of the command line: batching policy, and whether prefixes are cached.

FAST'25 §5.1 compares with the first three, testing the two features separately; 512 tokens an iteration is what
vLLM of that time took for chunked prefill. Those that never preempt (request_level, orca, sarathi, tensorrt_llm)
reserve prompt and max_tokens of each request.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledSpec:
    """A cluster whose every instance prefills and decodes, one instance a node (FAST'25 §5.1).

    Raises:
        ValueError: when a count is not positive, views would be of the future, a trace's block is not a whole
            number of memory blocks, or a policy needs what coupled instances do not give.
    """

    nodes: int = 16
    batching: BatchingPolicy = field(default_factory=VLLM)
    prefix_caching: bool = False
    """Keep computed prompts in free GPU memory (vLLM's automatic prefix caching)."""
    eviction: str = "lru"
    device_tokens: int = 1_330_000
    """KVCache that fits into a node's GPU memory."""
    max_batch_tokens: int = 200_000
    """Tokens an iteration computes at most; what chunked prefill cuts prompts to is its policy's knob."""
    max_requests: int = 256
    max_request_tokens: int = 200_000
    """The window; the longest requests of the synthetic trace fit."""
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    """What a request that states no max_tokens is taken to allow, or the smallest doubling of it that its recorded
    answer fits into. Policies that reserve for the worst case reserve prompt and max_tokens."""
    memory_block_tokens: int = 16
    block_size_tokens: int = 512
    """Of the trace: what can be shared."""
    view_age_s: float = 0.0
    """How old the loads may be on which the Conductor decides (`NoticeBoard`); 0 is always the present."""
    placement: PlacementPolicy = field(default_factory=FewestRequests)
    """The strongest router that knows nothing of prompts (assumption B39)."""
    failures: tuple[Failure, ...] = ()
    admission: AdmissionPolicy = field(default_factory=AdmitAll)
    slo: SLO = field(default_factory=SLO)

    def __post_init__(self) -> None:
        for name in ("nodes", "device_tokens", "memory_block_tokens", "block_size_tokens", "default_max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"CoupledSpec.{name} is {getattr(self, name)!r}; at least 1 is needed")
        refuse_age(self.view_age_s, "CoupledSpec")
        if self.block_size_tokens % self.memory_block_tokens:
            raise ValueError(
                f"CoupledSpec.block_size_tokens is {self.block_size_tokens}, no multiple of memory blocks"
                f" of {self.memory_block_tokens} tokens"
            )
        gives = {"decode_requests", "lengths", "coupled_instances", "priority"}
        if self.prefix_caching:
            gives.add("local_prefixes")
        check_needs("CoupledSpec", gives, placement=self.placement, admission=self.admission)


class CoupledCluster:
    """Coupled instances under one Conductor; the same public face as `Cluster`, and the same log.

    Args:
        spec: nodes and policies.
        model: how long everything really takes.
        estimate: what the Conductor believes; the truth unless an experiment says otherwise.
        log: where records go instead of into a list.
        seen: told each view that a decision is made on.

    Raises:
        ValueError: when somebody unknown is to die.
    """

    def __init__(
        self,
        spec: CoupledSpec,
        model: LatencyModel,
        estimate: Estimator | None = None,
        *,
        log: Callable[[Record], None] | None = None,
        seen: Callable[[Request, ClusterView], None] | None = None,
    ) -> None:
        self.log: list[Record] = []
        self._keep = log or self.log.append
        self._spec = spec
        self._experience = History()
        self._seen = seen
        self.estimate = estimate or LatencyEstimator(model)
        self._env = simpy.Environment()
        self.instances = {
            name: CoupledInstance(
                self._env,
                name,
                model,
                spec.batching,
                _limits(spec),
                _device_cache(spec),
                self._write,
                self._resume,
            )
            for name in (f"coupled-{i}" for i in range(spec.nodes))
        }
        self._board = NoticeBoard(self._env, spec.view_age_s, self._look, list(self.instances))
        self._door = FrontDoor(
            env=self._env,
            placement=spec.placement,
            admission=spec.admission,
            estimate=self.estimate,
            slo=spec.slo,
            schedule_s=model.schedule_s,
            view=self._view_to_decide,
            place=self._place,
            log=self._write,
        )
        self._resumed: dict[
            int, tuple[TracedRequest, int]
        ] = {}  # placed again: as it was, and tokens its user has
        plan_deaths(self._env, spec.failures, self.instances, self._die)

    def run(self, requests: Iterable[TracedRequest], until_s: float | None = None) -> list[Record]:
        """Serve requests in order of arrival until all are done, or until the horizon; see `Cluster.run`.

        Returns:
            The run's log; empty where it went elsewhere.
        """
        for instance in self.instances.values():
            instance.horizon_s = inf if until_s is None else until_s
        self._door.serve(requests)
        self._env.run(until=until_s)
        if until_s is not None:
            shown = dict[int, int]()
            for instance in self.instances.values():
                shown |= instance.tokens_shown()
            self._keep(RunEnded(at_s=until_s, tokens=shown))
        return self.log

    def view(self, request: Request) -> ClusterView:
        """What the Conductor may know about this request; every instance is in both pools."""
        return self._board.view([instance.matched_blocks(request) for instance in self.instances.values()])

    def _view_to_decide(self, request: Request) -> ClusterView:
        view = self.view(request)
        if self._seen is not None:
            self._seen(request, view)
        return view

    def _look(self, matched_blocks: Sequence[int]) -> ClusterView:
        views = [
            instance.view(matched)
            for instance, matched in zip(self.instances.values(), matched_blocks, strict=True)
            if instance.alive
        ]
        prefill, decode = tuple(view for view, _ in views), tuple(view for _, view in views)
        return ClusterView(self._env.now, prefill, decode, self._experience.lengths)

    def _write(self, record: Record) -> None:
        self._keep(record)
        self._experience.note(record)

    def _place(self, traced: TracedRequest, placement: Placement) -> None:
        """Queue a request.

        Raises:
            ValueError: when the placement fetches: coupled instances have no store to fetch from.
        """
        if placement.fetch_from is not None:
            raise ValueError(
                f"request {placement.request_id} should fetch from {placement.fetch_from}; coupled instances"
                " do not share their caches, use a placement policy that does not fetch"
            )
        request = traced.request
        estimated_s = self.estimate.prefill_s(request.id, request.input_tokens, placement.reused_tokens)
        original, shown = self._resumed.pop(request.id, (traced, 0))
        self.instances[placement.prefill].submit(
            original,
            estimated_s=estimated_s,
            starts_s=self._env.now + placement.expected_ttft_s,
            max_tokens=self._max_tokens(original),
            shown_tokens=shown,
        )

    def _max_tokens(self, traced: TracedRequest) -> int:
        """The most tokens of its answer; a default leaves room for the prompt, as servers' defaults do."""
        most = traced.max_tokens_or(self._spec.default_max_tokens)
        if traced.request.max_tokens is None:
            longest = min(self._spec.max_request_tokens, self._spec.device_tokens)
            most = max(1, min(most, longest - traced.request.input_tokens + 1))
        return most

    def _die(self, name: str) -> None:
        """An instance is gone; whoever was there says so himself (`_resume`)."""
        if self.instances[name].alive:
            self._board.clear()
            self.instances[name].die()

    def _resume(self, traced: TracedRequest, shown_tokens: int) -> None:
        """A request whose instance died is placed again; the tokens its user has are part of its prompt now."""
        request = traced.request
        longer = replace(traced, request=extend(request, shown_tokens))
        self._resumed[request.id] = traced, shown_tokens
        self._door.decide(longer, "placed again after its instance died: ", again=True)
        self._resumed.pop(request.id, None)  # still there where it was refused


def _limits(spec: CoupledSpec) -> Limits:
    blocks = spec.device_tokens // spec.memory_block_tokens
    return Limits(
        max_batch_tokens=spec.max_batch_tokens,
        max_requests=spec.max_requests,
        block_size_tokens=spec.memory_block_tokens,
        capacity_blocks=blocks,
        free_blocks=blocks,
        max_request_tokens=spec.max_request_tokens,
    )


def _device_cache(spec: CoupledSpec) -> DeviceCache | None:
    if not spec.prefix_caching:
        return None
    capacity = spec.device_tokens // spec.memory_block_tokens * spec.memory_block_tokens
    return DeviceCache(capacity, block_size_tokens=spec.block_size_tokens, eviction=spec.eviction)
