"""A latency model fitted to a live run serves the same requests in the simulator."""

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.perf.calibration import model_from_log
from mooncake_lab.simulation import Cluster


def test_live_log_can_be_simulated(cluster, traced):
    """A live run gives a model, and the simulator under it serves the same requests with the same reuse."""
    cluster.reset_prefix_cache()
    requests = traced(16, every_s=0.05)
    found = model_from_log(cluster.run(requests), cluster.model)
    assert found.model.decode.step_s(1, 80) > 0
    assert found.model.schedule_s < 1
    spec = ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1, block_size_tokens=16, cache_tokens=65_536)
    log = Cluster(spec, found.model).run(requests)
    assert sum(type(record).__name__ == "Finished" for record in log) == len(requests)
