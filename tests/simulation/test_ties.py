"""Believed backlogs are exact: what was queued and is gone leaves no residue that decides between idle nodes."""

import math
from collections import Counter

import pytest
from drawn import REALISTIC, REQUESTS, clusters
from families import requests_of
from hypothesis import given, settings

from mooncake_lab.cluster import Attempt, WorkerState
from mooncake_lab.conductor import LoadBalance
from mooncake_lab.core import Placed, Request, TracedRequest, blocks_for
from mooncake_lab.simulation import Cluster, ClusterSpec


def burst_then_calm(calm):
    """Forty prompts of different lengths at once, then one every five seconds, when every instance is idle."""
    lengths = [3000 + 137 * k for k in range(40)] + [1000] * calm
    arrivals_s = [0.0] * 40 + [200.0 + 5 * k for k in range(calm)]
    for i, (tokens, at_s) in enumerate(zip(lengths, arrivals_s, strict=True)):
        keys = tuple(range(10_000 * i, 10_000 * i + blocks_for(tokens, 512)))
        yield TracedRequest(Request(id=i, arrival_s=at_s, input_tokens=tokens, block_keys=keys), 2)


def test_after_a_burst_idle_nodes_share_requests_evenly():
    """Load balancing gives each of four idle instances a quarter of the requests, whatever came before."""
    spec = ClusterSpec.disaggregated(prefill_nodes=4, decode_nodes=1, placement=LoadBalance())
    log = Cluster(spec, REALISTIC).run(burst_then_calm(80))
    calm = Counter(r.prefill_instance for r in log if isinstance(r, Placed) and r.request_id >= 40)
    assert calm == dict.fromkeys(("prefill-0", "prefill-1", "prefill-2", "prefill-3"), 20)


@settings(max_examples=40, deadline=None)
@given(REQUESTS, clusters())
def test_a_backlog_is_the_sum_of_what_is_queued(rows, spec):
    """Whenever the Conductor looks, the believed backlog is the exact sum over the queue."""

    def assert_exact(worker, matched, now_s):
        seen = view(worker, matched, now_s)
        queued_s = math.fsum(prompt.estimated_s for prompt in worker.prompts.values() if not prompt.started)
        assert seen.backlog_s == queued_s + max(0.0, worker._latest_until_s - now_s)
        return seen

    view = WorkerState.prefill_view
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerState, "prefill_view", assert_exact)
        Cluster(spec, REALISTIC).run(requests_of((at_s / 10, *rest) for at_s, *rest in rows))


def test_the_order_of_a_queue_does_not_count():
    """Workers with the same prompts in another order have equal backlogs, to the last bit."""
    workers = [WorkerState("coupled-0", "coupled"), WorkerState("coupled-0", "coupled")]
    seconds = (0.1, 0.2, 0.3)
    for worker, order in zip(workers, (seconds, seconds[::-1]), strict=True):
        for request_id, estimated_s in enumerate(order):
            worker.add_prompt(Attempt(request_id, 1), estimated_s)
    forward, backward = (worker.prefill_view(0, 0.0) for worker in workers)
    assert forward == backward
