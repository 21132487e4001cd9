"""FLOPs, bytes and the roofline: a roof with one corner, prefill right of it, decode far left."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_lab.book.paper import constant, fact
from mooncake_lab.core import GB
from mooncake_lab.perf import (
    HARDWARE,
    PRINTED_A,
    PRINTED_B,
    attainable_flops_per_s,
    decode_work,
    exact_prefill_flops,
    hardware,
    kernel_work,
    kv_bytes,
    model_shape,
    prefill_work,
    printed_prefill_flops,
    reuse_bandwidth_bytes_per_s,
    reuse_crossover_tokens,
    ridge_flops_per_byte,
)
from mooncake_lab.perf.roofline import decode_flops

LLAMA = model_shape("llama3-70b")
A800, H800 = hardware("a800-node"), hardware("h800-node")
LENGTHS = [8192, 16384, 32768, 65536, 131072]
tokens = st.integers(0, 200_000)


@pytest.mark.parametrize("count", [printed_prefill_flops, exact_prefill_flops])
@given(st.lists(tokens, min_size=3, max_size=3).map(sorted))
def test_consecutive_pieces_add_up(count, cuts):
    """A prefill in two pieces, the second reusing the first, costs exactly what one piece costs."""
    low, middle, high = cuts
    assert count(LLAMA, high, low) == count(LLAMA, middle, low) + count(LLAMA, high, middle)


@given(tokens)
def test_the_causal_count_is_the_sum_over_tokens(n):
    """Counting row by row, where token i attends to i tokens, gives the closed form."""
    sample = n % 300
    attention = sum(4 * LLAMA.query_width * i for i in range(1, sample + 1))
    linear = sample * 2 * LLAMA.layer_parameters
    assert exact_prefill_flops(LLAMA, sample) == LLAMA.layers * (attention + linear)


@given(tokens)
def test_a_decode_step_is_the_prefill_of_one_token_and_the_output_head(context):
    """One request that has a context computes one row of the causal prefill, and samples from the head."""
    head = 2 * LLAMA.head_parameters
    assert decode_flops(LLAMA, 1, context) == exact_prefill_flops(LLAMA, context + 1, context) + head


def test_eq1_has_the_printed_coefficients():
    """The coefficients a and b are those of Table 1."""
    assert fact("fast_table1_constants", x="a_attention_coefficient").value == PRINTED_A
    assert fact("fast_table1_constants", x="b_mlp_coefficient").value == PRINTED_B


@pytest.mark.parametrize("n", LENGTHS)
def test_eq1_has_the_worked_values(n):
    """Eq. 1 at the five prompt lengths of Fig. 14, and an array of them at once."""
    assert printed_prefill_flops(LLAMA, n) == constant(f"prefill_flops_n{n}").value
    assert printed_prefill_flops(LLAMA, np.array([float(n)]))[0] == constant(f"prefill_flops_n{n}").value


def test_eq1_counts_what_remains_after_reuse():
    """Half of 16384 tokens reused leaves flops(n) - flops(p)."""
    expected = constant("prefill_flops_remaining_n16384_p8192").value
    assert printed_prefill_flops(LLAMA, 16384, 8192) == expected


def test_eq1_misses_the_exact_count_in_both_directions():
    """Its b is too small and its unmasked a too large: short prompts are under-, long ones overcounted."""
    assert 2 * LLAMA.layer_parameters / LLAMA.width**2 == constant("b_coeff_exact").value > PRINTED_B
    assert printed_prefill_flops(LLAMA, 1024) < exact_prefill_flops(LLAMA, 1024)
    assert printed_prefill_flops(LLAMA, 131072) > exact_prefill_flops(LLAMA, 131072)


@pytest.mark.parametrize("p", [8192, 15325, 131072, 3_000_000, 50_000_000])
def test_kvcache_bytes_have_the_worked_values(p):
    """KVCache bytes of the prefixes the paper speaks of."""
    assert kv_bytes(LLAMA, p) == constant(f"kv_bytes_p{p}").value


@pytest.mark.parametrize("p", [0, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072])
@pytest.mark.parametrize(("node", "label"), [(A800, "a800"), (H800, "h800")])
def test_eq2_has_the_worked_values(node, label, p):
    """The least useful bandwidth at nine prefix lengths on both nodes."""
    ours = reuse_bandwidth_bytes_per_s(LLAMA, p, node.flops_per_s()) / GB
    assert ours == pytest.approx(constant(f"B_min_{label}_p{p}").value, rel=1e-6)


@given(p=st.integers(0, 10**6), flops=st.floats(1e12, 1e17))
def test_at_the_bandwidth_of_eq2_loading_and_computing_take_the_same_time(p, flops):
    """Eq. 2 is the break-even of Eq. 1: kv(p)/B equals flops(p)/G."""
    p += 1
    bandwidth = reuse_bandwidth_bytes_per_s(LLAMA, p, flops)
    assert kv_bytes(LLAMA, p) / bandwidth == pytest.approx(printed_prefill_flops(LLAMA, p) / flops, rel=1e-12)


@given(st.floats(1e6, 6.9e9))
def test_the_crossover_inverts_eq2(bandwidth):
    """At the crossover length the bandwidth is just enough."""
    p = reuse_crossover_tokens(LLAMA, bandwidth, A800.flops_per_s())
    assert reuse_bandwidth_bytes_per_s(LLAMA, p, A800.flops_per_s()) == pytest.approx(bandwidth, rel=1e-9)


def test_every_prefix_is_worth_loading_over_a_fast_link():
    """Over the testbed's links there is no crossover; a link without speed is refused."""
    assert reuse_crossover_tokens(LLAMA, A800.nic_bytes_per_s, A800.flops_per_s()) == 0
    with pytest.raises(ValueError, match="positive"):
        reuse_crossover_tokens(LLAMA, 0.0, A800.flops_per_s())


@pytest.mark.parametrize("n", LENGTHS)
def test_the_printed_bars_imply_the_recorded_mfu(n):
    """Eq. 1 over the prefill bars of Fig. 14 is a share of the peak that is on record, and below one."""
    seconds = fact("fast_fig14_latency_breakdown", series="prefix 0%/prefill", x=n).value
    mfu = printed_prefill_flops(LLAMA, n) / seconds / A800.flops_per_s()
    assert mfu == pytest.approx(constant(f"mfu_eq1_n{n}").value, rel=1e-3)
    assert mfu < 1


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


@given(tokens=st.integers(1, 100_000), context=st.integers(0, 100_000))
def test_kernels_move_weights_inputs_and_outputs_once(tokens, context):
    """Without tokens the weights are left; each token adds what one kernel writes and the next one reads."""
    w, q, kv, ffn, size = LLAMA.width, LLAMA.query_width, LLAMA.kv_width, LLAMA.ffn_width, LLAMA.bytes_per_element
    widths = {
        "qkv": (w, q + 2 * kv), "rotate_and_store": (q + 2 * kv, q + 2 * kv), "attention": (q, q),
        "output": (q, w), "add_norm": (2 * w, 2 * w), "gate and up": (w, 2 * ffn),
        "silu_and_multiply": (2 * ffn, ffn), "down": (ffn, w),
    }  # fmt: skip
    beside = {"rotate_and_store": tokens * (4 * LLAMA.head_width + 16), "attention": context * 2 * kv * size}
    empty, work = kernel_work(LLAMA, 0, 0, 0), kernel_work(LLAMA, tokens, context, 0)
    assert sum(each.bytes for each in empty.values()) == size * (LLAMA.layer_parameters + w)
    assert {name: each.bytes - empty[name].bytes for name, each in work.items()} == {
        name: size * tokens * sum(ends) + beside.get(name, 0) for name, ends in widths.items()
    }


@given(batch=st.integers(1, 256), each=st.integers(1, 100_000))
def test_decode_attention_reads_the_kvcache_once(batch, each):
    """Its bytes are the KVCache of all requests, and one query and one output for each; FLOPs follow the pairs."""
    work = kernel_work(LLAMA, batch, batch * each, batch * each)["attention"]
    ends = 2 * batch * LLAMA.query_width * LLAMA.bytes_per_element
    assert LLAMA.layers * (work.bytes - ends) == kv_bytes(LLAMA, batch * each)
    assert work.intensity_flops_per_byte < 2 * LLAMA.gqa / LLAMA.bytes_per_element
