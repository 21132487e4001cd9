"""What a disaggregated cluster is made of, as plain values: nodes, memory, policies, and who dies when."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Final, Literal

import simpy

from mooncake_lab.conductor import NEEDS, AdmissionPolicy, AdmitAll, KVCacheCentric, PlacementPolicy, check_needs
from mooncake_lab.core import SLO

_POSITIVE: Final = (
    "prefill_nodes",
    "decode_nodes",
    "prefill_group",
    "prefill_chunk_tokens",
    "cache_tokens",
    "decode_tokens",
    "block_size_tokens",
)


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance dies, with all KVCache it holds. Nobody's request is lost: they are placed again.

    Raises:
        ValueError: when the time is negative or not finite.
    """

    instance: str
    at_s: float

    def __post_init__(self) -> None:
        if not (isfinite(self.at_s) and self.at_s >= 0):
            raise ValueError(f"{self.instance!r} should die at {self.at_s!r} s; allowed are finite times from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A disaggregated cluster and its policies.

    Raises:
        ValueError: when a count or a capacity is not positive, groups are not whole, views are of the future, or a
            policy needs what separate pools do not give.
    """

    prefill_nodes: int = 8
    decode_nodes: int = 8
    cache_tokens: int = 3_000_000
    """KVCache each prefill node holds in DRAM (FAST'25 §2.2: about 1 TB)."""
    ssd_tokens: int = 0
    """KVCache each prefill node holds on SSD besides; 0 where it has none."""
    prefill_group: int = 1
    """Prefill nodes that compute each prompt together by chunked pipeline parallelism (arXiv §5.1). A group is one
    instance: prompts follow one another through it. It has the memory and the network cards of all its nodes."""
    prefill_chunk_tokens: int = 4096
    """What a group cuts prompts to (assumption B14)."""
    decode_tokens: int = 1_330_000
    """KVCache that fits into a decode node's GPU memory."""
    shared_cache: bool = False
    """One Mooncake Store over all prefill nodes instead of a cache a node (FAST'25 §5.3)."""
    eviction: str = "lru"
    block_size_tokens: int = 512
    first_shown_by: Literal["decode", "prefill"] = "decode"
    """Who shows the first token to the user: the decode instance when the KVCache is there, so that TTFT includes
    transfer and load as in FAST'25 Fig. 14, or the prefill instance when it is computed."""
    streams_layers: bool = True
    """Whether each layer's KVCache leaves for the decode instance while the next is computed (arXiv §5.2); else
    all of it leaves when the prompt is computed."""
    overtaking: bool = False
    """Whether a prompt whose prefix is still on its way lets those behind it start; else all start in order."""
    placement: PlacementPolicy = field(default_factory=KVCacheCentric)
    failures: tuple[Failure, ...] = ()
    view_age_s: float = 0.0
    """How old the loads may be on which the Conductor decides (`NoticeBoard`); 0 is always the present."""
    admission: AdmissionPolicy = field(default_factory=AdmitAll)
    slo: SLO = field(default_factory=SLO)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"ClusterSpec.{name} is {getattr(self, name)!r}; at least 1 is needed")
        if self.ssd_tokens < 0:
            raise ValueError(f"ClusterSpec.ssd_tokens is {self.ssd_tokens!r}; at least 0 is needed")
        if self.prefill_nodes % self.prefill_group:
            raise ValueError(
                f"{self.prefill_nodes} prefill nodes are no whole number of groups of {self.prefill_group}"
            )
        refuse_age(self.view_age_s, "ClusterSpec")
        gives = NEEDS.keys() - {"coupled_instances"}
        check_needs("ClusterSpec", gives, placement=self.placement, admission=self.admission)


def refuse_age(view_age_s: float, owner: str) -> None:
    """Refuse an age of views that is none.

    Raises:
        ValueError: when it is negative or not finite.
    """
    if not (isfinite(view_age_s) and view_age_s >= 0):
        raise ValueError(f"{owner}.view_age_s is {view_age_s!r}; allowed are finite times from 0")


def plan_deaths(
    env: simpy.Environment, failures: Iterable[Failure], instances: Collection[str], die: Callable[[str], None]
) -> None:
    """Let instances die when they should.

    Raises:
        ValueError: when there is no instance of a name.
    """

    def now(name: str, _: simpy.Event) -> None:
        die(name)

    for failure in failures:
        if failure.instance not in instances:
            known = ", ".join(instances)
            raise ValueError(f"no instance {failure.instance!r} to die at {failure.at_s} s; there are {known}")
        env.timeout(failure.at_s).callbacks.append(partial(now, failure.instance))
