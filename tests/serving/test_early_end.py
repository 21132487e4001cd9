"""A cluster before its first run: a worker that ends then and is replaced serves like any other."""

import flat
import numpy as np
import pytest
from quiet_workers import Line, QuietCluster

from mooncake_lab.conductor import LatencyEstimator, Placement
from mooncake_lab.serving import ClusterRuntime
from mooncake_lab.serving.messages import PrefillOrder
from mooncake_lab.serving.stream import FailedError


def test_a_worker_replaced_before_the_first_run_is_up(believed):
    """One ends while the others are timed, and its replacement comes up; then the run begins."""
    runtime = ClusterRuntime(
        *flat.live(decode_nodes=2), model=believed, estimate=LatencyEstimator(believed), write=lambda _: None
    )

    def up(name):
        line = runtime.supervisor.connections[name] = Line(name, max_context_tokens=4096, capacity_tokens=4096)
        runtime.supervisor.ready = line.ready
        runtime._worker_up(name, line)

    for name in runtime.spec.roles:
        up(name)
    del runtime.supervisor.connections["decode-1"]
    runtime._worker_exit("decode-1")
    up("decode-1")
    runtime.begin_run()
    assert {worker.name for worker in runtime.workers} == set(runtime.spec.roles)


class Fetches:
    """A prefix from another worker."""

    def place(self, request, view, estimate):
        """The same for all requests."""
        del view, estimate
        return Placement(
            request_id=request.id, prefill="prefill-1", decode="decode-0", reused_tokens=16, fetched_tokens=16,
            fetch_from="prefill-0", expected_ttft_s=2.0, expected_tbt_s=0.0, reason="so",
        )  # fmt: skip


def test_an_order_that_cannot_be_sent_leaves_no_flow(believed, monkeypatch):
    """Its request fails, and the worker that it would have fetched from counts as sending nothing."""
    cluster = QuietCluster(believed, prefill_nodes=2, placement=Fetches())

    line = cluster.lines["prefill-1"]
    send = line.send

    def broken(*orders):
        if any(isinstance(order, PrefillOrder) for order in orders):
            raise TypeError("this order cannot be encoded")
        send(*orders)

    monkeypatch.setattr(line, "send", broken)
    with pytest.raises(FailedError, match="cannot be encoded"):
        cluster.submit(np.arange(64, dtype=np.int32))
    assert cluster.is_free()
    assert not any(worker.prefill.sending for worker in cluster.runtime.workers)
