"""Records what kvcache-simulator counts on the released traces: `data/measured/kvcache_simulator.json`.

Run: $(python benchmarks/peer_environments.py kvcache-simulator) benchmarks/peers/kvcache_simulator.py FOLDER
The folder is that of the traces. It needs a C++ compiler.
"""

# /// script
# requires-python = ">=3.11"
# dependencies = ["kvcache-simulator==0.1.3"]
# ///

import json
import sys
from pathlib import Path
from typing import Any

from kvcache_sim.cpp_backend import run_cpp_sweep
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.trace import parse_trace_file

RECORD = Path(__file__).parents[2] / "data/measured/kvcache_simulator.json"
SHARES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3)
"""Capacities, as shares of the trace's different blocks; two more are the same for both traces."""
POLICIES = ["fifo", "lru", "optimal"]


def counted(path: Path) -> dict[str, Any]:
    """The hit tokens of a trace by policy and capacity, and what they are counted over."""
    trace = parse_trace_file(path, block_size=512)
    plan = build_execution_plan(trace)
    sizes = sorted({50, 6553, *(round(plan.unique_blocks * share) for share in SHARES)})
    found = run_cpp_sweep(trace, capacities=sizes, policies=POLICIES, warmup_requests=plan.warmup_requests)
    return {
        "unique_blocks": plan.unique_blocks,
        "measured_from": plan.warmup_requests,
        "measured_tokens": plan.total_measured_tokens,
        "ceiling": found.ceiling.hitTokens,
        "hits": {name: {str(size): found.results[name, size].hitTokens for size in sizes} for name in POLICIES},
    }


if __name__ == "__main__":
    record = json.loads(RECORD.read_text())
    record["traces"] = {
        name: counted(Path(sys.argv[1]) / f"{name}_trace.jsonl") for name in ("conversation", "synthetic")
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
