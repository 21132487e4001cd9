"""Servers with one core for all their processes, under requests with shared prefixes at rising rates.

Run: python benchmarks/gain.py [--out data/measured/real_gain.json] [--rounds 2]

Ours with one prefill and one decode worker and with one and two coupled workers, and vLLM with one process and
with two behind a plain and a cache-aware router: the same weights, the same requests, and the same KVCache in all
processes together. All processes of a system, its router included, are pinned to one core, and the clients to
another. All servers stay up; one system at a time gets requests. A round goes through the systems, the next one in
the other order. Before a system's rates, each of its prefixes, which are new to it, is asked for once.

A request counts if all its tokens came, TTFT is at most 1 s and TBT (the mean of the longest tenth of its gaps) at
most 100 ms; the file has each request, so that other limits can be applied. Before the rounds, prompts and decode
steps of one worker of each engine are timed alone: the simulator's latency models fit them. The file is written
after each rate, and a run that was interrupted goes on where it ended. All takes some twelve minutes.
"""  # noqa: INP001  # scripts, not a package

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import count, product
from pathlib import Path
from typing import Any, Final

import numpy as np
from http_clients import Answer, Question, closed_loop, open_loop
from http_servers import (
    cores,
    free_port,
    our_words,
    pinned,
    running,
    save_model,
    vllm_environment,
    vllm_words,
    wait_until_open,
)
from peer_environments import SCRIPTS, environment
from speed import ROOT, provenance

from mooncake_lab.bench.rounds import in_order
from mooncake_lab.book.chapters.endtoend.gain import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    MAX_REQUESTS,
    SYSTEMS,
    Arrival,
    SharedPrefixes,
)
from mooncake_lab.core import complete_file
from mooncake_lab.metrics import tbt_longest_gaps_s

RATES: Final = (2.0, 5.0, 8.0, 12.0)
KV_TOKENS: Final = 24_576
"""Of all processes of a system together: more than all prefixes, and a half holds fewer than all."""
PATIENCE_S: Final = 3.0
"""How long the clients of a rate wait after its last request."""
_MOST_TOKENS: Final = 2048
_PROMPTS: Final = (64, 256, 512, 1024)
_BATCHES: Final = ((1, 64), (2, 64), (4, 64), (8, 64), (16, 64), (4, 1024), (8, 512))
"""Requests at once, and tokens of the prompt of each."""
_PROBE_TOKENS: Final = 24


class Servers:
    """The servers of some systems, started on their core. Mutable: it holds processes until the stack closes."""

    def __init__(self, stack: ExitStack, python: Path, shape: str, dtype: str, systems: Collection[str]) -> None:
        self._stack, self._shape = stack, shape
        self._core = cores()[0]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._folder = folder
        save_model(shape, dtype, folder / "model")
        started: dict[str, tuple[int, Any]] = {}
        self._routed = [name for name in ("vllm_2", "vllm_2_aware") if name in systems]
        wanted = {*systems, *(("vllm_2a", "vllm_2b") if self._routed else ())}
        for name, options in self._options().items():
            if name not in wanted:
                continue
            port = free_port()
            if name.startswith("ours"):
                words, more = our_words(folder / "model", dtype, port, *options), {}
            else:
                words = vllm_words(python, folder / "model", dtype, port, *options)
                more = vllm_environment(python)
            started[name] = port, stack.enter_context(running(words, self._core, more))
        for name, (port, process) in started.items():
            wait_until_open(process, port, name)
            sys.stderr.write(f"{name} is up\n")
        self._urls = {name: f"http://127.0.0.1:{port}" for name, (port, _) in started.items()}

    @staticmethod
    def _options() -> dict[str, list[str]]:
        """The servers that are needed, and what each is told beyond the model."""

        def ours(tokens: int, *kind: str) -> list[str]:
            return [*kind, "--device-tokens", str(tokens), "--max-requests", str(MAX_REQUESTS),
                    "--chunk-tokens", str(CHUNK_TOKENS["ours"]),
                    "--max-model-len", str(_MOST_TOKENS)]  # fmt: skip

        def vllm(tokens: int) -> list[str]:
            block = BLOCK_TOKENS["vllm"]
            return ["--block-size", str(block), "--num-gpu-blocks-override", str(tokens // block + 1),
                    "--max-num-batched-tokens", str(CHUNK_TOKENS["vllm"]), "--max-num-seqs", str(MAX_REQUESTS),
                    "--max-model-len", str(_MOST_TOKENS)]  # fmt: skip

        half = KV_TOKENS // 2
        return {
            "ours_1p1d": ours(half, "--prefill-nodes", "1", "--decode-nodes", "1", "--cache-tokens", str(half)),
            "ours_1": ours(KV_TOKENS, "--coupled-nodes", "1"),
            "ours_2": ours(half, "--coupled-nodes", "2", "--placement", SYSTEMS["ours_2"].router),
            "vllm_1": vllm(KV_TOKENS),
            "vllm_2a": vllm(half),
            "vllm_2b": vllm(half),
        }

    def url(self, system: str) -> str:
        """Where a system with one process, or with a router of its own, answers."""
        return self._urls[system]

    def route(self, probes: Mapping[str, Any]) -> None:
        """Start the routers before vLLM's two processes, on the core of the servers."""
        told = self._folder / "probes.json"
        told.write_text(json.dumps(probes), encoding="utf-8")
        for system in self._routed:
            port = free_port()
            words = [
                sys.executable, str(Path(__file__).with_name("router.py")), self._urls["vllm_2a"],
                self._urls["vllm_2b"], "--policy", SYSTEMS[system].router, "--port", str(port), "--probes",
                str(told), "--model", self._shape, "--capacity-tokens", str(KV_TOKENS // 2), "--block-size",
                str(BLOCK_TOKENS["vllm"]),
            ]  # fmt: skip
            process = self._stack.enter_context(running(words, self._core))
            wait_until_open(process, port, system)
            self._urls[system] = f"http://127.0.0.1:{port}"


def probe(url: str, vocabulary: int) -> dict[str, list[list[float]]]:
    """Prompts and decode steps of a server that does nothing else; see `gain.latency_model`."""
    seeds = count()

    def question(tokens: int, new_tokens: int) -> Question:
        prompt = np.random.default_rng([next(seeds), 1]).integers(0, vocabulary, tokens)
        return Question(prompt=prompt.tolist(), new_tokens=new_tokens)

    closed_loop(url, [question(300, 8) for _ in range(4)], 2)  # nothing is slow because it is the first
    prefill = list[list[float]]()
    for tokens in _PROMPTS * 3:
        (answer,) = closed_loop(url, [question(tokens, 1)], 1)
        prefill.append([float(tokens), _ttft_s(answer)])
    decode = list[list[float]]()
    for batch, tokens in _BATCHES:
        answers = closed_loop(url, [question(tokens, _PROBE_TOKENS) for _ in range(batch)], batch)
        began_s = max(answer.token_times_s[0] for answer in answers)
        ended_s = min(answer.token_times_s[-1] for answer in answers)
        gaps_s = [gap for answer in answers for gap in _gaps_s(answer, began_s, ended_s)]
        decode.append([float(batch), float(batch * (tokens + _PROBE_TOKENS // 2)), float(np.median(gaps_s))])
    return {"prefill": prefill, "decode": decode}


def _ttft_s(answer: Answer) -> float:
    if answer.ttft_s is None:
        raise ValueError(f"a prompt that was timed alone got no token: {answer.error}")
    return answer.ttft_s


def _gaps_s(answer: Answer, after_s: float, until_s: float) -> Iterable[float]:
    """Gaps between tokens while all requests of a batch decode."""
    times_s = [at_s for at_s in answer.token_times_s if after_s <= at_s <= until_s]
    return np.diff(times_s).tolist()


def fill(url: str, arrivals: Sequence[Arrival]) -> None:
    """Ask for each prefix once, one after the other."""
    answers = closed_loop(url, map(_question, arrivals), 1)
    for answer in answers:
        _ttft_s(answer)


def _question(arrival: Arrival) -> Question:
    return Question(at_s=arrival.at_s, prompt=arrival.prompt, new_tokens=arrival.new_tokens)


def cell(url: str, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """What the clients of one rate saw."""
    load = os.getloadavg()[0]
    answers = open_loop(url, list(map(_question, arrivals)), PATIENCE_S)
    whole = [answer for answer in answers if answer.error is None]
    return {
        "load_average": round(load, 2),
        "ttft_s": [round(_ttft_s(answer), 4) for answer in whole],
        "tbt_s": [round(tbt_longest_gaps_s(answer.token_times_s) or 0.0, 4) for answer in whole],
        "unanswered": len(answers) - len(whole),
        "reasons": sorted({answer.error for answer in answers if answer.error is not None}),
    }


def measure(asked: argparse.Namespace, python: Path, record: dict[str, Any], keep: Any) -> None:
    """All that the record lacks; `keep` gets it after each rate."""
    workload = SharedPrefixes(**record["workload"])
    done = {(each["system"], each["requests_per_s"], each["round"]) for each in record["cells"]}
    left = set(product(SYSTEMS, record["rates"], range(record["rounds"]))) - done
    systems = {str(system) for system, _, _ in left}
    if set(record["probes"]) != {"ours", "vllm"}:
        systems |= {"ours_1", "vllm_1"}
    with ExitStack() as stack, pinned(cores()[1]):
        servers = Servers(stack, python, asked.model, asked.dtype, systems)
        sys.stderr.write("all servers are up; the measurement begins\n")
        for engine, system in (("ours", "ours_1"), ("vllm", "vllm_1")):
            if engine not in record["probes"]:
                record["probes"][engine] = probe(servers.url(system), workload.vocabulary)
        servers.route(record["probes"]["vllm"])
        keep()
        for number in range(record["rounds"]):
            for system in in_order(SYSTEMS, number):
                rates = [rate for rate in record["rates"] if (system, rate, number) in left]
                texts = int.from_bytes(os.urandom(6))  # no earlier run of these servers has seen them
                if rates:
                    fill(servers.url(system), workload.first(texts))
                for rate in rates:
                    found = cell(servers.url(system), workload.arrivals(rate, record["seconds"], number, texts))
                    record["cells"].append({"system": system, "requests_per_s": rate, "round": number, **found})
                    keep()
                    sys.stderr.write(f"round {number}, {system}, {rate:g}/s: {_shown(found)}\n")


def _shown(found: Mapping[str, Any]) -> str:
    if not found["ttft_s"]:
        return f"none of {found['unanswered']} answered: {'; '.join(found['reasons'])}"
    return (
        f"{len(found['ttft_s'])} answers, {found['unanswered']} without, TTFT {np.median(found['ttft_s']):.3f} s,"
        f" TBT {np.median(found['tbt_s']):.3f} s"
    )


def opened(asked: argparse.Namespace) -> dict[str, Any]:
    """The record so far, or a new one.

    Raises:
        ValueError: when the file was measured in another setting.
    """
    setting = {
        "model": asked.model, "dtype": asked.dtype, "rates": asked.rates, "seconds": asked.seconds,
        "rounds": asked.rounds, "kv_tokens": KV_TOKENS, "patience_s": PATIENCE_S, "ttft_limit_s": 1.0,
        "tbt_limit_s": 0.1, "workload": asdict(SharedPrefixes()),
    }  # fmt: skip
    if not asked.out.exists():
        servers, clients = (sorted(each) for each in cores())
        about = {**provenance(), "server_cores": servers, "client_cores": clients}
        return {**about, **setting, "probes": {}, "cells": []}
    record = json.loads(asked.out.read_text(encoding="utf-8"))
    for name, value in setting.items():
        if record.get(name) != value:
            raise ValueError(f"{asked.out} has {name} {record.get(name)!r}, asked is {value!r}; name another file")
    return record


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "data" / "measured" / "real_gain.json")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where vLLM is installed")
    parser.add_argument("--model", default="lab-30m", help="a shape")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="requests per second")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long the requests of a rate arrive")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    try:
        python = environment(SCRIPTS["vLLM"], asked.environments)
        record = opened(asked)

        def keep() -> None:
            with complete_file(asked.out) as file:
                file.write(f"{json.dumps(record)}\n".encode())

        measure(asked, python, record, keep)
    except ValueError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
