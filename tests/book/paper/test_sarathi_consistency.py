"""The numbers of SARATHI and Sarathi-Serve agree with each other, and where they do not, a test says so."""

import pytest

from mooncake_lab.book.paper import claim, curve, fact
from mooncake_lab.perf import hardware


def cells(name):
    """A table as y by (series, x)."""
    return curve(name).set_index(["series", "x"])["y"]


def test_table_2_adds_up():
    """Linear and attention time add to the total of each batch."""
    table = cells("sarathi_table2_per_token_time")
    for batch in table.index.get_level_values("series").unique():
        parts = table[batch, "linear_ms"] + table[batch, "attention_ms"]
        assert parts == pytest.approx(table[batch, "total_ms"], abs=0.05)


def test_table_2_divides_by_tokens():
    """A decode alone takes a quarter of its batch; a piggybacked one a third of what three add to the prefill."""
    table = cells("sarathi_table2_per_token_time")
    alone, mixed = "decode only, batch 4, context 1024", "1021 prefill tokens + 3 decodes"
    assert table[alone, "total_ms"] / 4 == pytest.approx(table[alone, "per_decode_token_ms"], abs=0.005)
    extra = (table[mixed, "total_ms"] - table["prefill only", "total_ms"]) / 3
    assert extra == pytest.approx(table[mixed, "per_decode_token_ms"], abs=0.005)


def test_the_prefill_of_table_2_is_one_prompt():
    """The caption speaks of four prompts of 1024 tokens; the time a token fits one such prompt."""
    table = cells("sarathi_table2_per_token_time")
    tokens = table["prefill only", "total_ms"] / table["prefill only", "per_prefill_token_ms"]
    assert tokens == pytest.approx(1024, rel=0.005)


def test_figure_7_and_its_percentages():
    """Doubling the tokens to a second pair of tiles costs 27 % more, one token beyond another 32 %."""
    time = curve("sarathi_fig07_tile_quantisation").set_index("x")["y"]
    assert time[257] / time[256] == pytest.approx(claim("S09").fact.value, rel=1e-3)
    assert time[257] / time[256] > time[256] / time[128]


def test_figure_3_and_table_2_agree():
    """Decode over prefill at batch 18 times the prefill time a token lies within the bars read off Fig 3."""
    ratio = fact("sarathi_fig03_decode_over_prefill", x=18).value
    prefill = fact("sarathi_table2_per_token_time", series="prefill only", x="per_prefill_token_ms").value
    read = fact("sarathi_fig03_time_per_token", series="decode", x=18).value
    assert ratio * prefill == pytest.approx(read, abs=0.5)


@pytest.mark.parametrize("series", sorted(set(curve("sarathi_table4_peak_gains")["series"])))
def test_printed_pd_ratios_take_the_decodes_out_of_the_chunk(series):
    """P:D at the peak is (C-(B-1))/(B-1), not the C/(B-1) of the text; 28 at batch 10 is a rounding."""
    table = cells("sarathi_table4_peak_gains")
    chunk, decodes = 256, table[series, "batch_size"] - 1
    printed = table[series, "prefill_to_decode_ratio"]
    assert abs((chunk - decodes) / decodes - printed) < abs(chunk / decodes - printed) + 0.4
    assert (chunk - decodes) / decodes == pytest.approx(printed, abs=0.7)


def test_gains_are_ratios_of_the_times_read():
    """Fig 10 and Fig 12: printed speed-ups are ratios of the times, within what reading by eye allows."""
    total = cells("sarathi_fig10_total_time")
    gain = fact("sarathi_fig11a_gain_over_baseline", series="SARATHI", x="1K").value
    assert total["baseline", "1K/batch 18"] / total["SARATHI", "1K/batch 18"] == pytest.approx(gain, rel=0.02)
    pipeline = cells("sarathi_fig12_pipeline")
    for series in ("Orca-best, TP8 x PP8", "TP8 replicas"):
        ratio = pipeline[series, "completion_s"] / pipeline["SARATHI", "completion_s"]
        assert ratio == pytest.approx(pipeline[series, "time_over_sarathi"], rel=0.05)
    both = pipeline["Orca-best, TP8 x PP8", "time_over_sarathi"] / pipeline["TP8 replicas", "time_over_sarathi"]
    assert both == pytest.approx(pipeline["Orca-best, TP8 x PP8", "time_over_tp8_replicas"], rel=0.02)


def test_batch_ratio_of_the_pipeline():
    """27 requests a micro-batch over 11 a replica is the printed 2.45."""
    text = cells("sarathi_text_constants")
    ratio = text["GPT-3/64 A100", "largest_batch_tp8_pp8"] / text["GPT-3/64 A100", "largest_batch_tp8"]
    assert ratio == pytest.approx(text["GPT-3/64 A100", "largest_batch_ratio"], abs=0.005)


def test_the_quoted_intensity_is_that_of_the_hardware():
    """The quoted FLOPs a byte of the A100 are its peak rate over its memory bandwidth."""
    device = hardware("a100")
    quoted = fact("sarathi_text_constants", series="A100", x="flop_per_byte").value
    assert device.bfloat16_flops_per_s / device.device_memory_bytes_per_s == pytest.approx(quoted, rel=0.03)


def test_the_ablation_of_sarathi_serve_is_a_trade():
    """Both techniques together have the least TBT of the three, and a TTFT between the two alone."""
    table = cells("sarathi_serve_table4_ablation")
    hybrid, chunked, both = "hybrid batching only", "chunked prefill only", "both"
    for workload in ("openchat", "arxiv"):
        assert table[both, f"{workload}_tbt_p99"] < table[chunked, f"{workload}_tbt_p99"]
        assert table[chunked, f"{workload}_tbt_p99"] < table[hybrid, f"{workload}_tbt_p99"]
        ttft = [table[series, f"{workload}_ttft_p50"] for series in (hybrid, both, chunked)]
        assert ttft == sorted(ttft)


def test_relaxed_limits_are_five_times_the_strict_ones():
    """Strict is 5x and relaxed 25x the same iteration time, so their ratio is 5."""
    table = cells("sarathi_serve_slo")
    for model in table.index.get_level_values("series").unique():
        assert table[model, "relaxed"] / table[model, "strict"] == pytest.approx(5)


def test_piggybacking_is_cheap_on_another_model_too():
    """In the artifact's repeat of Table 2 the marginal decode costs under 2 % of a decode alone."""
    table = cells("sarathi_serve_artifact_mixed_batch")
    prefill, mixed = (
        table["prefill only, 1024 tokens", "total_ms"],
        table["1021 prefill tokens + 3 decodes", "total_ms"],
    )
    assert (mixed - prefill) / 3 < 0.02 * table["decode only, batch 4", "total_ms"] / 4
