"""Run logs that a restructuring must not change: digests of whole runs, with the texts of reasons left out.

`PYTHONPATH=tests/helpers python tests/simulation/test_golden.py` writes `golden.json` anew, after a change of
results that is meant.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import flat
import msgspec
import numpy as np
import pytest

from mooncake_lab.batching import BATCHING_POLICIES, Limits, named_policy
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.cluster import COUPLED_SYSTEMS
from mooncake_lab.conductor import EarlyRejection, LoadBalance, named_placement
from mooncake_lab.core import SLO, Placed, Record, Rejected
from mooncake_lab.perf import IterationCost, LinearCost, LinkLatency
from mooncake_lab.simulation import Failure, PipelineSpec, StageClock, run_pipeline
from mooncake_lab.workload import Trace, load
from mooncake_lab.workload.twin import make_twin

FILE = Path(__file__).with_name("golden.json")
PLACEMENTS = ("random", "load_balance", "cache_aware", "kvcache_centric")
RELEASED_NODES, TWIN_REQUESTS = 16, 800


def digest(log: Iterable[Record]) -> str:
    """SHA-256 of the records as JSON lines; the texts of reasons are blanked."""
    encode, sha = msgspec.json.Encoder().encode, hashlib.sha256()
    for record in log:
        blank = msgspec.structs.replace(record, reason="") if isinstance(record, Placed | Rejected) else record
        sha.update(encode(blank) + b"\n")
    return sha.hexdigest()


def disaggregated(nodes, until_s=None, **knobs):
    """A cluster of which half the nodes prefill."""
    half = nodes // 2
    model = replace(paper_node_latency(), ssd=LinkLatency(6e9))
    knobs |= {"prefill_nodes": half, "decode_nodes": half}
    return lambda trace: digest(flat.disaggregated(model, **knobs).run(trace.requests(), until_s))


def coupled(nodes, name, until_s=None, **knobs):
    """A coupled system by name."""
    policy, caching = COUPLED_SYSTEMS[name]
    knobs |= {"nodes": nodes, "batching": policy, "prefix_caching": caching}
    return lambda trace: digest(flat.coupled(paper_node_latency(), **knobs).run(trace.requests(), until_s))


def cases(nodes, horizon_s):
    """Runs by name: each a function of a trace."""
    named = {f"placement {name}": disaggregated(nodes, placement=_placement(name)) for name in PLACEMENTS}
    deaths = (Failure("decode-0", horizon_s / 4), Failure("prefill-1", horizon_s / 3))
    return named | {
        "coupled vllm": coupled(nodes, "vllm"),
        "coupled vllm_prefix": coupled(nodes, "vllm_prefix"),
        "coupled vllm_chunked": coupled(nodes, "vllm_chunked"),
        "groups of two": disaggregated(nodes, prefill_group=2),
        "failures": disaggregated(nodes, failures=deaths),
        "coupled failures": coupled(nodes, "vllm_chunked", failures=(Failure("coupled-0", horizon_s / 4),)),
        "horizon": disaggregated(nodes, until_s=horizon_s / 2),
        "coupled horizon": coupled(nodes, "sarathi_serve", until_s=horizon_s / 2),
    }


def small_cases(nodes):
    """More runs of the twin: little memory, every policy, and what the released trace need not repeat."""
    slo = SLO(ttft_s=30, tbt_s=0.1)
    found = {f"little memory {name}": coupled(nodes, name, device_tokens=200_000) for name in COUPLED_SYSTEMS}
    found["little memory prefixes"] = coupled(nodes, "vllm_prefix", device_tokens=150_000)
    found["little decode memory"] = disaggregated(nodes, device_tokens=150_000)
    found["admission"] = disaggregated(nodes, admission=EarlyRejection(), slo=slo)
    found["skip ahead, stale views"] = disaggregated(nodes, overtaking=True, view_age_s=5.0, streams_layers=False)
    found["ssd"] = disaggregated(nodes, cache_tokens=200_000, ssd_tokens=800_000)
    for name in BATCHING_POLICIES:
        if name not in {"prefill_only", "decode_only"}:
            found[f"pipeline {name}"] = lambda trace, name=name: pipelined(trace, name)
    return found


def _placement(name):
    return LoadBalance() if name == "load_balance" else named_placement(name, 0)


def pipelined(trace: Trace, name: str) -> str:
    """Four stages and four micro-batches with room for few requests; its columns and its requests."""
    cost = IterationCost(
        name="golden",
        linear=LinearCost(((4.0, 0.040), (128.0, 0.050), (256.0, 0.070), (1024.0, 0.22))),
        per_pair_s=2e-8,
        per_context_token_s=1.4e-6,
    )
    clock = StageClock(cost=cost, stages=4, link=LinkLatency(1e9, 1e-5), hop_bytes_per_token=8192)
    limits = Limits(
        max_batch_tokens=30_000, max_requests=6, block_size_tokens=16, capacity_blocks=2500, free_blocks=2500,
        max_request_tokens=30_000,
    )  # fmt: skip
    spec = PipelineSpec(clock=clock, policy=named_policy(name), limits=limits, micro_batches=4)
    run = run_pipeline(spec, [stated(traced) for traced in trace.head(150).requests()])
    sha = hashlib.sha256()
    for column in (run.start_s, run.end_s, run.micro_batch, run.prompt_tokens, run.decodes, run.starved):
        sha.update(np.ascontiguousarray(column, dtype=np.float64).tobytes())
    for each in run.requests:
        sha.update(repr((each.request_id, len(each.token_s), each.scheduled_s, each.bubble_s)).encode())
        sha.update(repr(each.token_s).encode())
    sha.update(repr(tuple(run.rejected)).encode())
    return sha.hexdigest()


def stated(traced):
    """A request whose client states a limit, for the policies that reserve it."""
    return replace(traced, request=replace(traced.request, max_tokens=2 * traced.output_tokens))


@cache
def twin() -> Trace:
    """The first requests of the conversation twin."""
    return make_twin("conversation", seed=0).head(TWIN_REQUESTS)


TWIN_CASES = cases(4, 240.0) | small_cases(4)
RELEASED_CASES = cases(RELEASED_NODES, 3600.0)


@pytest.mark.parametrize("name", TWIN_CASES)
def test_runs_of_the_twin_are_what_they_were(name):
    """The log of each run, but for its reasons, is byte for byte the one on record."""
    assert TWIN_CASES[name](twin()) == json.loads(FILE.read_text())["twin"][name]


@pytest.mark.slow
@pytest.mark.traces("conversation")
@pytest.mark.parametrize("name", RELEASED_CASES)
def test_runs_of_the_released_trace_are_what_they_were(name):
    """The hour of the released conversation trace likewise."""
    assert RELEASED_CASES[name](load("conversation")) == json.loads(FILE.read_text())["released"][name]


def record():
    """Write the digests of this checkout."""
    found = {"twin": {name: run(twin()) for name, run in TWIN_CASES.items()}}
    found["released"] = {name: run(load("conversation")) for name, run in RELEASED_CASES.items()}
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    record()
