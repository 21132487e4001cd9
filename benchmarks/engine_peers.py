"""The engine beside llama.cpp and OpenVINO: measures, writes the JSON, refreshes table and README's sentence.

Run: python benchmarks/engine_peers.py [--peers llama.cpp] [--minutes 15] [--threads N]

A peer is a script of `benchmarks/peers` in an environment of its own, made on first use from the requirements in
the script's head (llama.cpp is compiled: some minutes). It gets the same weights, prompts and threads, and takes
turns with us: seconds are its own clock's, and a ratio is taken within a round. In float32 its greedy tokens are
compared with ours: a peer that computes something else is no peer.
"""  # noqa: INP001  # scripts, not a package

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch

from mooncake_lab.bench import speed_table
from mooncake_lab.bench.baselines import OurEngine, hugging_face, our_engine
from mooncake_lab.bench.engine import Case, comparison, decode_case, prefill_case
from mooncake_lab.bench.floors import rates_of, with_floors
from mooncake_lab.bench.interleaved import OurDecoding
from mooncake_lab.bench.machine import measure_peaks, provenance
from mooncake_lab.bench.rounds import alternate
from mooncake_lab.bench.stages import computing_threads
from mooncake_lab.engine.backends import choose_backend
from mooncake_lab.engine.config import config_from_shape
from mooncake_lab.engine.loading import DTYPES
from mooncake_lab.engine.model import make_model
from mooncake_lab.engine.weights import random_weights
from mooncake_lab.perf import Hardware, model_shape

ROOT: Final = Path(__file__).parents[1]
PEERS: Final[Mapping[str, Path]] = MappingProxyType(
    {
        "llama.cpp": ROOT / "benchmarks" / "peers" / "llama_cpp_peer.py",
        "OpenVINO": ROOT / "benchmarks" / "peers" / "openvino_peer.py",
    }
)
_METADATA: Final = re.compile(r"(?m)^# /// script\n(?P<body>(?:#.*\n)+?)# ///$")
"""Requirements in the head of a script, as PEP 723 has them."""
_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model and what is timed of it."""

    model: str
    dtype: str
    cases: tuple[Case, ...]


def settings() -> tuple[Setting, ...]:
    """The most telling first: a budget cuts the list at its end."""
    decodes = tuple(decode_case(batch, 256, 12) for batch in (1, 4, 8, 32))
    prompts = (prefill_case(512), prefill_case(2048))
    return (
        Setting(model="lab-30m", dtype="float32", cases=(*decodes, *prompts)),
        Setting(model="lab-30m", dtype="bfloat16", cases=(*decodes, *prompts)),
        Setting(model="lab-100m", dtype="float32", cases=(*decodes, *prompts)),
        Setting(model="lab-100m", dtype="bfloat16", cases=decodes),
    )


SMOKE: Final = (
    Setting(model="lab-tiny", dtype="float32", cases=(decode_case(2, 8, 2), prefill_case(8))),
    Setting(model="lab-tiny", dtype="bfloat16", cases=(decode_case(2, 8, 2),)),
)
"""To see that everything runs; its numbers mean nothing."""


class PeerProcess:
    """A peer, asked over its standard streams."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.version: str = self._read()

    def ask(self, do: str, **arguments: object) -> Any:
        """What the peer answers.

        Raises:
            RuntimeError: when it has ended; what it said of that is on our standard error.
        """
        assert self._process.stdin is not None  # noqa: S101  # it is a pipe
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101  # it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with status {self._process.wait()}")
        return json.loads(line)


@contextmanager
def peer_process(python: Path, script: Path, directory: Path, dtype: str) -> Iterator[PeerProcess]:
    """A peer with a model loaded, until the end of the block."""
    words = [str(python), str(script), str(directory), dtype, str(torch.get_num_threads())]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603  # our script
    try:
        yield PeerProcess(process)
    finally:
        process.kill()
        process.communicate()


def environment(script: Path, folder: Path) -> Path:
    """The interpreter of a peer's environment, which is made where it is missing.

    Raises:
        ValueError: when the script names no requirements.
    """
    found = _METADATA.search(script.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{script}: its head names no requirements")
    told = tomllib.loads(re.sub(r"(?m)^# ?", "", found["body"]))
    made = folder / script.stem
    done, python = made / "requirements.json", made / "bin" / "python"
    if not done.is_file() or json.loads(done.read_text(encoding="utf-8")) != told["dependencies"]:
        sys.stderr.write(f"making {made}: some minutes\n")
        venv.create(made, with_pip=True, clear=True)
        elsewhere = told.get("tool", {}).get("uv", {}).get("extra-index-url", ())
        options = [f"--extra-index-url={index}" for index in elsewhere]
        command = [python, "-m", "pip", "install", "--quiet", *options, *told["dependencies"]]
        subprocess.run(command, check=True)  # noqa: S603  # pinned
        done.write_text(json.dumps(told["dependencies"]), encoding="utf-8")
    return python


def measure(wanted: Sequence[Setting], peers: Mapping[str, Path], rounds: int, budget_s: float) -> dict[str, Any]:
    """Time all settings beside all peers, as plain values; what comes after the budget is named as skipped."""
    end_s = time.monotonic() + budget_s
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    versions: dict[str, str] = {}
    for setting in wanted:
        with tempfile.TemporaryDirectory() as directory:
            ours, peaks = _ours(setting, Path(directory)), measure_peaks(kernels=True)
            for name, python in peers.items():
                if time.monotonic() > end_s:
                    skipped += [f"{setting.model} {setting.dtype} {name}: {case.name}" for case in setting.cases]
                    continue
                with peer_process(python, PEERS[name], Path(directory), setting.dtype) as peer:
                    versions[name] = peer.version
                    for case in setting.cases:
                        row = _row(setting, case, ours, peer, peaks, rounds) | {"peer": name}
                        rows.append(row)
                        sys.stderr.write(
                            f"{setting.model} {setting.dtype} {case.name}: {row['ratio']:.2f} x {name}"
                            f" ({row['same_tokens']} of {row['compared_tokens']} tokens the same)\n"
                        )
    about = {**provenance(), "clock": "wall", "transformers": version("transformers"), "peers": versions}
    return {**about, "rows": with_floors(rows), "skipped": skipped}


def _ours(setting: Setting, directory: Path) -> OurEngine:
    """Our engine; the same weights as a Hugging Face directory, in float32, which holds bfloat16 exactly."""
    config = config_from_shape(model_shape(setting.model), max_positions=16384)
    cpu, dtype = torch.device("cpu"), DTYPES[setting.dtype]
    hugging_face(random_weights(config, device=cpu, dtype=dtype)).float().save_pretrained(directory)
    weights = random_weights(config, device=cpu, dtype=dtype)
    return our_engine(make_model(weights, choose_backend(cpu, dtype)), cache_tokens=49_152)


def _row(
    setting: Setting, case: Case, ours: OurEngine, peer: PeerProcess, peaks: Hardware, rounds: int
) -> dict[str, Any]:
    config = ours.engine.runner.model.config
    prompt = np.random.default_rng(0).integers(0, config.vocabulary, case.prompt_tokens[0]).tolist()
    work = _prefills if case.kind == "prefill" else _decodes
    times, our_tokens, peer_tokens = work(case, prompt, ours, peer, rounds)
    found = comparison(case, times, config, DTYPES[setting.dtype].itemsize, peaks)
    same = next(
        (i for i, pair in enumerate(zip(our_tokens, peer_tokens, strict=True)) if pair[0] != pair[1]), None
    )
    return {
        "model": setting.model,
        "dtype": setting.dtype,
        "threads": torch.get_num_threads(),
        **asdict(found),
        "compared_tokens": len(our_tokens),
        "same_tokens": len(our_tokens) if same is None else same,
        "peaks": rates_of(peaks, DTYPES[setting.dtype].itemsize)._asdict(),
    }


Times = tuple[list[list[float]], list[int], list[int]]
"""Seconds of our rounds and of the peer's, our tokens, and the peer's."""


def _prefills(case: Case, prompt: list[int], ours: OurEngine, peer: PeerProcess, rounds: int) -> Times:
    def own() -> float:
        start = time.perf_counter()
        ours.generate([prompt], (1,))
        return time.perf_counter() - start

    del case
    return _after_one(own, lambda: peer.ask("prefill", prompt=prompt), rounds), [], []


def _decodes(case: Case, prompt: list[int], ours: OurEngine, peer: PeerProcess, rounds: int) -> Times:
    batch, steps = len(case.new_tokens), case.new_tokens[0] - 1
    most = (steps + 1) * (rounds + 1) + 2
    decoding = OurDecoding(ours.engine, prompt, batch, most, time.perf_counter)
    peer.ask("begin", prompt=prompt, batch=batch, most_tokens=most)
    times = _after_one(lambda: decoding.turn(steps), lambda: peer.ask("turn", steps=steps), rounds)
    tokens = list(decoding.tokens)
    decoding.close()
    return times, tokens, peer.ask("tokens")


def _after_one(own: Callable[[], float], theirs: Callable[[], float], rounds: int) -> list[list[float]]:
    """Both in turns, after one that does not count."""
    return [seconds[1:] for seconds in alternate([own, theirs], range(rounds + 1))]


def main() -> None:
    """Measure, write, refresh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=tuple(PEERS))
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where the peers are installed")
    parser.add_argument("--minutes", type=float, default=15.0, help="after so many, what is left is skipped")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs; writes nothing")
    chosen = parser.parse_args()
    pythons = {name: environment(PEERS[name], chosen.environments) for name in chosen.peers}
    with computing_threads(chosen.threads):
        wanted, rounds = (SMOKE, 1) if chosen.smoke else (settings(), _ROUNDS)
        found = measure(wanted, pythons, rounds, 60 * chosen.minutes)
    if chosen.smoke:
        sys.stdout.write(json.dumps(found["rows"], indent=1) + "\n")
        return
    measured = ROOT / "data" / "measured" / "cpu_engine_peers.json"
    measured.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    speed_table.main(measured, ROOT / "benchmarks" / "README.md", mark="peers")
    speed_table.refresh_readme(ROOT)


if __name__ == "__main__":
    main()
