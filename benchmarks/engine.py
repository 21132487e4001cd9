"""The engine beside transformers on this machine: ratios, and how far both are from what the machine allows.

Run: python benchmarks/engine.py [--quick] [--dtype float32] [--out FILE]

Paired, interleaved, medians; see `mooncake_lab.engine.bench` for what is timed. Takes about a quarter of an hour
on two idle cores; on a busy machine trust the ratios, and look at their spread first.
"""  # noqa: INP001  # scripts, not a package

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mooncake_lab.engine.bench import Bench, Case, decode_case, mixed_case, prefill_case, report, table

DECODES = [(1, 256), (4, 256), (8, 256), (32, 256), (1, 2048), (8, 1024)]


def cases(*, quick: bool) -> list[tuple[Case, str]]:
    """What is timed, and beside whom."""
    if quick:
        return [
            (decode_case(8, 256, 8), "hf"),
            (prefill_case(512), "hf"),
            (mixed_case(8, scale=0.5), "hf-continuous"),
        ]
    found = [(decode_case(batch, prompt), "hf") for batch, prompt in DECODES]
    found += [(prefill_case(tokens), "hf") for tokens in (256, 512, 2048)]
    return [*found, (mixed_case(64), "hf"), (mixed_case(64), "hf-continuous")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three cases, two minutes")
    parser.add_argument("--shape", action="append", help="default: lab-30m and lab-100m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for shape in arguments.shape or ["lab-30m", "lab-100m"]:
        bench = Bench(shape, arguments.dtype)
        rows = []
        for case, peer in cases(quick=arguments.quick):
            rows.append(bench.compare(case, peer, arguments.rounds))
            sys.stdout.write(f"{shape} {arguments.dtype} beside {peer}\n{table(rows[-1:])}\n")
            sys.stdout.flush()
        found[f"{shape} {arguments.dtype}"] = report(rows, bench.peaks, "cpu")
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
