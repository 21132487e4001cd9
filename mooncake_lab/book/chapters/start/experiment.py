"""Chapter 00: a first run, and the life of its requests."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd

from mooncake_lab import core
from mooncake_lab.bench.machine import describe_machine
from mooncake_lab.book.chapters.live.requests import checked
from mooncake_lab.book.experiments import tabulated
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import PlacementPolicy
from mooncake_lab.engine import CoupledEngine, EngineSettings, load_model
from mooncake_lab.metrics import request_table
from mooncake_lab.perf import LatencyModel
from mooncake_lab.serving import LiveCluster, LiveOptions
from mooncake_lab.workload.transforms import prompt_of


def steps(log: Sequence[core.Record]) -> pd.DataFrame:
    """The one request of a log, by the steps of FAST'25 Fig. 3."""
    zero_s = _arrival_s(log)
    columns = ["step", "records", "from_ms", "to_ms", "what the log says"]
    rows = [
        (step, names, 1e3 * (start_s - zero_s), 1e3 * (end_s - zero_s), said)
        for step, names, start_s, end_s, said in _life(log)
    ]
    return pd.DataFrame(rows, columns=columns).set_index("step")


@tabulated
def timeline(log: Sequence[core.Record], layers: int) -> Iterator[dict[str, Any]]:
    """Rows of where, what, layer, start_ms and end_ms since arrival: every recorded event of one request.

    A piece of KVCache is one layer of a stretch of the prompt; a worker sends the layers of a stretch in order,
    from which `layer` follows.
    """
    zero_s, moves = _arrival_s(log), 0
    for record in log:
        start_s, layer = getattr(record, "start_s", record.at_s), -1
        match record:
            case core.Placed():
                where, what, start_s = "Conductor", "decide", zero_s
            case core.Prefilled():
                where, what = record.instance, "prefill"
            case core.Moved():
                where, what, layer = "Messenger", "move", moves % layers
                moves += 1
            case core.DecodeStretch():
                where, what = record.instance, "decode"
            case core.FirstToken() | core.Finished():
                where, what = "client", type(record).__name__
            case _:
                continue
        yield {"where": where, "what": what, "layer": layer} | _span_ms(start_s, record.at_s, zero_s)


@tabulated
def lanes(log: Sequence[core.Record]) -> Iterator[dict[str, Any]]:
    """Rows of request, what (wait, prefill, hand over, decode), start_ms and end_ms since the first arrival."""
    zero_s, since = _arrival_s(log), dict[int, float]()
    for record in log:
        spans: list[tuple[int, str, float, float]] = []
        match record:
            case core.Arrived():
                since[record.request_id] = record.at_s
            case core.Prefilled():
                key = record.request_id
                spans = [(key, "wait", since[key], record.start_s), (key, "prefill", record.start_s, record.at_s)]
                since[key] = record.at_s
            case core.FirstToken():
                spans = [(record.request_id, "hand over", since[record.request_id], record.at_s)]
            case core.DecodeStretch():
                spans = [(key, "decode", record.start_s, record.at_s) for key in record.request_ids]
            case _:
                pass
        for key, what, start_s, end_s in spans:
            yield {"request": key, "what": what} | _span_ms(start_s, end_s, zero_s)


def latencies(log: Sequence[core.Record]) -> pd.DataFrame:
    """Rows by request: input_tokens, reused_tokens, output_tokens, ttft_ms, tbt_ms (the mean gap)."""
    table = request_table(log)
    reused = {r.request_id: r.reused_tokens for r in log if isinstance(r, core.Prefilled)}
    return table[["input_tokens"]].assign(
        reused_tokens=[reused[key] for key in table.index],
        output_tokens=table["output_tokens"],
        ttft_ms=1e3 * table["ttft_s"],
        tbt_ms=1e3 * table["tbt_arxiv_s"],
    )


def _life(log: Sequence[core.Record]) -> Iterable[tuple[str, str, float, float, str]]:
    """Step, the names of its records, when it began and ended, and what they say."""
    placed = next(r for r in log if isinstance(r, core.Placed))
    prefilled = next(r for r in log if isinstance(r, core.Prefilled))
    first = next(r for r in log if isinstance(r, core.FirstToken))
    moves = [r for r in log if isinstance(r, core.Moved)]
    decoded = [r for r in log if isinstance(r, core.DecodeStretch)]
    early = sum(r.at_s < prefilled.at_s for r in moves)
    chosen = f"{placed.prefill_instance}, then {placed.decode_instance}"
    yield "choose", "Arrived, Placed", _arrival_s(log), placed.at_s, chosen
    # the reused layers are the first to be sent on: by then they have been read, but sending is another thread's
    sent_s = min(r.start_s for r in moves) if prefilled.reused_tokens else prefilled.start_s
    read_s = min(sent_s, prefilled.at_s)
    reused = f"{prefilled.reused_tokens} prompt tokens found in the store"
    yield "1 KVCache reuse", "Prefilled", prefilled.start_s, read_s, reused
    computed = f"{prefilled.computed_tokens} prompt tokens computed"
    yield "2 incremental prefill", "Prefilled", read_s, prefilled.at_s, computed
    moved = f"{len(moves)} pieces, {sum(r.bytes for r in moves):,} bytes; {early} during prefill"
    yield "3 KVCache transfer", "Moved", min(r.start_s for r in moves), max(r.at_s for r in moves), moved
    shown = f"the first token, then {sum(r.steps for r in decoded)} steps"
    yield "4 decode", "FirstToken, DecodeStretch, Finished", first.at_s, log[-1].at_s, shown


def _arrival_s(log: Iterable[core.Record]) -> float:
    return next(record.at_s for record in log if isinstance(record, core.Arrived))


def _span_ms(start_s: float, end_s: float, zero_s: float) -> dict[str, float]:
    return {"start_ms": 1e3 * (start_s - zero_s), "end_ms": 1e3 * (end_s - zero_s)}


SHARED_TOKENS: Final = {"smoke": 128, "classroom": 256, "full": 256, "gpu": 256}
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

    def spec(self, **changes: Any) -> ClusterSpec:
        """The cluster: one prefill and one decode worker unless told otherwise."""
        asked: dict[str, Any] = {"block_size_tokens": _BLOCK_TOKENS, "chunk_tokens": self.chunk_tokens}
        return ClusterSpec.small(**asked | changes)

    def options(self, *, log_layers: bool = True) -> LiveOptions:
        """What its workers run, on this processor."""
        return LiveOptions(
            model=self.model,
            seed=self.seed,
            device="cpu",
            backend="dense",
            max_model_len=self.shared_tokens + self.own_tokens + 2 * self.answer_tokens,
            log_layers=log_layers,
            spares=0,
        )

    def request(self, number: int, arrival_s: float = 0.0) -> core.TracedRequest:
        """The system prompt, and tokens that no other number has."""
        tokens = self.shared_tokens + self.own_tokens
        shared = core.blocks_for(self.shared_tokens, _BLOCK_TOKENS)
        base = 1_000_000 * (self.seed + 1)
        own = base + 1000 * (number + 1)
        keys = [base + k for k in range(shared)] + [
            own + k for k in range(core.blocks_for(tokens, _BLOCK_TOKENS) - shared)
        ]
        request = core.Request(
            id=number, arrival_s=arrival_s, input_tokens=tokens, block_keys=tuple(keys),
            block_size_tokens=_BLOCK_TOKENS,
        )  # fmt: skip
        return core.TracedRequest(request, self.answer_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Followed:
    """What a visit to the live cluster left behind."""

    setting: Start
    processes: Mapping[str, int]
    """The process of each worker, and of the Conductor."""
    log: tuple[core.Record, ...]
    """Records of the request that is followed."""
    burst: tuple[core.Record, ...]
    believed: LatencyModel
    """The latency model that the cluster measured when it started."""
    tokens_equal: bool
    """Whether every answer is that of one engine in this process that computes everything itself."""
    machine: str


def follow(setting: Start) -> Followed:
    """Bring a cluster to life, ask once to fill its cache, follow one request, and serve a burst."""
    numbers = range(2, 2 + setting.burst)
    crowd = [setting.request(n, (n - 2) * setting.burst_every_s) for n in numbers]
    with LiveCluster(setting.spec(), setting.options()) as cluster:
        checked(cluster.run([setting.request(0)]))  # an earlier request stores the system prompt
        answers = dict(cluster.outputs)
        log = tuple(checked(cluster.run([setting.request(1)])))
        answers |= cluster.outputs
        burst = tuple(checked(cluster.run(crowd)))
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


def crowd_under(policy: PlacementPolicy, setting: Start, believed: LatencyModel | None = None) -> pd.DataFrame:
    """The burst on a cluster with two prefill workers under any placement policy, such as one's own.

    Args:
        policy: what places.
        setting: the burst.
        believed: what the policy may estimate with; None measures.
    """
    crowd = [setting.request(n, n * setting.burst_every_s) for n in range(setting.burst)]
    spec, options = setting.spec(prefill_nodes=2, placement=policy), setting.options(log_layers=False)
    with LiveCluster(spec, options, model=believed) as cluster:
        records = checked(cluster.run(crowd))
    placed = {r.request_id: r for r in records if isinstance(r, core.Placed)}
    table = latencies(records)[["reused_tokens", "ttft_ms"]]
    table.insert(0, "prefill", [placed[key].prefill_instance for key in table.index])
    return table.assign(why=[placed[key].reason for key in table.index])


def left_running(followed: Followed) -> list[int]:
    """Processes of the cluster's workers that still live, and threads of the cluster here; both should be none."""
    workers = [pid for name, pid in followed.processes.items() if name != "Conductor"]
    alive = [pid for pid in workers if _lives(pid)]
    return alive + [thread.native_id or 0 for thread in threading.enumerate() if thread.name == "cluster"]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _alone(setting: Start, asked: Sequence[core.TracedRequest]) -> dict[int, tuple[int, ...]]:
    """What one engine answers that reuses nothing and moves nothing."""
    model = load_model(setting.model, device="cpu", backend="dense", seed=setting.seed)
    settings = EngineSettings(cache_blocks=2000, prefix_caching=False, keep_log=False)
    engine = CoupledEngine(model, None, settings)
    prompts = [prompt_of(one.request, model.config.vocabulary) for one in asked]
    outputs = engine.generate(prompts, max_new_tokens=setting.answer_tokens)
    return {one.request.id: output.tokens for one, output in zip(asked, outputs, strict=True)}
