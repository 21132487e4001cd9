"""The engine beside transformers: measures, writes the JSON, refreshes the table and the README's sentence.

Run: python benchmarks/engine.py [--minutes 15] [--threads N] [--clock wall]

Paired, interleaved, medians; see `mooncake_lab.bench.engine` for what is timed. No case begins after the minutes
given. On a busy machine `--threads 1 --clock processor` counts what was computed, not what was waited.
"""  # noqa: INP001  # scripts, not a package

import sys
from pathlib import Path

from mooncake_lab.bench import engine_suite, speed_table

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Measure, write, refresh."""
    measured = ROOT / "data" / "measured" / "cpu_engine.json"
    engine_suite.main([str(measured), *sys.argv[1:]])
    speed_table.main(measured, ROOT / "benchmarks" / "README.md")
    speed_table.refresh_readme(ROOT)


if __name__ == "__main__":
    main()
