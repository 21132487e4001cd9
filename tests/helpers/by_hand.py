"""Four requests on three nodes, with times round enough for paper and pencil."""

from dataclasses import replace

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import KVCacheCentric
from mooncake_lab.core import Request, TracedRequest
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape


def four_requests() -> tuple[ClusterSpec, LatencyModel, list[TracedRequest]]:
    """A cluster of two prefill nodes and one decode node, its clock, and what arrives.

    A thousand tokens take a second to prefill, a tenth of a second to cross the network, and half of that to load
    into GPU memory; a decode step takes 0.1 s and 0.05 s more a request. Ten layers, blocks of 500 tokens. All
    prompts begin alike. The last request finds the longest prefix on a busy node, and fetches it from there while
    that node is sending to the decode node as well.
    """
    shape = replace(model_shape("lab-tiny"), name="by hand", layers=10)
    token = shape.kv_bytes_per_token
    model = LatencyModel(
        name="by hand",
        shape=shape,
        prefill=PrefillLatency(constant_s=0.0, per_token_s=1e-3, per_token_squared_s=0.0),
        decode=DecodeLatency(0.1, 0.05, 0.0),
        hybrid=HybridLatency(floor_s=0.1, per_token_s=1e-3, per_token_squared_s=0.0, per_context_token_s=0.0),
        transfer=LinkLatency(10_000.0 * token),
        dram=LinkLatency(20_000.0 * token),
    )
    spec = ClusterSpec.disaggregated(
        prefill_nodes=2,
        decode_nodes=1,
        cache_tokens=20_000,
        device_tokens=20_000,
        block_size_tokens=500,
        placement=KVCacheCentric(balancing_threshold=1.25),
    )
    rows = [(0.0, "ab", 3), (0.5, "abc", 2), (3.0, "abcd", 8), (3.1, "abcef", 4)]
    return spec, model, [_arriving(i, at_s, blocks, out) for i, (at_s, blocks, out) in enumerate(rows)]


def _arriving(number: int, at_s: float, blocks: str, output_tokens: int) -> TracedRequest:
    request = Request(
        id=number,
        arrival_s=at_s,
        input_tokens=500 * len(blocks),
        block_keys=tuple(block.encode() for block in blocks),
        block_size_tokens=500,
    )
    return TracedRequest(request, output_tokens)
