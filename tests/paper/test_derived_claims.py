"""Claims whose number the papers do not print follow from the numbers they do print or draw."""

import numpy as np
import pytest

from mooncake_lab.paper import claim, claims, constant, curve


def points(name, series):
    """One series of a curve, y by x."""
    table = curve(name)
    return table[table["series"] == series].set_index("x")["y"]


def ends(series, *, name="arxiv_fig02_prefill_decode"):
    """The last over the first value of a series."""
    y = points(name, series)
    return y.iloc[-1] / y.iloc[0]


def ratio(name, above, below, x):
    """One series over another at one point."""
    return points(name, above)[x] / points(name, below)[x]


def loads():
    """Correlation of the two loads of arXiv Fig 9."""
    name = "arxiv_fig09_load_fluctuation"
    series = [points(name, each).to_numpy() for each in ("Prefill", "Decoding")]
    return np.corrcoef(*series)[0, 1]


def means(figure, above, below):
    """Ratio of two printed means of a box plot."""
    return ratio(f"{figure}_ttft_box_scheduling", above, below, "mean")


FAST, ARXIV = "fast_fig05", "arxiv_fig08"
CAPACITY = "fast_fig07_capacity_at_thresholds"
ABLATION = "sarathi_serve_table4_ablation"
REJECTED = "arxiv_table3_rejections"
COMPUTED = {
    "F47": lambda: means(FAST, "Load balancing", "Global cache aware"),
    "F48": lambda: means(FAST, "Random", "Global cache aware"),
    "F49": lambda: ratio(CAPACITY, "vLLM", "vLLM Chunked Prefill", 100),
    "A24": loads,
    "A25": lambda: ends("prefill latency"),
    "A26": lambda: ends("decode latency"),
    "A27": lambda: ratio("arxiv_fig07_store_latency", "Layer-wise", "Serialized", 128000),
    "A28": lambda: means(ARXIV, "cache-aware", "KVCache-centric"),
    "A29": lambda: means(ARXIV, "load-balancing", "KVCache-centric"),
    "A30": lambda: means(ARXIV, "random", "KVCache-centric"),
    "A31": lambda: points(REJECTED, "Early Rejection")["change_vs_baseline_percent"],
    "A32": lambda: points(REJECTED, "Early Rejection based on Prediction")["change_vs_baseline_percent"],
    "S06": lambda: (
        points("sarathi_table2_per_token_time", "decode only, batch 4, context 1024")["per_decode_token_ms"]
        / points("sarathi_table2_per_token_time", "1021 prefill tokens + 3 decodes")["per_decode_token_ms"]
    ),
    "S09": lambda: np.divide(*points("sarathi_fig07_tile_quantisation", "iteration time")[[257, 256]]),
    "S17": lambda: ratio(ABLATION, "chunked prefill only", "both", "openchat_tbt_p99"),
    "S26": lambda: ratio(ABLATION, "hybrid batching only", "both", "openchat_tbt_p99"),
    "S27": lambda: ratio(ABLATION, "both", "hybrid batching only", "openchat_ttft_p50"),
    "C02": lambda: constant("snapkv_needle_compressed").value / constant("snapkv_needle_full").value,
}


def test_every_derived_claim_is_computed_here():
    """No claim is marked derived without a derivation."""
    assert {each.id for each in claims() if each.fact.source == "derived"} == set(COMPUTED)


@pytest.mark.parametrize("identifier", COMPUTED)
def test_a_derived_claim_follows_from_its_sources(identifier):
    """The claim's number is what its sources give, to the digits it is stated with."""
    assert claim(identifier).fact.value == pytest.approx(COMPUTED[identifier](), rel=2e-3)


def test_the_largest_tbt_on_simulated_data():
    """The claim that Mooncake keeps the TBT limit rests on the largest value read off arXiv Fig 12."""
    table = curve("arxiv_fig12_simulated_data")
    ours = table[table["series"].str.contains("TBT/Mooncake")]
    assert claim("A23").fact.value == pytest.approx(ours["y"].max(), rel=2e-3)
