"""What cannot fit into GPU memory is rejected for that reason, by both kinds of cluster alike."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import DecodeStretch, Rejected, Request, TracedRequest, blocks_for
from mooncake_lab.metrics import check_log
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import Cluster

MODEL = LatencyModel(
    name="by hand",
    shape=model_shape("llama3-70b"),
    prefill=PrefillLatency(constant_s=0.1, per_token_s=1e-4, per_token_squared_s=0.0),
    decode=DecodeLatency(0.02, 0.0, 0.0),
    hybrid=HybridLatency(floor_s=0.02, per_token_s=0.0, per_token_squared_s=0.0, per_context_token_s=0.0),
    transfer=LinkLatency(1e12),
    dram=LinkLatency(1e12),
)
CAPACITY = 320


def one(input_tokens, output_tokens):
    keys = tuple(range(blocks_for(input_tokens, 512)))
    return TracedRequest(Request(id=0, arrival_s=0.0, input_tokens=input_tokens, block_keys=keys), output_tokens)


def outcome(log):
    """How a request ended, and how many tokens its user saw after the first."""
    assert check_log(log) == ()
    stages = [record.stage for record in log if isinstance(record, Rejected)]
    return stages, sum(record.steps for record in log if isinstance(record, DecodeStretch))


@settings(max_examples=60, deadline=None)
@given(st.integers(CAPACITY - 20, CAPACITY + 5), st.integers(1, 30))
def test_both_clusters_reject_the_same_for_the_same_reason(input_tokens, output_tokens):
    """A prompt that cannot fit is never placed; an answer that outgrows the memory ends where it is full."""
    apart = Cluster(ClusterSpec.disaggregated(prefill_nodes=1, decode_nodes=1, device_tokens=CAPACITY), MODEL)
    coupled = Cluster(ClusterSpec.coupled(nodes=1, device_tokens=CAPACITY), MODEL)
    ends = outcome(apart.run([one(input_tokens, output_tokens)]))
    assert ends == outcome(coupled.run([one(input_tokens, output_tokens)]))
    needed = input_tokens + output_tokens - 1
    assert ends[0] == ([] if input_tokens <= CAPACITY and needed <= CAPACITY else ["capacity"])
