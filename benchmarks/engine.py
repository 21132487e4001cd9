"""The engine beside transformers, llama.cpp, OpenVINO and vLLM: writes the JSON, the table and the sentence.

Run: python benchmarks/engine.py [--peers llama.cpp] [--minutes 30] [--threads N]

All peers of a case take turns with us in the same rounds, so a case has one number of ours. A peer other than
transformers is a script of `benchmarks/peers` in an environment of its own, made on first use from the
requirements in the script's head (`peer_environments.py`; llama.cpp is compiled: some minutes). A peer that cannot
be installed here is left out, and one sentence says why. Each peer gets the same weights, prompts and
threads, and its seconds are its own clock's. In float32 its greedy tokens are compared with ours: a peer that
computes something else is no peer. No case begins after the minutes given.
"""  # noqa: INP001  # scripts, not a package

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from peer_environments import SCRIPTS, environment
from speed import ROOT, HuggingFaceContinuous, provenance, rates_of, refresh, with_floors, work_of

from mooncake_lab.bench.engine import Bench, Case, Comparison, decode_case, mixed_case, prefill_case, reuse_case
from mooncake_lab.bench.machine import measure_peaks
from mooncake_lab.bench.measuring import computing_threads
from mooncake_lab.bench.peers import Decoding, Tokens, hugging_face
from mooncake_lab.engine.loading import DTYPES
from mooncake_lab.engine.reference import Clock
from mooncake_lab.engine.weights import random_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on a number of threads, and what is timed: cases, each with a number of rounds."""

    model: str
    dtype: str
    threads: int
    cases: tuple[tuple[Case, int], ...]

    @property
    def label(self) -> str:
        """What names it among those that were left out."""
        return f"{self.model} {self.dtype}, {self.threads} thread{'s' * (self.threads > 1)}"


def settings(threads: int) -> tuple[Setting, ...]:
    """What is measured, the most telling first: a budget cuts the list at its end."""

    def decodes(*sizes: int) -> tuple[tuple[Case, int], ...]:
        return tuple((decode_case(batch, 256, 12), 7) for batch in sizes)

    batches = decodes(1, 4, 8, 32)
    prompts = tuple((prefill_case(tokens), 3) for tokens in (512, 2048))
    reuse = (reuse_case(2048, 1792), 7)
    short = (*batches, (decode_case(8, 1024, 8), 5), *prompts, reuse)
    alone = (Setting(model="lab-30m", dtype="float32", threads=1, cases=decodes(1, 8)),) if threads > 1 else ()
    return (
        Setting(model="lab-30m", dtype="float32", threads=threads, cases=short),
        Setting(model="lab-30m", dtype="bfloat16", threads=threads, cases=(*batches, *prompts, reuse)),
        Setting(model="lab-100m", dtype="float32", threads=threads, cases=(*batches, *prompts)),
        Setting(model="lab-100m", dtype="bfloat16", threads=threads, cases=batches),
        *alone,
        Setting(model="lab-30m", dtype="float32", threads=threads, cases=((mixed_case(64), 1),)),
    )


SERVES: Final = ("vLLM", "vLLM eager")
"""External peers that batch requests which come and go and reuse prefixes: they take part in those cases."""
SMOKE: Final = (
    Setting(
        model="lab-recall",  # of the shapes with heads that vLLM computes on CPUs, the smallest
        dtype="float32",
        threads=1,
        cases=(
            (decode_case(2, 8, 2), 1),
            (prefill_case(8), 1),
            (reuse_case(300, 256), 1),
            (mixed_case(2, scale=0.05), 1),
        ),
    ),
)
"""To see that everything runs; its numbers mean nothing."""


class PeerError(RuntimeError):
    """A peer cannot go on; `peer` is its name."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class PeerProcess:
    """A peer, asked over its standard streams; see `mooncake_lab.bench.peers.Subject`."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self._name, self._process = name, process
        self.version: str = self._read()

    def ask(self, do: str, **arguments: object) -> Any:
        """What the peer answers.

        Raises:
            PeerError: when it cannot go on, with its reason; more of that is on our standard error.
        """
        assert self._process.stdin is not None  # noqa: S101  # it is a pipe
        with suppress(BrokenPipeError):  # why it ended is read below
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        return self._read()

    def seconds(self, prompts: Tokens, new_tokens: Sequence[int], clock: Clock) -> float:
        """Of one prompt up to its first token, or of several requests, by the peer's own clock."""
        del clock
        if len(prompts) > 1:
            return self.ask("serve", prompts=prompts, new_tokens=list(new_tokens))
        (prompt,) = prompts
        return self.ask("prefill", prompt=prompt)

    def reuse_s(self, prompt: list[int], reused_tokens: int, clock: Clock) -> float:
        """Of one prompt up to its first token; see `mooncake_lab.bench.peers.ReusingSubject`."""
        del clock
        return self.ask("reuse", prompt=prompt, reused_tokens=reused_tokens)

    def decoding(self, prompt: list[int], batch: int, most_tokens: int, clock: Clock) -> Decoding:
        """Steps by the peer's own clock."""
        del clock
        self.ask("begin", prompt=prompt, batch=batch, most_tokens=most_tokens)
        return _PeerDecoding(self)

    def _read(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101  # it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(self._name, f"the peer ended with status {self._process.wait()}")
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise PeerError(self._name, str(answer["error"]))  # pyright: ignore[reportUnknownArgumentType]
        return answer


class _PeerDecoding:
    def __init__(self, peer: PeerProcess) -> None:
        self._peer = peer

    @property
    def tokens(self) -> list[int]:
        return self._peer.ask("tokens")

    def turn(self, steps: int) -> float:
        return self._peer.ask("turn", steps=steps)

    def close(self) -> None:
        """The next prompt empties its KVCache."""


@contextmanager
def peer_process(name: str, python: Path, directory: Path, dtype: str) -> Iterator[PeerProcess]:
    """A peer with a model loaded, until the end of the block."""
    words = [str(python), str(SCRIPTS[name]), str(directory), dtype, str(torch.get_num_threads())]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603  # our script
    try:
        yield PeerProcess(name, process)
    finally:
        process.kill()
        process.communicate()


def measure(wanted: Sequence[Setting], external: Mapping[str, Path], budget_s: float) -> dict[str, Any]:
    """Time all settings beside transformers and the peers of `external`, as plain values.

    Args:
        wanted: what is timed.
        external: the interpreter of each peer's environment.
        budget_s: no case begins later; those left out are named as skipped.
    """
    end_s = time.monotonic() + budget_s
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    versions: dict[str, str] = {}
    for setting in wanted:
        if time.monotonic() > end_s:
            skipped += [f"{setting.label}: {case.name}" for case, _ in setting.cases]
            continue
        with computing_threads(setting.threads), ExitStack() as stack:
            bench = Bench(setting.model, setting.dtype, cache_tokens=49_152)
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            # float32 holds bfloat16 exactly; the model is drawn anew because `float` changes it in place
            weights = random_weights(bench.config, device=torch.device("cpu"), dtype=DTYPES[setting.dtype])
            hugging_face(weights).float().save_pretrained(directory)
            for name, python in external.items():
                try:
                    peer = stack.enter_context(peer_process(name, python, directory, setting.dtype))
                except PeerError as error:  # OpenVINO has no bfloat16 cache on processors without AVX-512
                    skipped.append(f"{setting.label}: {name} does not start: {error}")
                    continue
                bench.peers[name], versions[name] = peer, peer.version
            rows += _rows(setting, bench, end_s, skipped)
    about = {**provenance(), "clock": "wall", "transformers": version("transformers"), "peers": versions}
    return {**about, "rows": with_floors(rows), "skipped": skipped}


def _rows(setting: Setting, bench: Bench, end_s: float, skipped: list[str]) -> Iterator[dict[str, Any]]:
    size = DTYPES[setting.dtype].itemsize
    dry = bench.config.width < 256
    peaks = measure_peaks(side=256, copy_bytes=1 << 22, repeats=2) if dry else measure_peaks()
    about = {"model": setting.model, "dtype": setting.dtype, "threads": torch.get_num_threads()}
    for case, rounds in setting.cases:
        if time.monotonic() > end_s:
            skipped.append(f"{setting.label}: {case.name}")
            continue
        peers = [*bench.peers]
        if case.kind == "mixed":
            settings = {"num_blocks": 192, "max_batch_tokens": 512}
            bench.peers["hf-continuous"] = HuggingFaceContinuous(bench.transformers, settings)
            peers = ["hf", "hf-continuous", *(name for name in bench.peers if name in SERVES)]
            # a small burst warms all up; the large one has no time for a round that does not count
            _compared(setting, bench, (mixed_case(4, scale=0.1), 1), peers, skipped)
        if case.kind == "reuse":
            peers = [name for name in peers if name in SERVES]
        work = work_of(case, bench.config, size)
        for found in _compared(setting, bench, (case, rounds), peers, skipped):
            sys.stderr.write(
                f"{setting.model} {setting.dtype} {case.name}: {found.ratio:.2f} x {found.peer}"
                f" ({found.same_tokens} of {found.compared_tokens} tokens the same)\n"
            )
            yield {**about, **asdict(found), **work, "peaks": rates_of(peaks, size)._asdict()}


def _compared(
    setting: Setting, bench: Bench, timed: tuple[Case, int], peers: list[str], skipped: list[str]
) -> list[Comparison]:
    """The comparisons of a case; a peer that cannot go on is named and dropped, and the others are timed again."""
    case, rounds = timed
    while True:
        try:
            return bench.compare(case, peers, rounds, warm_up=case.kind != "mixed") if peers else []
        except PeerError as error:
            skipped.append(f"{setting.label}: {error.peer} ended in {case.name}: {error}")
            peers.remove(error.peer)
            del bench.peers[error.peer]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write, refresh."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", choices=tuple(SCRIPTS), default=tuple(SCRIPTS), help="beside hf")
    parser.add_argument("--environments", type=Path, default=ROOT / ".peers", help="where the peers are installed")
    parser.add_argument("--minutes", type=float, default=30.0, help="after so many, what is left is skipped")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs; writes nothing")
    chosen = parser.parse_args(arguments)
    pythons: dict[str, Path] = {}
    for name in chosen.peers:
        try:
            pythons[name] = environment(SCRIPTS[name], chosen.environments)
        except ValueError as error:
            sys.stderr.write(f"{name}: {error}\n")
    found = measure(SMOKE if chosen.smoke else settings(chosen.threads), pythons, 60 * chosen.minutes)
    text = json.dumps(found, indent=1) + "\n"
    if chosen.smoke:
        sys.stdout.write(text)
        return
    measured = ROOT / "data" / "measured" / "cpu_engine.json"
    measured.write_text(text, encoding="utf-8")
    refresh(measured)


if __name__ == "__main__":
    main()
