"""How far the simulator's predictions are from servers of others and from ours, on this machine.

Run: python benchmarks/calibration.py TRACE [TRACE ...] [--out data/measured/calibration.json]

`mooncake-lab calibrate` fits the simulator to one server after the other, and predicts held-out runs of each
trace: our server with a coupled worker and with a prefill and a decode worker, vLLM's, and with `--llama-server
PATH` that of llama.cpp, all with the same weights. All processes of a server are pinned to one core and the
clients to another. Each report has five rates with 200 requests each, three times. The file is written after
each report, and what it has is not measured again.
"""  # noqa: INP001  # scripts, not a package

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from http_servers import (
    MODEL,
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

from mooncake_lab.core import complete_file

MAX_REQUESTS: Final = 32
CHUNK_TOKENS: Final = 512
MAX_TOKENS: Final = 4096
"""A request's."""
KV_TOKENS: Final = 65_536
OUT: Final = ROOT / "data" / "measured" / "calibration.json"
Server = tuple[list[str], Mapping[str, str], list[str]]
"""The command of a server, its environment, and what `calibrate` is told that the server does not say."""


def servers(folder: Path, dtype: str, port: int, asked: argparse.Namespace) -> dict[str, Callable[[], Server]]:
    """How each server starts, by its name in the file."""
    limits = ["--max-num-seqs", str(MAX_REQUESTS), "--max-model-len", str(MAX_TOKENS)]
    budget = ["--max-num-batched-tokens", str(CHUNK_TOKENS)]
    told = [*limits[:2], *budget]

    def ours(*workers: str) -> Server:
        own = ["--max-requests", str(MAX_REQUESTS), *limits[2:], "--chunk-tokens", str(CHUNK_TOKENS)]
        words = our_words(folder, dtype, port, *workers, *own, "--device-tokens", str(KV_TOKENS))
        return words, {}, []

    def vllm() -> Server:
        python = environment(SCRIPTS["vLLM"], asked.environments)
        blocks = ["--block-size", "32", "--num-gpu-blocks-override", str(KV_TOKENS // 32 + 1)]
        words = vllm_words(
            python, folder, dtype, port, *limits, *budget, *blocks, "--enable-prompt-tokens-details"
        )
        return words, vllm_environment(python) | {"VLLM_SERVER_DEV_MODE": "1"}, told

    def llama_cpp() -> Server:
        slots = MAX_REQUESTS // 2
        words = [
            str(asked.llama_server), "--model", str(asked.gguf), "--alias", MODEL, "--host", "127.0.0.1", "--port",
            str(port), "--threads", "1", "--threads-batch", "1", "--threads-http", "2", "--parallel", str(slots),
            "--ctx-size", str(KV_TOKENS), "--batch-size", str(CHUNK_TOKENS), "--ubatch-size", str(CHUNK_TOKENS),
            "--no-webui",
        ]  # fmt: skip
        said = ["--max-num-seqs", str(slots), *budget, "--kv-tokens", str(KV_TOKENS), "--block-size", "1",
                "--scheduler", "sarathi_serve", "--max-model-len", str(KV_TOKENS // slots)]  # fmt: skip
        return words, {}, said

    found: dict[str, Callable[[], Server]] = {
        "ours, coupled": lambda: ours("--coupled-nodes", "1"),
        "ours, 1P+1D": lambda: ours("--prefill-nodes", "1", "--decode-nodes", "1"),
        "vLLM": vllm,
    }
    return found | ({"llama.cpp": llama_cpp} if asked.llama_server else {})


def calibrated(url: str, trace: Path, told: Sequence[str], asked: argparse.Namespace) -> dict[str, Any]:
    """The report of `mooncake-lab calibrate`, whose process runs on the core of the clients."""
    words = [
        sys.executable, "-m", "mooncake_lab", "calibrate", url, "--trace", str(trace), "--divide",
        str(asked.divide), "--num-prompts", str(asked.num_prompts), "--repetitions", str(asked.repetitions),
        "--json", *told,
    ]  # fmt: skip
    with pinned(cores()[1]):
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE)  # noqa: S603  # the words above
    return json.loads(done.stdout)


def main() -> None:
    """Calibrate each server on each trace that the file lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python benchmarks/calibration.py conversation_trace.jsonl synthetic_trace.jsonl",
    )
    parser.add_argument("traces", nargs="+", type=Path, help="held-out runs are requests of these")
    parser.add_argument("--servers", nargs="*", help="which, by name; all by default")
    parser.add_argument("--model", default="lab-30m", help="a shape")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and KVCache")
    parser.add_argument("--divide", type=int, default=32, help="lengths of the traces are divided by it")
    parser.add_argument("--num-prompts", type=int, default=200, help="requests of a run")
    parser.add_argument("--repetitions", type=int, default=3, help="how often everything is measured")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where vLLM is installed")
    parser.add_argument("--llama-server", type=Path, help="the program of llama.cpp")
    parser.add_argument("--gguf", type=Path, help="the weights for it; peers/gguf_file.py writes them")
    parser.add_argument("--weights", type=Path, help="a folder with the model in float32; made if missing")
    parser.add_argument("--out", type=Path, default=OUT, help="the file")
    asked = parser.parse_args()
    if bool(asked.llama_server) != bool(asked.gguf):
        parser.error("--llama-server needs --gguf, and the other way round")
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.weights or Path(scratch) / "model"
        if not folder.is_dir():
            save_model(asked.model, "float32", folder)
        measure(folder, asked)


def measure(folder: Path, asked: argparse.Namespace) -> None:
    """Each server on each trace, one after the other; the file is written after each."""
    found: dict[str, Any] = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.is_file() else {}
    done = {(each["server"], each["trace_file"]) for each in found.get("calibrations", ())}
    port = free_port()
    for name, start in servers(folder, asked.dtype, port, asked).items():
        for trace in asked.traces:
            if (name, trace.name) in done or (asked.servers and name not in asked.servers):
                continue
            words, environ, told = start()
            about = {"server": name, "trace_file": trace.name} | provenance()
            with running(words, cores()[0], environ) as process:
                wait_until_open(process, port, name)
                sys.stderr.write(f"{name}, {trace.name}\n")
                report = calibrated(f"http://127.0.0.1:{port}", trace, told, asked)
            kept = {key: value for key, value in report.items() if key != "probes"}
            kept["rates"] = [{k: v for k, v in rate.items() if k != "points"} for rate in report["rates"]]
            shown = {"model": asked.model, "dtype": asked.dtype, "divide": asked.divide}
            found = shown | {"calibrations": [*found.get("calibrations", ()), about | kept]}
            with complete_file(asked.out) as file:
                file.write((json.dumps(found, allow_nan=False) + "\n").encode())


if __name__ == "__main__":
    main()
