"""Clusters of any kind, as property tests draw them, with the requests that they serve."""

from dataclasses import replace

from hypothesis import strategies as st

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.conductor import ADMISSION_POLICIES, CacheAware, KVCacheCentric, LoadBalance, Random
from mooncake_lab.core import SLO
from mooncake_lab.perf import DecodeLatency, HybridLatency, LatencyModel, LinkLatency, PrefillLatency, model_shape
from mooncake_lab.simulation import Cluster, Failure, SimulationOptions


def make_model(*, constant_s=0.0, per_token_s=0.0, decode=(1e-6, 0.0, 0.0), bytes_per_s=1e18) -> LatencyModel:
    prefill = PrefillLatency(constant_s=constant_s, per_token_s=per_token_s, per_token_squared_s=0.0)
    step = DecodeLatency(*decode)
    return LatencyModel(
        name="by hand",
        shape=model_shape("llama3-70b"),
        prefill=prefill,
        decode=step,
        hybrid=HybridLatency(floor_s=1e-3, per_token_s=1e-6, per_token_squared_s=0.0, per_context_token_s=0.0),
        transfer=LinkLatency(bytes_per_s),
        dram=LinkLatency(1e18),
    )


REQUESTS = st.lists(
    st.tuples(st.floats(0, 5), st.integers(1, 4000), st.integers(1, 40), st.integers(0, 2)),
    min_size=1,
    max_size=25,
).map(sorted)
POLICIES = st.sampled_from([Random(), LoadBalance(), CacheAware(), KVCacheCentric(), KVCacheCentric(2.0, "arxiv")])


REALISTIC = replace(
    make_model(constant_s=0.05, per_token_s=1e-4, decode=(0.025, 2e-4, 3e-8), bytes_per_s=5e9),
    hybrid=HybridLatency(floor_s=0.025, per_token_s=1e-4, per_token_squared_s=0.0, per_context_token_s=3e-8),
    ssd=LinkLatency(2e9),
)


ADMISSIONS = st.sampled_from([make() for make in ADMISSION_POLICIES.values()])


@st.composite
def clusters(draw):
    """Any cluster: groups, SSDs, one store for all or one each, old views, every admission, deaths."""
    instances, decode, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    names = [f"prefill-{i}" for i in range(instances)] + [f"decode-{i}" for i in range(decode)]
    deaths = st.builds(Failure, st.sampled_from(names), st.floats(0.0, 6.0))
    spec = ClusterSpec.disaggregated(
        prefill_nodes=instances * group,
        prefill_group=group,
        chunk_tokens=1000,
        decode_nodes=decode,
        cache_tokens=3000,
        ssd_tokens=draw(st.sampled_from([0, 4000])),
        device_tokens=6000,
        shared_cache=draw(st.booleans()),
        fetch_timeout_s=draw(st.sampled_from([30.0, 0.02])),
        eviction=draw(st.sampled_from(["lru", "lfu", "s3fifo"])),
        first_shown_by=draw(st.sampled_from(["decode", "prefill"])),
        streams_layers=draw(st.booleans()),
        pack_tokens=1 if group > 1 else draw(st.sampled_from([1, 1500])),
        overtaking=draw(st.booleans()),
        placement=draw(POLICIES),
        admission=draw(ADMISSIONS),
        slo=draw(st.sampled_from([SLO(), SLO(ttft_s=0.5, tbt_s=0.1)])),
    )
    failures = tuple(draw(st.lists(deaths, max_size=2)))
    return spec, SimulationOptions(failures=failures, view_age_s=draw(st.sampled_from([0.0, 1.0])))


def simulated(drawn):
    """A simulation of one of these clusters."""
    spec, options = drawn
    return Cluster(spec, REALISTIC, options)
