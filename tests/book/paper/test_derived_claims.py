"""Claims whose number the papers do not print follow from the numbers they do print or draw."""

from itertools import product

import numpy as np
import pytest

from mooncake_lab.book.chapters.overload.claims import paper_movement
from mooncake_lab.book.paper import claim, claims, constant, curve, fact


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


def lead_of_lru():
    """The smallest lead of LRU over the better of its rivals in arXiv Table 1, at finite capacities."""
    table = curve("arxiv_table1_cache_policies")
    rates = table[np.isfinite(table["x"])].pivot_table(index="x", columns="series", values="y")
    return (rates["LRUCache"] - rates.drop(columns="LRUCache").max(axis=1)).min()


def highest(dataset, system):
    """The highest rate of arXiv Fig 12 up to which a system keeps the TTFT limit."""
    y = points("arxiv_fig12_simulated_data", f"{dataset}/TTFT/{system}").sort_index()
    return y.index[(y <= 1).cumprod().astype(bool)].max()


def median(name):
    """Where Mooncake's curve of effective requests crosses a half, in ms."""
    y = points(name, "Mooncake").sort_index()
    return np.interp(50, y, y.index)


def within(tbt_s):
    """The percentage of vLLM's requests within a TBT in arXiv Fig 13."""
    y = points("arxiv_fig13_tbt_cdf", "vLLM-[20M]").sort_index()
    return 100 * np.interp(tbt_s, y.index, y)


def ttft(system, share):
    """The TTFT that a share of the requests does not exceed in arXiv Fig 13."""
    y = points("arxiv_fig13_ttft_cdf", system).sort_index()
    return np.interp(share, y, y.index)


def both(dataset, system):
    """The highest rate of arXiv Fig 11 at which both limits have been kept so far."""
    ttft, tbt = (
        points("arxiv_fig11_public_datasets", f"{dataset}/{what}/{system}").sort_index()
        for what in ("TTFT", "TBT")
    )
    kept = (ttft <= 1) & (tbt.reindex(ttft.index) <= 1)
    return ttft.index[kept.cumprod().astype(bool)].max()


def constants_ratio(above, below):
    """One printed constant over another."""
    return constant(above).value / constant(below).value


FAST, ARXIV = "fast_fig05", "arxiv_fig08"
CAPACITY = "fast_fig07_capacity_at_thresholds"
ABLATION = "sarathi_serve_table4_ablation"
REJECTED = "arxiv_table3_rejections"
COMPUTED = {
    "F47": lambda: means(FAST, "Load balancing", "Global cache aware"),
    "F48": lambda: means(FAST, "Random", "Global cache aware"),
    "F49": lambda: ratio(CAPACITY, "vLLM", "vLLM Chunked Prefill", 100),
    "A11": lead_of_lru,
    "A24": loads,
    "A25": lambda: ends("prefill latency"),
    "A26": lambda: ends("decode latency"),
    "A33": lambda: highest("32k", "Mooncake-[3P+1D]") / highest("32k", "vLLM-[4M]"),
    "A34": lambda: highest("128k", "Mooncake-[3P+1D]") / highest("128k", "vLLM-[4M]"),
    **{
        f"A{117 + i}": lambda data=data: highest(data, "Mooncake-[2P+2D]") / highest(data, "vLLM-[4M]")
        for i, data in enumerate(("16k", "32k", "64k", "128k"))
    },
    **{
        f"A{121 + i}": lambda data=data: both(data, "Mooncake-[2P+2D]") / both(data, "vLLM-[4M]")
        for i, data in enumerate(("ArXiv Summarization", "L-Eval"))
    },
    "A35": lambda: paper_movement()["decode_swing"],
    "A36": lambda: paper_movement()["peak_lag_s"],
    "A124": lambda: points("arxiv_fig09_load_fluctuation", "Prefill").mean() / 100,
    "A125": lambda: points("arxiv_fig09_load_fluctuation", "Decoding").mean() / 100,
    "F219": lambda: median("fast_fig01_tbt_cdf_conversation"),
    "F220": lambda: median("fast_fig06_tbt_cdf_toolagent"),
    "F221": lambda: median("fast_fig07_tbt_cdf_synthetic"),
    **{f"A{126 + i}": lambda tbt_s=tbt_s: within(tbt_s) for i, tbt_s in enumerate((0.2, 0.3, 0.5))},
    **{
        f"A{129 + i}": lambda system=system, share=share: ttft(system, share)
        for i, (system, share) in enumerate(product(("Mooncake-[10P+10D]", "vLLM-[20M]"), (0.5, 0.9)))
    },
    "A27": lambda: ratio("arxiv_fig07_store_latency", "Layer-wise", "Serialized", 128000),
    "A28": lambda: means(ARXIV, "cache-aware", "KVCache-centric"),
    "A29": lambda: means(ARXIV, "load-balancing", "KVCache-centric"),
    "A30": lambda: means(ARXIV, "random", "KVCache-centric"),
    "A31": lambda: points(REJECTED, "Early Rejection")["change_vs_baseline_percent"],
    "A32": lambda: points(REJECTED, "Early Rejection based on Prediction")["change_vs_baseline_percent"],
    "A123": lambda: 1 + points(REJECTED, "Early Rejection")["change_vs_baseline_percent"] / 100,
    "S06": lambda: (
        points("sarathi_table2_per_token_time", "decode only, batch 4, context 1024")["per_decode_token_ms"]
        / points("sarathi_table2_per_token_time", "1021 prefill tokens + 3 decodes")["per_decode_token_ms"]
    ),
    "S09": lambda: np.divide(*points("sarathi_fig07_tile_quantisation", "iteration time")[[257, 256]]),
    "S17": lambda: ratio(ABLATION, "chunked prefill only", "both", "openchat_tbt_p99"),
    "S26": lambda: ratio(ABLATION, "hybrid batching only", "both", "openchat_tbt_p99"),
    "S27": lambda: ratio(ABLATION, "both", "hybrid batching only", "openchat_ttft_p50"),
    "S37": lambda: ratio(ABLATION, "hybrid batching only", "both", "arxiv_tbt_p99"),
    "S38": lambda: ratio(ABLATION, "both", "hybrid batching only", "arxiv_ttft_p50"),
    "C02": lambda: constants_ratio("snapkv_needle_compressed", "snapkv_needle_full"),
    "C11": lambda: constants_ratio("pyramidinfer_perplexity_deep_less", "pyramidinfer_perplexity_uniform"),
    "C14": lambda: constants_ratio("minicache_longbench", "minicache_longbench_full"),
    "K05": lambda: constants_ratio("runahead_noise_baseline_percent", "runahead_noise_percent"),
}


def test_every_derived_claim_is_computed_here():
    """No claim is marked derived without a derivation."""
    assert {each.id for each in claims() if each.fact.source == "derived"} == set(COMPUTED)


def test_a_derived_claim_follows_from_its_sources():
    """The claim's number is what its sources give, to the digits it is stated with."""
    stated = {identifier: claim(identifier).fact.value for identifier in COMPUTED}
    assert stated == {identifier: pytest.approx(value(), rel=2e-3) for identifier, value in COMPUTED.items()}


def test_the_largest_tbt_on_simulated_data():
    """The claim that Mooncake keeps the TBT limit rests on the largest value read off arXiv Fig 12."""
    table = curve("arxiv_fig12_simulated_data")
    ours = table[table["series"].str.contains("TBT/Mooncake")]
    assert claim("A23").fact.value == pytest.approx(ours["y"].max(), rel=2e-3)


FIG_8, FIG_10, FIG_13 = "fast_fig08_ratio_to_mooncake", "fast_fig10_ratio", "fast_fig13_bandwidth_demand"
FIG_11, SERVE = "fast_fig11_replica_count", "sarathi_serve_text_constants"
PREFIX, CHUNKED, TABLE_4 = "vLLM Prefix Caching", "vLLM Chunked Prefill", "sarathi_table4_peak_gains"
TRANSCRIBED = {
    **{
        f"F{50 + 2 * place + which}": (FIG_8, series, workload)
        for place, workload in enumerate(("Conversation", "Tool&Agent", "Synthetic"))
        for which, series in enumerate((PREFIX, CHUNKED))
    },
    **{
        f"F{56 + 4 * place + 2 * which + later}": (f"fast_fig0{figure}_capacity_at_thresholds", series, limit_ms)
        for place, figure in enumerate((1, 6, 7))
        for which, series in enumerate((PREFIX, CHUNKED))
        for later, limit_ms in enumerate((100, 300))
    },
    "F68": (FIG_10, "hit rate global/local", "Conversation"),
    "F69": (FIG_10, "GPU time global/local", "Conversation"),
    "F70": (FIG_10, "hit rate global/local", "Tool&Agent"),
    "F71": (FIG_10, "GPU time global/local", "Tool&Agent"),
    "F72": (FIG_13, "average TTFT", 24),
    "F73": (FIG_13, "average TTFT", 40),
    "F74": ("fast_fig15a_effective_ratio", "effective request ratio", 11),
    "F75": ("fast_fig15b_avg_tbt", "average TBT", 5),
    "F76": ("fast_fig15b_avg_tbt", "average TBT", 11),
    "F77": ("fast_fig15b_avg_ttft", "average TTFT", 5),
    "F78": ("fast_fig15b_avg_ttft", "average TTFT", 8),
    "S28": (TABLE_4, "LLaMA-13B/A6000/2K", "end_to_end_speedup"),
    "S29": (TABLE_4, "LLaMA-13B/A6000/2K", "decode_speedup"),
    "S30": (TABLE_4, "LLaMA-13B/A6000/3K", "end_to_end_speedup"),
    "S31": (TABLE_4, "LLaMA-13B/A6000/3K", "decode_speedup"),
    "S32": (TABLE_4, "LLaMA-33B/A100/1K", "decode_speedup"),
    "S33": (TABLE_4, "LLaMA-33B/A100/2K", "end_to_end_speedup"),
    "S34": (TABLE_4, "LLaMA-33B/A100/2K", "decode_speedup"),
    "S35": (TABLE_4, "LLaMA-33B/A100/3K", "end_to_end_speedup"),
    "S36": (TABLE_4, "LLaMA-33B/A100/3K", "decode_speedup"),
    "F104": (FIG_11, "Conversation/10th", 3480),
    "F105": (FIG_11, "Conversation/100th", 3480),
    "F106": (FIG_13, "TTFT of recomputation", 400),
    "F107": (FIG_13, "transfer time real", 24),
    "F108": ("fast_fig15a_effective_ratio", "effective request ratio", 5),
    "S39": ("sarathi_fig12_pipeline", "Orca-best, TP8 x PP8", "time_over_tp8_replicas"),
    "S41": ("sarathi_fig13_chunk_overhead", "attention", 64),
    "S44": ("sarathi_fig08_decode_speedup", "2K", 2),
    "S45": ("sarathi_fig08_decode_speedup", "3K", 2),
    "S46": ("sarathi_fig08_decode_speedup", "1K", 18),
    "S47": (SERVE, "Yi-34B", "strict_capacity_over_orca"),
    "S48": (SERVE, "LLaMA2-70B", "strict_capacity_over_orca"),
    "S49": (SERVE, "Falcon-180B", "strict_capacity_over_vllm_tp8"),
    "S50": (SERVE, "Falcon-180B", "strict_capacity_over_vllm_tp4_pp2"),
    "S51": (SERVE, "Falcon-180B", "relaxed_capacity_over_vllm_tp4_pp2"),
    "S52": (SERVE, "Figure 9", "largest_added_latency"),
    "S53": (SERVE, "Figure 12", "strict_capacity_over_vllm"),
    "S54": (SERVE, "Falcon-180B", "prompt_4k_ms"),
    "S55": (SERVE, "Falcon-180B", "decode_32_ms"),
}
TABLE_1, TABLE_2 = "arxiv_table1_cache_policies", "fast_table2_workloads"
STATISTICS = "arxiv_sec4_trace_statistics"
OF_KIND = {
    "F101": (TABLE_2, "Conversation", "cache_ratio_percent"),
    "F102": (TABLE_2, "Tool&Agent", "cache_ratio_percent"),
    "F103": (TABLE_2, "Synthetic", "cache_ratio_percent"),
    "A101": (STATISTICS, "printed", "mean_input_tokens"),
    "A102": (STATISTICS, "printed", "mean_input_output_ratio"),
    "A103": (TABLE_1, "LRUCache", "inf"),
    **{f"A{104 + i}": (TABLE_1, "LRUCache", blocks) for i, blocks in enumerate((100_000, 30_000, 10_000))},
    **{
        f"A{first + i}": (TABLE_1, f"{policy}Cache", blocks)
        for first, policy in ((107, "LFU"), (112, "LengthAware"))
        for i, blocks in enumerate((100_000, 50_000, 30_000, 10_000, 1000))
    },
    "S43": ("sarathi_fig13_chunk_overhead", "total prefill", 512),
}
"""Transcribed, too, with the band that claims or rows of the same kind had before."""


def test_a_transcribed_claim_is_the_point_of_its_curve():
    """The claims that were added from figures and tables carry their numbers and sources unchanged."""
    for identifier, (name, series, x) in (TRANSCRIBED | OF_KIND).items():
        stated, found = claim(identifier).fact, fact(name, series=series, x=x)
        unit = "nodes" if name == FIG_11 else found.unit  # a replica is a node that holds the block
        expected = (found.value, found.source, unit)
        assert (stated.value, stated.source, stated.unit) == expected, identifier


def test_bands_of_added_claims_follow_one_rule():
    """A share within a tenth; a duration or a ratio within 1.25, or half the way to 1 on a log scale if nearer."""
    others = ("A33", "A34", "A117", "A118", "A119", "A120", "A121", "A122", "S37", "S38", "S40")
    others += ("K02", "K03", "K04", "K05", "C09", "C10", "C11", "C12", "C13")
    for each in (claim(identifier) for identifier in (*TRANSCRIBED, *others)):
        assert each.stated == "after", each.id
        if each.fact.unit == "percent":
            assert (each.yardstick.grade, each.yardstick.band) == ("value", 0.1), each.id
        else:
            value = each.fact.value
            has_direction = each.fact.unit == "ratio" and value != 1
            widest = min(1.25, max(value, 1 / value) ** 0.5) if has_direction else 1.25
            assert each.yardstick.grade == "factor", each.id
            assert each.yardstick.band == pytest.approx(widest, abs=1.1e-3), each.id


def test_bands_of_added_claims_are_those_of_their_kind():
    """A cell of arXiv Table 1 has the band of A10, chapter 1's statistics have the bands of their table."""
    bands = {name: claim(name).yardstick.band for name in OF_KIND}
    assert {claim(name).stated for name in OF_KIND} == {"after"}
    assert {bands[f"A{number}"] for number in range(103, 117)} == {claim("A10").yardstick.band}
    assert {bands[name] for name in ("F101", "F102", "F103", "A102")} == {0.02}
    assert bands["A101"] == 0.005
    assert (claim("S43").yardstick.grade, claim("S42").yardstick.grade) == ("order", "order")
    assert claim("C14").yardstick.band == claim("C02").yardstick.band
