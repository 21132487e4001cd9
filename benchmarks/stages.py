"""Measure prefills and decode steps of the reference engine: writes `data/measured/cpu_stages.json`.

Run: python benchmarks/stages.py --threads 1 --clock processor --output data/measured/cpu_stages.json
"""  # noqa: INP001  # scripts, not a package

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mooncake_lab.bench.stages import StagePlan, measure_stages
from mooncake_lab.perf import model_shape


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure this machine and write the result; about half a minute for `lab-30m` on two idle cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab-30m", help="a shape of perf.MODELS")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7, help="repetitions of every point")
    parser.add_argument("--threads", type=int, help="that torch computes with (default: as many as it likes)")
    parser.add_argument(
        "--clock", choices=("wall", "processor"), default="wall", help="processor needs --threads 1"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[128, 256, 512, 1024, 2048], help="prompt lengths"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    plan = StagePlan(
        prefill_tokens=tuple(chosen.tokens),
        decode_points=tuple((batch, context) for context in chosen.tokens[1::2] for batch in (1, 2, 4, 8, 16)),
        rounds=chosen.rounds,
        threads=chosen.threads,
        clock=chosen.clock,
    )
    measured = measure_stages(model_shape(chosen.model), plan, device=chosen.device)
    chosen.output.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


if __name__ == "__main__":
    main()
