"""The roofline: a roof with one corner, prefill right of it, decode far left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.perf import (
    HARDWARE,
    attainable_flops_per_s,
    decode_work,
    exact_prefill_flops,
    hardware,
    kernel_work,
    kv_bytes,
    model_shape,
    prefill_work,
    ridge_flops_per_byte,
)

LLAMA = model_shape("llama3-70b")
NODE = hardware("a800-node")


@pytest.mark.parametrize("name", HARDWARE)
@given(low=st.floats(1e-3, 1e6), factor=st.floats(1, 100))
def test_the_roof_never_falls_and_is_flat_right_of_the_ridge(name, low, factor):
    """More intensity never attains less, and from the ridge on it is the peak."""
    machine = hardware(name)
    ridge = ridge_flops_per_byte(machine)
    assert attainable_flops_per_s(machine, low) <= attainable_flops_per_s(machine, low * factor)
    assert attainable_flops_per_s(machine, ridge * factor) == pytest.approx(machine.flops_per_s(), rel=1e-12)
    assert attainable_flops_per_s(machine, ridge / 2) == pytest.approx(machine.flops_per_s() / 2, rel=1e-12)


@given(batch=st.integers(1, 512), each=st.integers(1, 200_000))
def test_batching_raises_the_intensity_of_decode(batch, each):
    """Weights are read once for all, so twice the batch does more for each byte."""
    alone = decode_work(LLAMA, batch, batch * each).intensity_flops_per_byte
    assert decode_work(LLAMA, 2 * batch, 2 * batch * each).intensity_flops_per_byte > alone


def test_prefill_is_bound_by_computing_and_decode_by_memory():
    """The premise of disaggregation: the two stages lie on the two sides of the ridge."""
    ridge = ridge_flops_per_byte(NODE)
    assert prefill_work(LLAMA, 8192).intensity_flops_per_byte > ridge
    assert decode_work(LLAMA, 1, 8192).intensity_flops_per_byte < ridge
    assert decode_work(LLAMA, 128, 128 * 8192).intensity_flops_per_byte < ridge


@given(tokens=st.integers(1, 200_000), batch=st.integers(1, 256))
def test_the_floor_is_the_slower_of_computing_and_moving(tokens, batch):
    """A floor is never below either, and is one of them."""
    for work in (prefill_work(LLAMA, tokens), decode_work(LLAMA, batch, batch * tokens)):
        sides = (work.flops / NODE.flops_per_s(), work.bytes / NODE.memory_bytes_per_s)
        assert work.floor_s(NODE) == max(sides)
        achieved = work.flops / work.floor_s(NODE)
        assert achieved == pytest.approx(attainable_flops_per_s(NODE, work.intensity_flops_per_byte), rel=1e-12)


@given(tokens=st.integers(1, 100_000))
def test_kernels_add_up_to_the_prefill(tokens):
    """The matrix products and attention of a layer, times the layers, are the FLOPs of the whole prefill."""
    work = kernel_work(LLAMA, tokens, tokens, tokens * (tokens + 1) / 2)
    counted = sum(work[name].flops for name in ("qkv", "output", "gate and up", "down", "attention"))
    assert LLAMA.layers * counted == pytest.approx(exact_prefill_flops(LLAMA, tokens), rel=1e-12)


@given(batch=st.integers(1, 256), each=st.integers(1, 100_000))
def test_decode_attention_reads_the_kvcache_once(batch, each):
    """Its bytes are the KVCache of all requests, and one query and one output for each; FLOPs follow the pairs."""
    work = kernel_work(LLAMA, batch, batch * each, batch * each)["attention"]
    ends = 2 * batch * LLAMA.query_width * LLAMA.bytes_per_element
    assert LLAMA.layers * (work.bytes - ends) == kv_bytes(LLAMA, batch * each)
    assert work.intensity_flops_per_byte < 2 * LLAMA.gqa / LLAMA.bytes_per_element
