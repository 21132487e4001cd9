"""The live cluster beside its engine: tokens per second of one coupled worker over those of the engine alone.

Run: python benchmarks/serve.py [--threads 1,2] [--batches 1,8] [--rounds 5] [--peers vLLM] [--json]

Both generate the same greedy tokens from the same prompts, in alternating rounds of one run; the engine runs in a
process of its own with the same number of threads. Also: seconds until a cluster has started, and until a worker
that was killed with SIGKILL is replaced by the spare. On a shared machine only the ratios mean something.

With `--peers vLLM`, our server and vLLM's answer clients over HTTP as well: the same weights and prompts, one
thread each, both servers on one core and the clients on another where the machine has two.
"""  # noqa: INP001  # scripts, not a package

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_lab.bench.rounds import in_order, paired_rounds
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.serving import LiveCluster, LiveOptions, WorkerProcesses

PROMPT_TOKENS = 32
COUPLED = ClusterSpec.small_coupled()
"""One worker."""


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python benchmarks/serve.py --threads 1 --batches 1,8 --rounds 7 --json",
    )
    parser.add_argument("--model", default="random:lab-30m", help="a model directory, or random:SHAPE")
    parser.add_argument("--threads", default="1,2", help="threads of the worker and of the engine, one run each")
    parser.add_argument("--batches", default="1,8", help="requests at once")
    parser.add_argument("--tokens", type=int, default=128, help="generated tokens per request")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of engine and cluster, alternating")
    parser.add_argument("--kills", type=int, default=3, help="workers killed with SIGKILL")
    parser.add_argument("--peers", nargs="*", choices=("vLLM",), default=(), help="servers beside ours, over HTTP")
    parser.add_argument("--environments", type=Path, default=Path(".peers"), help="where the peers are installed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.engine is not None:
        answer_rounds(asked.model, asked.tokens)
        return
    batches = [int(word) for word in asked.batches.split(",")]
    found = [measure(asked, int(word), batches) for word in asked.threads.split(",")]
    over_http = beside_peers(asked, batches) if asked.peers else []
    if asked.json:
        told = {"model": asked.model, "cores": os.cpu_count(), "runs": found, "over_http": over_http}
        sys.stdout.write(json.dumps(told) + "\n")
        return
    for run in found:
        back = f", replacement {run['replacement_s']:.2f} s (median of {asked.kills})" if asked.kills else ""
        sys.stdout.write(f"{run['threads']} threads: start {run['start_s']:.1f} s{back}\n")
        for row in run["rows"]:
            sys.stdout.write(
                f"  batch {row['batch']}: engine {row['engine_per_s']:.0f}, served {row['served_per_s']:.0f}"
                f" tokens/s; ratio {row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})\n"
            )
    for row in over_http:
        sys.stdout.write(
            f"over HTTP, {row['clients']} clients: ours {row['ours_per_s']:.0f}, {row['peer']}"
            f" {row['peer_per_s']:.0f} tokens/s; ratio {row['ratio']:.2f}"
            f" ({row['least']:.2f} to {row['most']:.2f})\n"
        )


def prompts(batch: int, vocabulary: int, number: int) -> list[np.ndarray]:
    """Prompts that no earlier round had, so that no prefix is found again."""
    return list(np.random.default_rng(number).integers(0, vocabulary, (batch, PROMPT_TOKENS)).astype(np.int32))


def measure(asked: argparse.Namespace, threads: int, batches: Sequence[int]) -> dict[str, Any]:
    """One number of threads: start, alternating rounds of every batch size, and kills."""
    options = LiveOptions(model=asked.model, device="cpu", dtype="float32", threads=threads)
    with WorkerProcesses(options) as pool:
        began_s = time.perf_counter()
        live = LiveCluster(COUPLED, options, model=believed(asked.model), launcher=pool)
        with live, engine_process(asked, threads) as engine:
            start_s = time.perf_counter() - began_s
            wait_for_spare(pool)
            rows = [compare(live, engine, batch, asked) for batch in batches]
            replaced = [replacement_s(live, pool) for _ in range(asked.kills)]
    return {
        "threads": threads,
        "start_s": start_s,
        "replacement_s": statistics.median(replaced) if replaced else None,
        "rows": rows,
    }


def compare(
    live: LiveCluster, engine: "subprocess.Popen[str]", batch: int, asked: argparse.Namespace
) -> dict[str, float]:
    """Alternating rounds of one batch size; each checks that the tokens are equal."""
    tokens = dict[str, list[list[int]]]()
    vocabulary = model_shape(asked.model.removeprefix("random:")).vocabulary
    assert engine.stdin is not None  # noqa: S101  # both are pipes
    assert engine.stdout is not None  # noqa: S101
    asking, telling = engine.stdin, engine.stdout

    def alone(number: int) -> float:
        asking.write(json.dumps([batch, number]) + "\n")
        asking.flush()
        seconds, tokens["engine"] = json.loads(telling.readline())
        return seconds

    def served(number: int) -> float:
        began_s = time.perf_counter()
        made = live.generate(prompts(batch, vocabulary, number), max_new_tokens=asked.tokens)
        seconds = time.perf_counter() - began_s
        tokens["served"] = [list(one) for one in made]
        return seconds

    def both(number: int) -> dict[str, float]:
        works = {"engine": alone, "served": served}
        seconds = {who: works[who](number) for who in in_order(works, number)}
        if tokens["engine"] != tokens["served"]:
            raise ValueError(f"batch {batch}, round {number}: the cluster's tokens are not those of the engine")
        return seconds

    taken, total = paired_rounds(both, asked.rounds), batch * asked.tokens
    ratio = taken.ratio("engine", "served")
    return {
        "batch": batch,
        "engine_per_s": total / taken.median_s("engine"),
        "served_per_s": total / taken.median_s("served"),
        "ratio": ratio.median,
        "least": ratio.least,
        "most": ratio.most,
        "load_average": taken.load_average,
    }


def beside_peers(asked: argparse.Namespace, clients: Sequence[int]) -> list[dict[str, Any]]:
    """Servers of others beside ours; one that does not run here is left out, and one sentence says why."""
    from over_http import beside_vllm  # a machine that needs the rest of this program may have no client

    try:
        return list(beside_vllm(asked.model, asked.environments, clients, asked.tokens, asked.rounds))
    except ValueError as error:
        sys.stderr.write(f"vLLM is left out: {error}\n")
        return []


def replacement_s(live: LiveCluster, pool: WorkerProcesses) -> float:
    """Seconds from a kill to the moment at which the worker that takes over is ready."""
    wait_for_spare(pool)
    killed = live.pids()["coupled-0"]
    began_s = time.perf_counter()
    live.kill("coupled-0")
    while live.pids().get("coupled-0", killed) == killed:
        time.sleep(0.001)
    return time.perf_counter() - began_s


def wait_for_spare(pool: WorkerProcesses) -> None:
    """Return when a process is ready to take over."""
    while not pool.idle():
        time.sleep(0.05)


def engine_process(asked: argparse.Namespace, threads: int) -> "subprocess.Popen[str]":
    """This program again, as the engine alone."""
    return subprocess.Popen(  # noqa: S603  # this program
        [
            sys.executable,
            __file__,
            "--engine",
            str(threads),
            "--model",
            asked.model,
            "--tokens",
            str(asked.tokens),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads), "NUMBA_NUM_THREADS": str(threads)},
    )


def answer_rounds(model: str, new_tokens: int) -> None:
    """Generate for each line of stdin, with the settings of a coupled worker, and time it."""
    from mooncake_lab.engine import CoupledEngine, EngineSettings, GenerationRequest, load_model

    (pool,), longest = COUPLED.pools, LiveOptions().max_model_len
    loaded = load_model(model, device="cpu", dtype="float32", positions=longest)
    settings = EngineSettings(
        cache_blocks=pool.device_tokens // COUPLED.block_size_tokens,
        block_size_tokens=COUPLED.block_size_tokens,
        max_batch_tokens=longest,
        max_requests=pool.max_requests,
        max_request_tokens=longest,
    )
    engine = CoupledEngine(loaded, pool.batching, settings)
    for line in sys.stdin:
        batch, number = json.loads(line)
        asked = prompts(batch, loaded.config.vocabulary, number)
        began_s = time.perf_counter()
        outputs = engine.engine.generate(
            GenerationRequest(prompt=prompt, max_new_tokens=new_tokens, end_tokens=()) for prompt in asked
        )
        seconds = time.perf_counter() - began_s
        sys.stdout.write(json.dumps([seconds, [list(output.tokens) for output in outputs]]) + "\n")
        sys.stdout.flush()


def believed(model: str) -> LatencyModel:
    """A latency model to place by; with one worker it changes nothing."""
    return LatencyModel(
        name="for a benchmark",
        shape=model_shape(model.removeprefix("random:")),
        prefill=PrefillLatency(constant_s=1e-3, per_token_s=1e-5, per_token_squared_s=0.0),
        decode=DecodeLatency(1e-3, 0.0, 0.0),
        hybrid=HybridLatency(floor_s=1e-3, per_token_s=1e-5, per_token_squared_s=0.0, per_context_token_s=0.0),
        transfer=LinkLatency(1e9),
        dram=LinkLatency(1e9),
    )


if __name__ == "__main__":
    main()
