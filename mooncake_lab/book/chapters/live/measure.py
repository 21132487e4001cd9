"""The whole study of chapter 12, a switch of each feature, and a killed worker, in one measurement."""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import pandas as pd

from mooncake_lab.batching import VLLM, SarathiServe
from mooncake_lab.bench.faults import strike
from mooncake_lab.bench.machine import describe_machine
from mooncake_lab.book.chapters.live.experiment import CLUSTERS, Study, StudyResult, hold_against, warm_up
from mooncake_lab.book.chapters.live.requests import causes, checked, errors, per_request, slowed
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import DecodeStretch, Moved, Prefilled, Record, TracedRequest
from mooncake_lab.metrics import request_table
from mooncake_lab.net.mooncake_wheel import MooncakeError, load_wheel
from mooncake_lab.perf import LatencyModel
from mooncake_lab.serving import LiveCluster, LiveOptions, Pacer, WorkerProcesses

_ANSWER_TOKENS: Final = 48
"""Answer length where a worker is killed: long enough that some requests are still running then."""


def switches(
    plan: Study, pool: WorkerProcesses, model: LatencyModel, rates_per_s: dict[str, float]
) -> pd.DataFrame:
    """The same slice with a feature on and off: rows of feature, is_on, what is counted, and latencies.

    Whether tokens are the same either way is in the column `same_tokens`. Mooncake's Transfer Engine is among the
    features where its wheel can be loaded.
    """
    light, crowd = plan.slice(1, rates_per_s["light"]), plan.slice(1, rates_per_s["overloaded"])
    one, batching = plan.spec(), {True: SarathiServe(chunk_tokens=plan.chunk_tokens), False: VLLM()}
    layers, both = {"log_layers": True}, (True, False)
    pairs: list[tuple[str, Sequence[TracedRequest], dict[bool, tuple[ClusterSpec, dict[str, Any]]]]] = [
        ("prefix reuse", light, {is_on: (plan.spec(prefix_caching=is_on), {}) for is_on in both}),
        ("layer-wise streaming", light, {is_on: (plan.spec(streams_layers=is_on), layers) for is_on in both}),
        ("piggybacking", crowd, {is_on: (plan.spec("1 coupled", batching=batching[is_on]), {}) for is_on in both}),
    ]
    if has_transfer_engine():
        ways = {is_on: (one, {"transfer": "mooncake" if is_on else "tcp"}) for is_on in both}
        pairs.append(("Transfer Engine", light, ways))
    rows = list[dict[str, Any]]()
    for feature, requests, ways in pairs:
        outputs = list[dict[int, tuple[int, ...]]]()
        for is_on, (spec, changes) in ways.items():
            log, tokens = _served(spec, plan.options(**changes), pool, model, requests)
            outputs.append(tokens)
            rows.append({"feature": feature, "on": is_on, **counted(log), **_latencies(log)})
        for row in rows[-2:]:
            row["same_tokens"] = outputs[0] == outputs[1]
    return pd.DataFrame(rows)


def has_transfer_engine() -> bool:
    """Whether Mooncake's own can be loaded here (extra `mooncake`)."""
    try:
        load_wheel()
    except MooncakeError:
        return False
    return True


def counted(log: Sequence[Record]) -> dict[str, float]:
    """What a log holds that is no time: prompt tokens computed, KVCache that arrived early, shared iterations.

    Early is before the request's prefill ended; a shared iteration computes prompts and decodes together.
    """
    prefilled = [record for record in log if isinstance(record, Prefilled)]
    ends = {record.request_id: record.at_s for record in prefilled}
    moves = [record for record in log if isinstance(record, Moved) and record.destination.startswith("decode")]
    sent = sum(move.bytes for move in moves)
    early = sum(move.bytes for move in moves if move.at_s < ends[move.request_id])
    beside = {(record.instance, record.start_s) for record in prefilled}
    shared = sum(isinstance(r, DecodeStretch) and (r.instance, r.start_s) in beside for r in log)
    return {
        "computed_tokens": float(sum(record.computed_tokens for record in prefilled)),
        "early_share": early / sent if sent else float("nan"),
        "shared_iterations": float(shared),
    }


def kill_one(plan: Study, pool: WorkerProcesses, model: LatencyModel, requests_per_s: float) -> pd.DataFrame:
    """One row: the decode worker killed in a run with longer answers, held against an undisturbed run.

    Columns are those of `serving.faults.FaultReport`, and `said`: what the cluster logged meanwhile.
    """
    longer = [replace(one, output_tokens=_ANSWER_TOKENS) for one in plan.slice(1, requests_per_s)]
    with LiveCluster(plan.spec(), plan.options(), model=model, launcher=pool) as live, overheard() as said:
        warm_up(live)
        undisturbed = checked(live.run(longer))
        expected = dict(live.outputs)
        at_s = 0.25 * undisturbed[-1].at_s
        report = strike(live, longer, "kill -9 a decode worker", at_s=at_s, expected=expected)
        checked(live.log)
    return pd.DataFrame([asdict(report) | {"said": "; ".join(said)}])


@contextmanager
def overheard() -> Generator[list[str]]:
    """Collect what the serving layer logs in this process meanwhile, instead of showing it."""
    said = list[str]()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, ear = logging.getLogger("mooncake_lab.serving"), Ear()
    logger.addHandler(ear)
    before, logger.propagate = logger.propagate, False
    try:
        yield said
    finally:
        logger.propagate = before
        logger.removeHandler(ear)


def _served(
    spec: ClusterSpec,
    options: LiveOptions,
    pool: WorkerProcesses,
    model: LatencyModel,
    requests: Sequence[TracedRequest],
) -> tuple[list[Record], dict[int, tuple[int, ...]]]:
    with LiveCluster(spec, options, model=model, launcher=pool) as live:
        warm_up(live)
        return checked(live.run(requests)), live.outputs


def _latencies(log: Sequence[Record]) -> dict[str, float]:
    """Medians over requests (ms)."""
    table, gaps_s = per_request(log), request_table(log)["tbt_fast_s"]
    columns = {"ttft_ms": table["ttft_s"], "handover_ms": table["handover_s"], "longest_gap_ms": gaps_s}
    return {name: 1e3 * float(np.nanmedian(values)) for name, values in columns.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveMeasurement:
    """Everything a study measured."""

    plan: Study
    held: StudyResult
    """At the machine's own pace."""
    errors: pd.DataFrame
    causes: pd.DataFrame
    paced: StudyResult
    """The same study, paced by the metronome."""
    paced_errors: pd.DataFrame
    switches: pd.DataFrame
    fault: pd.DataFrame
    machine: str


def measure(plan: Study) -> LiveMeasurement:
    """Every run of a study, live and simulated, the switches, and a kill; no process is left afterwards."""
    workers = max(sum(CLUSTERS[cluster]) for cluster, _, _ in plan.runs())
    with WorkerProcesses(plan.options()).start(1 + workers) as pool:  # one more, to replace the killed one
        held = hold_against(plan, pool)
        model, rates = held.calibration.model, dict(held.rates_per_s)
        paced = hold_against(plan, pool, Pacer.of(slowed(model, plan.beat, decode=True)))
        switched = switches(plan, pool, model, rates)
        fault = kill_one(plan, pool, model, rates["overloaded"])
    return LiveMeasurement(
        plan=plan,
        held=held,
        errors=errors(pd.concat([held.requests, held.again]), seed=plan.seed),
        paced=paced,
        paced_errors=errors(pd.concat([paced.requests, paced.again]), seed=plan.seed),
        causes=causes(held.requests),
        switches=switched,
        fault=fault,
        machine=str(describe_machine()),
    )
