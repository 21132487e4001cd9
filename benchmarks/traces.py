"""How fast a trace file is read, and in how much memory: rows and MB per second of one core, for several formats.

Run: python benchmarks/traces.py [--rows 1000000] [--ids 8]

Each file is made first, and then read by a process of its own. Half of the ids of a prompt are those of an earlier
one, or none are; the worst case for memory is the second.
"""  # noqa: INP001  # scripts, not a package

import argparse
import gzip
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from mooncake_lab.workload import read_trace

_BLOCK: Final = 512


def mooncake(rows: int, ids: int, shared: float) -> Iterator[str]:
    """Lines of Mooncake's format."""
    for number, blocks in enumerate(_prompts(rows, ids, shared)):
        line = {
            "timestamp": 5 * number,
            "input_length": ids * _BLOCK - 7,
            "output_length": 120,
            "hash_ids": blocks,
        }
        yield json.dumps(line | {"hash_ids": blocks})


def contradicting(rows: int, ids: int, shared: float) -> Iterator[str]:
    """The same, and a line whose ids stand for other blocks than before, so that each id has to be looked up."""
    yield from mooncake(rows - 1, ids, shared)
    line = {"timestamp": 5 * rows, "input_length": ids * _BLOCK, "output_length": 1}
    yield json.dumps(line | {"hash_ids": [*range(1, ids + 1)]})


def bailian(rows: int, ids: int, shared: float) -> Iterator[str]:
    """Lines of the Qwen-Bailian traces."""
    for number, blocks in enumerate(_prompts(rows, ids, shared)):
        line = {"chat_id": number, "parent_chat_id": -1, "timestamp": number / 200, "input_length": ids * 16 - 3}
        yield json.dumps(line | {"output_length": 120, "type": "text", "turn": 1, "hash_ids": blocks})


def weka(rows: int, ids: int, _shared: float) -> Iterator[str]:
    """Sessions of ten growing calls each."""
    for session in range(-(-rows // 10)):
        calls = [
            {"t": 3.0 * turn, "type": "s", "in": 64 * (ids + turn), "out": 50, "hash_ids": [*range(ids + turn)]}
            for turn in range(-4, 6)
        ]
        for turn, call in enumerate(calls):
            call["t"] = 3.0 * turn
        yield json.dumps({"id": f"s{session}", "block_size": 64, "hash_id_scope": "local", "requests": calls})


def azure(rows: int, _ids: int, _shared: float) -> Iterator[str]:
    """A table of times and lengths."""
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    for number in range(rows):
        seconds = number // 100
        clock = f"{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{number % 100:02}00000"
        yield f"2024-05-{10 + seconds // 86400:02} {clock}+00:00,{1000 + number % 3000},{1 + number % 300}"


def _prompts(rows: int, ids: int, shared: float) -> Iterator[list[int]]:
    drawn = random.Random(0)  # noqa: S311  # nothing secret
    kept, fresh = round(ids * shared), 0
    prefixes = list[list[int]]()
    for _ in range(rows):
        front = drawn.choice(prefixes) if prefixes and kept else []
        own = list(range(fresh, fresh + ids - len(front)))
        fresh += len(own)
        if kept and len(prefixes) < 5000:
            prefixes.append([*front, *own][:kept])
        yield [*front, *own]


CASES: Final[dict[str, tuple[Callable[[int, int, float], Iterator[str]], float]]] = {
    "mooncake, half shared": (mooncake, 0.5),
    "mooncake, nothing shared": (mooncake, 0.0),
    "mooncake, a contradiction": (contradicting, 0.0),
    "mooncake, gzip": (mooncake, 0.5),
    "bailian, half shared": (bailian, 0.5),
    "weka": (weka, 0.0),
    "azure": (azure, 0.0),
}


def read(path: Path) -> None:
    """Read a file, and print what that took."""
    started_s = time.process_time()
    rows = len(read_trace(path))
    spent_s = time.process_time() - started_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rows": rows, "cpu_s": spent_s, "peak_mib": peak}))  # noqa: T201


def main() -> None:
    """Make the files and read them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ids", type=int, default=8, help="blocks of a prompt")
    parser.add_argument("--only", nargs="*", help="cases that begin like this")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.read is not None:
        read(chosen.read)
        return
    print(f"{'case':26} {'rows/s':>9} {'MB/s':>6} {'peak MiB':>9}   of {chosen.rows:,} rows")  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        for name, (lines, shared) in CASES.items():
            if chosen.only and not any(name.startswith(each) for each in chosen.only):
                continue
            path = Path(folder) / "trace"
            size = 0
            with (gzip.open if "gzip" in name else open)(path, "wt", encoding="utf-8") as file:
                for line in lines(chosen.rows, chosen.ids, shared):
                    size += file.write(line + "\n")
            command = [sys.executable, __file__, "--read", str(path)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # noqa: S603
            rate, speed = found["rows"] / found["cpu_s"], size / found["cpu_s"] / 1e6
            print(f"{name:26} {rate:9,.0f} {speed:6.1f} {found['peak_mib']:9,.0f}")  # noqa: T201


if __name__ == "__main__":
    main()
