"""A latency model fitted to a log is the one that made the log."""

import pytest

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.perf.calibration import model_from_log
from mooncake_lab.simulation import Cluster
from mooncake_lab.workload import SharedPrefix


def test_simulated_log_gives_the_model_back(believed):
    """Fitted to what the simulator logged, the model is the one it was given."""
    trace = SharedPrefix(
        requests=200, requests_per_s=20.0, input_tokens=900, shared_tokens=320, output_tokens=30, prefixes=8,
        block_size_tokens=16,
    ).make()  # fmt: skip
    mixed = [one for i, one in enumerate(trace.requests()) if i % 2 or one.request.id < 100]
    spec = ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=1, block_size_tokens=16)
    log = Cluster(spec, believed).run(mixed)
    found = model_from_log(log, believed)
    assert found.prefill.max_relative_error < 1e-6
    assert found.decode.max_relative_error < 1e-6
    decode = found.model.decode
    assert decode.constant_s == pytest.approx(believed.decode.constant_s, rel=1e-3)
    assert decode.per_context_token_s == pytest.approx(believed.decode.per_context_token_s, rel=1e-3)
    assert found.model.prefill.seconds(900.0, 320.0) == pytest.approx(believed.prefill.seconds(900.0, 320.0))


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


def test_too_little_is_refused(believed):
    """An empty log fits nothing, and says so."""
    with pytest.raises(ValueError, match="no prefills"):
        model_from_log([], believed)
