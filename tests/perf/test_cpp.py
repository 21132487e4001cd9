"""Chunked pipeline parallelism: the recurrence against the flow shop's closed form, its bounds and its limits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.perf import (
    CppGroup,
    LinkLatency,
    PrefillLatency,
    chunk_seconds,
    chunk_sizes,
    cpp_finish_s,
    cpp_network_bytes,
    cpp_prefill_s,
    hardware,
    model_shape,
)
from mooncake_lab.perf.cpp import WAYS, shared_prefill

PREFILL = PrefillLatency(constant_s=0.07, per_token_s=1.1e-4, per_token_squared_s=7.4e-10, load_s_per_token=2.6e-6)
GROUP = CppGroup(
    prefill=PREFILL,
    shape=model_shape("llama3-70b"),
    nodes=4,
    chunk_tokens=4096,
    link=LinkLatency(87e9, 1e-4),
)
BARE = replace(GROUP, prefill=replace(PREFILL, constant_s=0.0), link=LinkLatency(1e30))

sizes = st.lists(st.integers(1, 20_000), min_size=1, max_size=12)
nodes = st.integers(1, 8)


@given(st.integers(1, 300_000), st.integers(0, 100_000), st.integers(1, 50_000))
def test_one_node_is_one_node(new, reused, chunk):
    """A group of one takes exactly what its node takes for the whole prompt, whatever the chunk."""
    alone = replace(GROUP, nodes=1, chunk_tokens=max(chunk, new // 50))
    assert cpp_prefill_s(alone, new + reused, reused) == pytest.approx(PREFILL.seconds(new + reused, reused))


@given(sizes, st.sampled_from([1, 2, 4, 5, 8, 10]))
def test_the_flow_shop_has_a_closed_form(cut, count):
    """With equal nodes and a free network the last chunk ends after sum(t) + (X-1) max(t), whatever the order."""
    group = replace(BARE, nodes=count)
    each = [seconds / count for seconds in chunk_seconds(group, cut)]
    expected = sum(each) + (count - 1) * max(each)
    assert cpp_prefill_s(group, sum(cut), sizes=cut) == pytest.approx(expected)


@given(sizes, nodes, st.integers(0, 50_000))
def test_no_group_beats_its_work(cut, count, reused):
    """No node ends before its own work, and the first chunk passes every node: two floors under each prefill."""
    group, tokens = replace(GROUP, nodes=count), reused + sum(cut)
    each = chunk_seconds(group, cut, reused)
    finish = cpp_finish_s(group, tokens, reused, sizes=cut)
    for done, share in zip(finish, group.layer_shares, strict=True):
        assert done[-1] >= share * (sum(each) + PREFILL.load_s_per_token * reused) * (1 - 1e-12)
    hops = (count - 1) * (group.hop_bytes(cut[-1]) / group.link.bytes_per_s + group.link.latency_s)
    assert finish[-1][-1] >= finish[0][-1] + hops + sum(group.layer_shares[1:]) * each[-1] - 1e-9


@given(sizes, nodes, st.floats(1e6, 1e12))
def test_the_recurrence_is_a_schedule(cut, count, bandwidth):
    """No node does two chunks at once, none starts before its chunk has arrived, and no link sends two at once."""
    group = replace(GROUP, nodes=count, link=LinkLatency(bandwidth, 1e-4))
    finish, each = cpp_finish_s(group, sum(cut), sizes=cut), chunk_seconds(group, cut)
    hops = [group.hop_bytes(size) / bandwidth for size in cut]
    for node, share in enumerate(group.layer_shares):
        starts = [done - share * seconds for done, seconds in zip(finish[node], each, strict=True)]
        assert all(later >= done - 1e-9 for done, later in zip(finish[node], starts[1:], strict=False))
        if node:
            sent = 0.0
            for start, ready, hop in zip(starts, finish[node - 1], hops, strict=True):
                sent = max(sent, ready) + hop
                assert start >= sent + 1e-4 - 1e-6


@given(sizes, st.integers(1, 5))
def test_a_full_pipeline_has_no_second_ramp(cut, many):
    """Prompts one after the other through equal nodes: the group is busy after the first ramp, and not before."""
    free, total = (0.0,) * 4, sum(cut)
    group = replace(BARE, nodes=4)
    each = [seconds / 4 for seconds in chunk_seconds(group, cut)]
    for _ in range(many):
        free = tuple(done[-1] for done in cpp_finish_s(group, total, sizes=cut, free_s=free))
    assert free[0] == pytest.approx(many * sum(each))
    assert free[-1] == pytest.approx(many * sum(each) + 3 * max(each))


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_chunks_cover_the_prompt(tokens, chunk):
    """Chunks add up to the prompt, all whole but the last."""
    cut = chunk_sizes(tokens, chunk)
    assert sum(cut) == tokens
    assert all(size == chunk for size in cut[:-1])
    assert 1 <= cut[-1] <= chunk


@given(sizes, st.integers(0, 10**5))
def test_cutting_costs_nothing_but_its_constant(cut, reused):
    """The chunks of a prompt take together what the prompt takes, plus the constant of each."""
    whole = PREFILL.compute_s(reused + sum(cut), reused) - PREFILL.constant_s
    assert sum(chunk_seconds(GROUP, cut, reused)) == pytest.approx(whole)
    dear = replace(GROUP, chunk_constant_s=0.01)
    assert sum(chunk_seconds(dear, cut, reused)) == pytest.approx(whole + 0.01 * len(cut))


def test_bytes_are_those_of_the_boundary():
    """A token of a 70B Llama crosses each boundary with 16 KiB; one node sends nothing."""
    assert GROUP.hop_bytes(1) == 16 * 1024
    assert cpp_network_bytes(GROUP, 131_072) == 3 * 131_072 * 16 * 1024
    assert cpp_network_bytes(replace(GROUP, nodes=1), 131_072) == 0
    assert cpp_network_bytes(GROUP, 1000, 900) == 3 * 100 * 16 * 1024


def test_layers_need_not_divide():
    """80 layers on 3 nodes are 27, 27 and 26, and the shares add up to one."""
    shares = replace(GROUP, nodes=3).layer_shares
    assert [round(share * 80) for share in shares] == [27, 27, 26]
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nodes": 0}, "0 nodes"),
        ({"nodes": 81}, "81 nodes for 80 layers"),
        ({"chunk_tokens": 0}, "chunks of 0"),
        ({"chunk_constant_s": -1.0}, "-1.0 s"),
    ],
)
def test_an_impossible_group_is_refused(change, said):
    """A group that cannot be is refused in a sentence that names the number."""
    with pytest.raises(ValueError, match=said):
        replace(GROUP, **change)


def test_impossible_prompts_are_refused():
    """Chunks that do not add up, nodes without a free time, and nothing to compute are refused."""
    with pytest.raises(ValueError, match="add up to 100"):
        cpp_prefill_s(GROUP, 100, sizes=[60, 50])
    with pytest.raises(ValueError, match="names 2 nodes"):
        cpp_finish_s(GROUP, 100, free_s=(0.0, 0.0))
    with pytest.raises(ValueError, match="0 tokens in chunks"):
        cpp_prefill_s(GROUP, 100, 100)


SHARED = CppGroup(
    prefill=PrefillLatency(constant_s=0.07, per_token_s=1.1e-4, per_token_squared_s=7.4e-10),
    shape=model_shape("llama3-70b"),
    nodes=4,
    chunk_tokens=4096,
    link=LinkLatency(87e9),
)
tokens = st.integers(1000, 1_000_000)


@given(tokens)
def test_on_one_node_all_ways_are_one(count):
    """A single node sends nothing and takes what it takes, whatever the way is called."""
    alone = [shared_prefill(replace(SHARED, nodes=1), way, count) for way in WAYS]
    assert all(each.network_bytes == 0 for each in alone)
    assert all(each.seconds == pytest.approx(SHARED.prefill.seconds(count)) for each in alone)


@given(tokens, st.integers(2, 8))
def test_bytes_are_in_fixed_proportion(count, nodes):
    """Of LLaMA3-70B: sequence parallelism sends 20 times what CPP sends, tensor parallelism 320 times."""
    sent = {way: shared_prefill(replace(SHARED, nodes=nodes), way, count).network_bytes for way in WAYS}
    assert sent["sequence parallel"] == pytest.approx(20 * sent["CPP"])
    assert sent["tensor parallel"] == pytest.approx(320 * sent["CPP"])


@given(tokens, st.integers(1, 8), st.sampled_from(WAYS), st.floats(1e8, 1e13))
def test_no_way_beats_its_share_of_the_work(count, nodes, way, bandwidth):
    """X nodes are at most X times as fast, and never more than fully used."""
    found = shared_prefill(replace(SHARED, nodes=nodes, link=LinkLatency(bandwidth)), way, count)
    assert found.seconds >= SHARED.prefill.seconds(count) / nodes * (1 - 1e-12)
    assert 0 < found.mfu(hardware("a800-node"), nodes) < 1


@given(tokens, st.integers(2, 8))
def test_without_a_network_only_the_ramp_is_left(count, nodes):
    """With free communication the two rivals are equal, and CPP is behind by its ramp."""
    free = replace(SHARED, nodes=nodes, link=LinkLatency(1e30))
    cpp, tensor, sequence = (shared_prefill(free, way, count).seconds for way in WAYS)
    assert tensor == pytest.approx(sequence)
    assert cpp >= tensor * (1 - 1e-12)
