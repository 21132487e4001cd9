"""The papers' equations give the papers' numbers: Table 1, Eqs 1 and 2, KVCache sizes, our fit of Fig 14."""

import pytest

from mooncake_lab.book.paper import claim, constant, fact
from mooncake_lab.perf import (
    PRINTED_A,
    PRINTED_B,
    kv_bytes,
    model_shape,
    printed_prefill_flops,
    reuse_bandwidth_bytes_per_s,
)

MODEL = model_shape("llama3-70b")
LENGTHS = [8192, 16384, 32768, 65536, 131072]


def test_table_1_is_the_model_it_names():
    """FAST'25 Table 1's sizes are those of LLaMA3-70B, and G is eight GPUs of the printed rate."""
    shape = {
        "l_layers": MODEL.layers,
        "d_model": MODEL.width,
        "gqa": MODEL.gqa,
        "s_bytes": MODEL.bytes_per_element,
    }
    assert {name: constant(name).value for name in shape} == shape
    assert (constant("a_coeff").value, constant("b_coeff").value) == (PRINTED_A, PRINTED_B)
    node = fact("fast_table1_constants", x="G_tflops_per_gpu").value * 8
    assert constant("G_a800_node").value == node * 1e12


@pytest.mark.parametrize("tokens", LENGTHS)
def test_equation_1_gives_its_worked_values(tokens):
    """The prefill FLOPs of Eq. 1 equal the tabulated ones exactly."""
    assert printed_prefill_flops(MODEL, tokens) == constant(f"prefill_flops_n{tokens}").value


@pytest.mark.parametrize("prefix", [0, 1024, 2048, 4096, *LENGTHS])
@pytest.mark.parametrize("node", ["a800", "h800"])
def test_equation_2_gives_its_worked_values(prefix, node):
    """The least bandwidth worth loading at equals the tabulated one, to its seven printed digits."""
    bandwidth = reuse_bandwidth_bytes_per_s(MODEL, float(prefix), constant(f"G_{node}_node").value)
    assert bandwidth / 1e9 == pytest.approx(constant(f"B_min_{node}_p{prefix}").value, rel=1e-6)


@pytest.mark.parametrize(("identifier", "node"), [("F43", "a800"), ("F44", "h800")])
def test_the_printed_bandwidths_round_equation_2(identifier, node):
    """The 6 and 19 GB/s of §2.2 are Eq. 2 at 8192 tokens rounded to whole GB/s."""
    assert round(constant(f"B_min_{node}_p8192").value) == claim(identifier).fact.value


def test_the_kvcache_of_a_token_is_320_kib():
    """The printed 320 KB are 320 KiB, and the printed 40 GB for 128k tokens are exactly 40 GiB."""
    assert MODEL.kv_bytes_per_token == constant("kv_bytes_per_token").value
    assert MODEL.kv_bytes_per_token / 1024 == claim("F28").fact.value
    assert kv_bytes(MODEL, 131072) == constant("kv_bytes_p131072").value
    assert constant("tokens_per_TB").value == pytest.approx(claim("F27").fact.value, rel=0.02)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_fitted_prefill_time_meets_the_bars(tokens):
    """Our quadratic fit gives its worked values and lies within its stated error of the bars of Fig 14."""
    c0, c1, c2 = (constant(f"prefill_fit_c{i}").value for i in range(3))
    fitted = c0 + c1 * tokens + c2 * tokens**2
    bar = fact("fast_fig14_latency_breakdown", series="prefix 0%/prefill", x=tokens).value
    assert fitted == pytest.approx(constant(f"prefill_fit_T_n{tokens}_p0").value, rel=1e-5)
    assert abs(fitted / bar - 1) <= constant("prefill_fit_max_rel_error").value * 1.05
