"""The simulator where there is no numpy: in a browser."""

import subprocess
import sys

import msgspec
import pytest

from mooncake_lab.simulation import Cluster, CoupledCluster, CoupledSpec, four_requests

PROGRAM = """
import sys
for name in ("numpy", "pandas", "torch", "scipy"):
    sys.modules[name] = None  # its import fails
import msgspec
from mooncake_lab.simulation import Cluster, CoupledCluster, CoupledSpec, four_requests
spec, model, requests = four_requests()
sys.stdout.buffer.write(msgspec.json.encode({run}.run(requests)))
"""


@pytest.mark.parametrize("kind", ["disaggregated", "coupled"])
def test_a_run_needs_no_numpy(kind):
    """With numpy, pandas, torch and scipy blocked, a run writes the same log."""
    spec, model, requests = four_requests()
    if kind == "disaggregated":
        run, cluster = "Cluster(spec, model)", Cluster(spec, model)
    else:
        run = "CoupledCluster(CoupledSpec(nodes=2, block_size_tokens=512), model)"
        cluster = CoupledCluster(CoupledSpec(nodes=2, block_size_tokens=512), model)
    program = PROGRAM.replace("{run}", run)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert found.stderr == b""
    assert found.stdout == msgspec.json.encode(cluster.run(requests))
