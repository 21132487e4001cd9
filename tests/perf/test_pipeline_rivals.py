"""Three ways to share a prefill: what each sends, and where they coincide."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.perf import CppGroup, LinkLatency, PrefillLatency, hardware, model_shape
from mooncake_lab.perf.cpp import WAYS, shared_prefill

GROUP = CppGroup(
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
    alone = [shared_prefill(replace(GROUP, nodes=1), way, count) for way in WAYS]
    assert all(each.network_bytes == 0 for each in alone)
    assert all(each.seconds == pytest.approx(GROUP.prefill.seconds(count)) for each in alone)


@given(tokens, st.integers(2, 8))
def test_bytes_are_in_fixed_proportion(count, nodes):
    """Of LLaMA3-70B: sequence parallelism sends 20 times what CPP sends, tensor parallelism 320 times."""
    sent = {way: shared_prefill(replace(GROUP, nodes=nodes), way, count).network_bytes for way in WAYS}
    assert sent["sequence parallel"] == pytest.approx(20 * sent["CPP"])
    assert sent["tensor parallel"] == pytest.approx(320 * sent["CPP"])


@given(tokens, st.integers(1, 8), st.sampled_from(WAYS), st.floats(1e8, 1e13))
def test_no_way_beats_its_share_of_the_work(count, nodes, way, bandwidth):
    """X nodes are at most X times as fast, and never more than fully used."""
    found = shared_prefill(replace(GROUP, nodes=nodes, link=LinkLatency(bandwidth)), way, count)
    assert found.seconds >= GROUP.prefill.seconds(count) / nodes * (1 - 1e-12)
    assert 0 < found.mfu(hardware("a800-node"), nodes) < 1


@given(tokens, st.integers(2, 8))
def test_without_a_network_only_the_ramp_is_left(count, nodes):
    """With free communication the two rivals are equal, and CPP is behind by its ramp."""
    free = replace(GROUP, nodes=nodes, link=LinkLatency(1e30))
    cpp, tensor, sequence = (shared_prefill(free, way, count).seconds for way in WAYS)
    assert tensor == pytest.approx(sequence)
    assert cpp >= tensor * (1 - 1e-12)


def test_an_unknown_way_is_refused():
    """A way that is none of the three is answered with those there are."""
    with pytest.raises(ValueError, match="allowed are CPP, tensor parallel, sequence parallel"):
        shared_prefill(GROUP, "expert parallel", 1000)
