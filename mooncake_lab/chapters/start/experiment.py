"""One request followed through the live cluster, and then a burst: what the front chapter shows."""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import pandas as pd

from mooncake_lab.bench.machine import describe_machine
from mooncake_lab.chapters.start.life import latencies
from mooncake_lab.conductor import PlacementPolicy
from mooncake_lab.core import Placed, Record, Request, TracedRequest, blocks_for
from mooncake_lab.engine import CoupledEngine, EngineSettings, load_model
from mooncake_lab.metrics import check_log
from mooncake_lab.perf import LatencyModel
from mooncake_lab.serving import LiveCluster, LiveSpec, WorkerPool
from mooncake_lab.workload.prompts import prompt_of

SHARED_TOKENS: Final[Mapping[str, int]] = MappingProxyType(
    {"smoke": 128, "classroom": 256, "full": 256, "gpu": 256}
)
"""Tokens that all prompts of a scale begin with."""
_BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A small live cluster, one request that is followed through it, and a burst of others."""

    model: str = "random:lab-8m"
    shared_tokens: int = 256
    """Length of the system prompt that all requests begin with."""
    own_tokens: int = 256
    """Length of each request's own part of the prompt."""
    answer_tokens: int = 12
    chunk_tokens: int = 128
    burst: int = 6
    burst_every_s: float = 0.02
    seed: int = 0

    def spec(self, **changes: Any) -> LiveSpec:
        """The cluster: one prefill and one decode worker on this processor unless told otherwise."""
        asked: dict[str, Any] = {
            "model": self.model,
            "seed": self.seed,
            "device": "cpu",
            "backend": "dense",
            "block_size_tokens": _BLOCK_TOKENS,
            "chunk_tokens": self.chunk_tokens,
            "max_request_tokens": self.shared_tokens + self.own_tokens + 2 * self.answer_tokens,
            "log_layers": True,
            "spares": 0,
        }
        return LiveSpec(**(asked | changes))

    def request(self, number: int, arrival_s: float = 0.0) -> TracedRequest:
        """The system prompt, and tokens that no other number has."""
        tokens = self.shared_tokens + self.own_tokens
        shared = blocks_for(self.shared_tokens, _BLOCK_TOKENS)
        base = 1_000_000 * (self.seed + 1)
        own = base + 1000 * (number + 1)
        keys = [base + k for k in range(shared)] + [
            own + k for k in range(blocks_for(tokens, _BLOCK_TOKENS) - shared)
        ]
        request = Request(
            id=number, arrival_s=arrival_s, input_tokens=tokens, block_keys=tuple(keys),
            block_size_tokens=_BLOCK_TOKENS,
        )  # fmt: skip
        return TracedRequest(request, self.answer_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Followed:
    """What a visit to the live cluster left behind."""

    setting: Start
    processes: Mapping[str, int]
    """The process of each worker, and of the Conductor."""
    log: tuple[Record, ...]
    """Records of the request that is followed."""
    burst: tuple[Record, ...]
    believed: LatencyModel
    """The latency model that the cluster measured when it started."""
    tokens_equal: bool
    """Whether every answer is that of one engine in this process that computes everything itself."""
    machine: str


def follow(setting: Start) -> Followed:
    """Bring a cluster to life, ask once to fill its cache, follow one request, and serve a burst.

    Raises:
        ValueError: when a log breaks an invariant.
    """
    numbers = range(2, 2 + setting.burst)
    crowd = [setting.request(n, (n - 2) * setting.burst_every_s) for n in numbers]
    with WorkerPool(setting.spec()) as pool, LiveCluster(setting.spec(), pool=pool) as cluster:
        _checked(cluster.run([setting.request(0)]))  # an earlier request stores the system prompt
        answers = dict(cluster.outputs)
        log = _checked(cluster.run([setting.request(1)]))
        answers |= cluster.outputs
        burst = _checked(cluster.run(crowd))
        answers |= cluster.outputs
        processes, believed = {"Conductor": os.getpid(), **cluster.pids()}, cluster.model
    asked = [setting.request(0), setting.request(1), *crowd]
    return Followed(
        setting=setting,
        processes=processes,
        log=log,
        burst=burst,
        believed=believed,
        tokens_equal=answers == _alone(setting, asked),
        machine=str(describe_machine()),
    )


def crowd_under(
    policy: PlacementPolicy, setting: Start, believed: LatencyModel | None = None, *, prefill: int = 2
) -> pd.DataFrame:
    """The burst on a cluster with several prefill workers under any placement policy, such as one's own.

    Args:
        policy: what places.
        setting: the burst.
        believed: what the policy may estimate with; None measures.
        prefill: how many workers there are to choose from.

    Returns:
        Rows by request: where it was prefilled, why, reused_tokens and ttft_ms.
    """
    crowd = [setting.request(n, n * setting.burst_every_s) for n in range(setting.burst)]
    spec = setting.spec(prefill_nodes=prefill, placement=policy, log_layers=False)
    with WorkerPool(spec) as pool, LiveCluster(spec, believed, pool=pool) as cluster:
        records = _checked(cluster.run(crowd))
    placed = {r.request_id: r for r in records if isinstance(r, Placed)}
    table = latencies(records)[["reused_tokens", "ttft_ms"]]
    table.insert(0, "prefill", [placed[key].prefill_instance for key in table.index])
    return table.assign(why=[placed[key].reason for key in table.index])


def left_running(followed: Followed) -> list[int]:
    """Processes of the cluster's workers that still live, and threads of the cluster here; both should be none."""
    alive = [pid for name, pid in followed.processes.items() if name != "Conductor" and _lives(pid)]
    return alive + [thread.native_id or 0 for thread in threading.enumerate() if thread.name == "cluster"]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _alone(setting: Start, asked: Sequence[TracedRequest]) -> dict[int, tuple[int, ...]]:
    """What one engine answers that reuses nothing and moves nothing."""
    model = load_model(setting.model, device="cpu", backend="dense", seed=setting.seed)
    settings = EngineSettings(cache_blocks=2000, prefix_reuse=False, keep_log=False)
    engine = CoupledEngine(model, None, settings)
    prompts = [prompt_of(one.request, model.config.vocabulary) for one in asked]
    outputs = engine.generate(prompts, max_new_tokens=setting.answer_tokens)
    return {one.request.id: output.tokens for one, output in zip(asked, outputs, strict=True)}


def _checked(log: Sequence[Record]) -> tuple[Record, ...]:
    violations = check_log(log)
    if violations:
        raise ValueError(f"the run log breaks {violations[0].invariant}: {violations[0].sentence}")
    return tuple(log)
