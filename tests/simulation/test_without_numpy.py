"""The simulator where there is no numpy: in a browser."""

import json
import os
import subprocess
import sys
from pathlib import Path

import by_hand
import msgspec
import pytest
from by_hand import four_requests

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import SLO
from mooncake_lab.metrics import run_summary
from mooncake_lab.simulation import Cluster
from mooncake_lab.workload import read_trace

BLOCK = """
import sys
for name in ("numpy", "pandas", "torch", "scipy"):
    sys.modules[name] = None  # its import fails
"""

RUN = """
import msgspec
from by_hand import four_requests
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.simulation import Cluster
spec, model, requests = four_requests()
sys.stdout.buffer.write(msgspec.json.encode({run}.run(requests)))
"""

SUMMARISE = """
import json
from by_hand import four_requests
from mooncake_lab.core import SLO
from mooncake_lab.metrics import run_summary
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.simulation import Cluster
from mooncake_lab.workload import read_trace
model = four_requests()[1]
for make, spec in (
    (Cluster, ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1)),
    (Cluster, ClusterSpec.coupled(nodes=2, prefix_caching=True)),
):
    print(json.dumps(run_summary(make(spec, model).run(read_trace(sys.argv[1]).requests()), SLO())))
"""


def without_numpy(program, *arguments):
    """What a program prints in an interpreter that has none of these packages."""
    command = [sys.executable, "-c", BLOCK + program, *arguments]
    helpers = {"PYTHONPATH": str(Path(by_hand.__file__).parent)}
    found = subprocess.run(command, capture_output=True, check=False, env=os.environ | helpers)
    assert found.stderr == b""
    return found.stdout


@pytest.mark.parametrize("kind", ["disaggregated", "coupled"])
def test_a_run_needs_no_numpy(kind):
    """With numpy, pandas, torch and scipy blocked, a run writes the same log."""
    spec, model, requests = four_requests()
    if kind == "disaggregated":
        run, cluster = "Cluster(spec, model)", Cluster(spec, model)
    else:
        run = "Cluster(ClusterSpec.coupled(nodes=2, block_size_tokens=512), model)"
        cluster = Cluster(ClusterSpec.coupled(nodes=2, block_size_tokens=512), model)
    assert without_numpy(RUN.replace("{run}", run)) == msgspec.json.encode(cluster.run(requests))


def test_reading_a_trace_and_summarising_a_run_need_no_numpy(tmp_path):
    """From the file of a trace to the printed summaries of two clusters, every bit is the same without them."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 400 * i,
            "input_length": 700 + 90 * i,
            "output_length": 1 + 3 * i,
            "hash_ids": [0, *range(i, i + n)],
        }
        for i, n in ((i, -(-(700 + 90 * i) // 512) - 1) for i in range(12))
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model, requests = four_requests()[1], list(read_trace(path).requests())
    expected = [
        run_summary(
            Cluster(ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1), model).run(requests), SLO()
        ),
        run_summary(Cluster(ClusterSpec.coupled(nodes=2, prefix_caching=True), model).run(requests), SLO()),
    ]
    assert [json.loads(line) for line in without_numpy(SUMMARISE, str(path)).splitlines()] == expected
    assert all(numbers["finished"] and numbers["tbt_p90_s"] for numbers in expected)
