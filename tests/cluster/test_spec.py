"""Clusters as they are asked for: their instances, what is refused, and the defaults."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.batching import CHUNKED_POLICIES, named_policy
from mooncake_lab.book.paper import assumption
from mooncake_lab.cluster import COUPLED_SYSTEMS, ClusterSpec, CoupledPool, DecodePool, PrefillPool
from mooncake_lab.conductor import FewestRequests, KVCacheCentric, LoadBalance

COUNTS = {
    PrefillPool: ("nodes", "prefill_group", "chunk_tokens", "cache_tokens", "pack_tokens"),
    DecodePool: ("nodes", "device_tokens", "max_requests"),
    CoupledPool: (
        "nodes", "device_tokens", "memory_block_tokens", "max_batch_tokens", "max_requests", "max_request_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("pool", "name"), [(pool, name) for pool, names in COUNTS.items() for name in names])
def test_one_of_each_is_the_least(pool, name):
    """A pool needs at least one of whatever it counts."""
    assert getattr(pool(**{name: 1}), name) == 1
    with pytest.raises(ValueError, match=f"{pool.__name__}.{name} is 0; at least 1 is needed"):
        pool(**{name: 0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssd_tokens": -1}, "at least 0 is needed"),
        ({"fetch_timeout_s": 0.0}, "finite positive times"),
        ({"fetch_timeout_s": float("inf")}, "finite positive times"),
        ({"nodes": 7, "prefill_group": 2}, "PrefillPool.nodes is 7; a multiple of prefill_group, 2, is needed"),
        ({"prefill_group": 2, "pack_tokens": 2}, "a group computes one prompt at a time"),
    ],
)
def test_prefill_pools_that_cannot_be_are_refused(changes, message):
    """Negative memory, endless waits, parts of groups and groups that pack prompts; one change less is allowed."""
    with pytest.raises(ValueError, match=message):
        PrefillPool(**changes)
    for name in changes:
        PrefillPool(**{other: value for other, value in changes.items() if other != name})


@pytest.mark.parametrize("make", [PrefillPool, ClusterSpec.disaggregated, ClusterSpec.small])
def test_a_field_under_its_old_name_is_refused_with_the_new_name(make):
    """A spec of the release before learns how the field is called now."""
    with pytest.raises(TypeError, match="PrefillPool has no field max_batch_tokens: its name is pack_tokens"):
        make(max_batch_tokens=512)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9))
def test_each_group_of_prefill_nodes_is_one_instance(group, groups, decodes):
    """Prefill comes first, and names count up within each role; coupled nodes are instances of their own."""
    made = ClusterSpec.disaggregated(prefill_nodes=group * groups, prefill_group=group, decode_nodes=decodes)
    names = [f"prefill-{i}" for i in range(groups)] + [f"decode-{i}" for i in range(decodes)]
    assert list(made.roles) == names
    assert all(name.startswith(f"{role}-") for name, role in made.roles.items())
    assert ClusterSpec.coupled(nodes=decodes).roles == {f"coupled-{i}": "coupled" for i in range(decodes)}


@given(st.integers(1, 10**6), st.integers(1, 512))
def test_an_instance_counts_the_whole_blocks_of_its_memory(tokens, block):
    """All of them are free, and what is left is less than a block."""
    limits = CoupledPool(device_tokens=tokens + block, memory_block_tokens=block).limits
    assert limits.capacity_blocks == limits.free_blocks
    assert limits.block_size_tokens == block
    assert 0 <= tokens + block - limits.capacity_blocks * block < block


def test_both_kinds_of_cluster_have_as_many_of_the_same_nodes():
    """So that the papers' comparison of the two is one of equal hardware."""
    apart, coupled = ClusterSpec.disaggregated(), ClusterSpec.coupled()
    assert sum(pool.nodes for pool in apart.pools) == coupled.pools[0].nodes
    assert apart.pools[1].device_tokens == coupled.pools[0].device_tokens
    assert (apart.placement, coupled.placement) == (KVCacheCentric(), FewestRequests())
    assert ClusterSpec.disaggregated(prefix_caching=False).placement == LoadBalance()
    small, together = ClusterSpec.small(), ClusterSpec.small_coupled()
    assert small.pools[0].cache_tokens == small.pools[1].device_tokens == together.pools[0].device_tokens
    assert together.block_size_tokens == together.pools[0].memory_block_tokens == small.block_size_tokens


def test_defaults_are_the_assumptions():
    """Chunks of a group, and how long a prefix is waited for."""
    assert PrefillPool().chunk_tokens == assumption("B14").value
    assert PrefillPool().fetch_timeout_s == assumption("B57").value


@pytest.mark.parametrize("name", COUPLED_SYSTEMS)
def test_a_coupled_system_is_the_policy_of_its_name(name):
    """Those that cut prompts take 512 tokens, vLLM V1 takes 2,048; it and the one named so keep prefixes."""
    policy, keeps = COUPLED_SYSTEMS[name]
    plain = name.removesuffix("_prefix")
    chunk_tokens = 2048 if name == "vllm_today" else 512
    assert policy == named_policy(plain, chunk_tokens=chunk_tokens if plain in CHUNKED_POLICIES else None)
    assert keeps == (plain != name or name == "vllm_today")


def test_a_block_of_the_trace_is_whole_blocks_of_memory():
    """Of coupled instances, where prefixes are shared in GPU memory."""
    fits = ClusterSpec.coupled(block_size_tokens=48, memory_block_tokens=16)
    with pytest.raises(ValueError, match="no multiple of memory blocks of 32 tokens"):
        replace(fits, pools=(replace(fits.pools[0], memory_block_tokens=32),))
