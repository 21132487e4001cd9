"""Believed backlogs are exact: what was queued and is gone leaves no residue that decides between idle nodes."""

from collections import Counter

from drawn import REALISTIC

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import LoadBalance
from mooncake_lab.core import Placed, Request, TracedRequest, blocks_for
from mooncake_lab.simulation import Cluster


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
