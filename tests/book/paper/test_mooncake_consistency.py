"""The Mooncake papers' numbers agree with each other wherever they meet, as far as they were printed."""

import math

import numpy as np
import pytest

from mooncake_lab.book.paper import claim, constant, curve, fact
from mooncake_lab.perf import kv_bytes, model_shape

MODEL = model_shape("llama3-70b")


def points(name, series):
    """One series of a curve, y by x."""
    table = curve(name)
    return table[table["series"] == series].set_index("x")["y"]


@pytest.mark.parametrize(
    ("figure", "baseline"), [("fig01", "vLLM"), ("fig06", "vLLM Prefix Caching"), ("fig07", "vLLM")]
)
def test_printed_gains_are_ratios_of_the_curves(figure, baseline):
    """Figs 1, 6, 7: each printed gain is the ratio of the two capacities minus one, cut to a whole percent."""
    capacity = f"fast_{figure}_capacity_at_thresholds"
    gain = 100 * (points(capacity, "Mooncake") / points(capacity, baseline) - 1)
    printed = points(f"fast_{figure}_gain", f"printed gain vs {baseline}")
    assert (np.floor(gain) == printed).all()
    assert points(f"fast_{figure}_gain", f"derived gain vs {baseline}").to_numpy() == pytest.approx(
        gain.to_numpy(), abs=0.02
    )


@pytest.mark.parametrize(
    ("figure", "workload"), [("fig01", "conversation"), ("fig06", "toolagent"), ("fig07", "synthetic")]
)
@pytest.mark.parametrize("system", ["Mooncake", "vLLM", "vLLM Prefix Caching", "vLLM Chunked Prefill"])
def test_capacities_lie_on_the_curves(figure, workload, system):
    """Capacity at a threshold is the CDF of the request TBT there, to half a point of interpolation."""
    cdf = points(f"fast_{figure}_tbt_cdf_{workload}", system)
    at = points(f"fast_{figure}_capacity_at_thresholds", system)
    assert np.interp(at.index, cdf.index, cdf) == pytest.approx(at.to_numpy(), abs=0.5)


@pytest.mark.parametrize(
    "name",
    [
        "fast_fig01_tbt_cdf_conversation",
        "fast_fig06_tbt_cdf_toolagent",
        "fast_fig07_tbt_cdf_synthetic",
        "arxiv_fig06_block_hit_count_cdf",
        "arxiv_fig13_ttft_cdf",
        "arxiv_fig13_tbt_cdf",
    ],
)
def test_distributions_only_climb(name):
    """Every CDF ascends in both coordinates."""
    for _, series in curve(name).groupby("series"):
        assert series["x"].is_monotonic_increasing
        assert series["y"].diff().min() >= -1e-9


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("fast_fig05_ttft_box_scheduling", "Global cache aware"),
        ("fast_fig05_ttft_box_scheduling", "Local cache aware"),
        ("fast_fig05_ttft_box_scheduling", "Load balancing"),
        ("arxiv_fig08_ttft_box_scheduling", "KVCache-centric"),
        ("arxiv_fig08_ttft_box_scheduling", "cache-aware"),
    ],
)
def test_whiskers_end_one_and_a_half_boxes_above_the_box(name, series):
    """Upper whiskers stand at Q3 + 1.5 IQR or at the last datum just below, so outliers are hidden."""
    box = points(name, series)
    limit = box["q3"] + 1.5 * (box["q3"] - box["q1"])
    assert 0.99 * limit <= box["whisker_high"] <= limit * 1.003


def test_the_slow_schedulers_have_no_outliers():
    """In arXiv Fig 8 the whiskers of load balancing and random end below the limit, so they are maxima."""
    for series in ("load-balancing", "random"):
        box = points("arxiv_fig08_ttft_box_scheduling", series)
        assert box["whisker_high"] < box["q3"] + 1.5 * (box["q3"] - box["q1"])


@pytest.mark.parametrize("workload", ["Conversation", "Tool&Agent", "Synthetic", "All"])
def test_figure_9_labels_follow_from_its_vertices(workload):
    """The share of the maximum at 3M tokens is the mean of the vertices around it, cut to a whole percent."""
    hits = points("fast_fig09_hit_rate_vs_capacity", workload)
    share = 100 * (hits[2e6] + hits[4e6]) / 2 / hits.max()
    assert math.floor(share) == fact("fast_fig09_fraction_of_max_at_3m", series=workload).value
    assert hits.is_monotonic_increasing


@pytest.mark.parametrize("workload", ["Conversation", "Tool&Agent", "Synthetic"])
def test_figure_9_ends_at_the_cache_ratio_of_table_2(workload):
    """The largest hit rate of Fig 9 rounds to the cache ratio printed in Table 2 (59.5 % was cut to 59)."""
    printed = fact("fast_table2_workloads", series=workload, x="cache_ratio_percent").value
    assert abs(100 * points("fast_fig09_hit_rate_vs_capacity", workload).max() - printed) <= 0.51


@pytest.mark.parametrize("system", ["vLLM", "vLLM Prefix Caching", "vLLM Chunked Prefill"])
def test_figure_8_labels_are_ratios_of_its_bars(system):
    """Each printed ratio is the bar over Mooncake's bar, to two decimals and the reading error."""
    ratio = points("fast_fig08_prefill_gpu_time", system) / points("fast_fig08_prefill_gpu_time", "Mooncake")
    assert ratio.to_numpy() == pytest.approx(points("fast_fig08_ratio_to_mooncake", system).to_numpy(), abs=0.008)


def test_figure_10_labels_are_ratios_of_its_bars():
    """Global over local, for hit rates and for GPU time, as printed to two decimals."""
    for label, name in (("hit rate", "fast_fig10_hit_rate"), ("GPU time", "fast_fig10_gpu_time")):
        ratio = points(name, "Global cache") / points(name, "Local cache")
        assert ratio.to_numpy() == pytest.approx(
            points("fast_fig10_ratio", f"{label} global/local").to_numpy(), abs=0.008
        )


@pytest.mark.parametrize(("network", "identifier"), [("4x200Gbps", "F34"), ("8x400Gbps", "F35")])
def test_figure_12_labels_follow_from_its_lines(network, identifier):
    """At 40 GB the baselines are slower by the printed ratios, and the engine moves the printed GB/s."""
    engine = points("fast_fig12_transfer_latency", f"{network}/Transfer Engine")[40]
    for baseline in ("TCP", "Gloo"):
        ratio = points("fast_fig12_transfer_latency", f"{network}/{baseline}")[40] / engine
        printed = fact("fast_fig12_speedup_at_40gb", series=f"{network}/{baseline}").value
        assert ratio == pytest.approx(printed, abs=0.06)
    assert 40 / engine == pytest.approx(claim(identifier).fact.value, rel=0.02)


@pytest.mark.parametrize("prefix", ["0%", "95%"])
def test_figure_14_bars_add_up(prefix):
    """The slices of each bar add up to its height, and those before the first decode step to its TTFT."""
    parts = {
        part: points("fast_fig14_latency_breakdown", f"prefix {prefix}/{part}")
        for part in ("schedule", "prefill", "transfer", "load cache", "decode", "total")
    }
    before = sum(parts[part] for part in ("schedule", "prefill", "transfer", "load cache"))
    ttft = points("fast_fig14_latency_breakdown", f"prefix {prefix}/TTFT = schedule+prefill+transfer+load cache")
    assert before.to_numpy() == pytest.approx(ttft.to_numpy(), rel=1e-3)
    assert (before + parts["decode"]).to_numpy() == pytest.approx(parts["total"].to_numpy(), abs=0.012)


def test_figure_14_moves_kvcache_at_the_bandwidth_of_figure_12():
    """128k tokens of KVCache over the transfer slice give the bandwidth printed for the transfer engine."""
    transfer = points("fast_fig14_latency_breakdown", "prefix 0%/transfer")[131072]
    assert kv_bytes(MODEL, 131072) / transfer / 1e9 == pytest.approx(claim("F34").fact.value, rel=0.01)


def test_figure_2_throughput_is_length_over_latency():
    """In arXiv Fig 2 each normalised throughput is tokens (or requests) over the normalised latency."""
    for stage in ("prefill", "decode"):
        latency = points("arxiv_fig02_prefill_decode", f"{stage} latency")
        throughput = points("arxiv_fig02_prefill_decode", f"{stage} throughput")
        work = latency.index.to_numpy() / latency.to_numpy()
        assert throughput.to_numpy() == pytest.approx(work / work.max(), rel=0.005)


def test_figure_5_counts_every_request_of_the_trace():
    """Both histograms of arXiv Fig 5 add up to the printed number of entries."""
    for name in ("input", "output"):
        counts = points(f"arxiv_fig05_{name}_length_histogram", "requests")
        assert counts.sum() == fact("arxiv_sec4_trace_statistics", series="printed", x="entries").value


def test_table_3_percentages_follow_from_its_counts():
    """Rejected shares and changes against the baseline are ratios of the printed counts."""
    total = fact("arxiv_table2_datasets", series="Real data", x="num_requests").value
    baseline = fact("arxiv_table3_rejections", series="Baseline", x="rejected_requests").value
    for series in ("Baseline", "Early Rejection", "Early Rejection based on Prediction"):
        row = points("arxiv_table3_rejections", series)
        assert row["rejected_percent_of_23000"] == pytest.approx(100 * row["rejected_requests"] / total, abs=0.01)
        if series != "Baseline":
            change = 100 * (row["rejected_requests"] / baseline - 1)
            assert row["change_vs_baseline_percent"] == pytest.approx(change, abs=0.01)


def test_75_percent_more_requests_is_a_ratio_of_tbt_shares():
    """The abstract's 75 % is the ratio of the shares of requests within the TBT limit in Fig 13, minus one."""
    share = curve("arxiv_fig13_slo_attainment").set_index(["series", "x"])["y"]
    gain = share["Mooncake-[10P+10D]", "TBT<=0.1s"] / share["vLLM-[20M]", "TBT<=0.1s"] - 1
    assert round(100 * gain) == claim("A03").fact.value


@pytest.mark.parametrize("name", ["arxiv_fig11_public_datasets", "arxiv_fig12_simulated_data"])
@pytest.mark.parametrize(
    ("metric", "factor"), [("TTFT", "slo_ttft_p90_factor_arxiv"), ("TBT", "slo_tbt_p90_factor_arxiv")]
)
def test_the_slo_is_a_multiple_of_the_mean_over_systems_at_the_lowest_rate(name, metric, factor):
    """In every panel the three systems average to one over the SLO factor at the lowest rate."""
    table = curve(name)
    table[["panel", "metric", "system"]] = table["series"].str.split("/", expand=True)
    for _, panel in table[table["metric"] == metric].groupby("panel"):
        lowest = panel[panel["x"] == panel["x"].min()]
        assert len(lowest) == 3
        assert lowest["y"].mean() == pytest.approx(1 / constant(factor).value, rel=0.02)


def highest_passing_rate(panel, system, name="arxiv_fig12_simulated_data", metric="TTFT"):
    """The highest tested rate at which a system keeps its normalised limit."""
    series = points(name, f"{panel}/{metric}/{system}")
    return series.index[series <= 1].max()


@pytest.mark.parametrize(
    ("name", "panel", "identifier"),
    [
        ("arxiv_fig12_simulated_data", "16k", "A01"),
        ("arxiv_fig12_simulated_data", "64k", "A02"),
        ("arxiv_fig11_public_datasets", "ArXiv Summarization", "A07"),
        ("arxiv_fig11_public_datasets", "L-Eval", "A08"),
    ],
)
def test_throughput_gains_are_ratios_of_tested_rates(name, panel, identifier):
    """The printed 525, 50, 20 and 40 % are ratios of the highest tested rates that keep the TTFT limit."""
    ours = highest_passing_rate(panel, "Mooncake-[3P+1D]", name)
    theirs = highest_passing_rate(panel, "vLLM-[4M]", name)
    assert 100 * (ours / theirs - 1) == pytest.approx(claim(identifier).fact.value)


@pytest.mark.parametrize(
    ("identifiers", "name", "series"),
    [
        (("F01", "F02", "F03"), "fast_fig01_gain", "printed gain vs vLLM"),
        (("F04", "F05", "F06"), "fast_fig06_gain", "printed gain vs vLLM Prefix Caching"),
        (("F07", "F08", "F09"), "fast_fig07_gain", "printed gain vs vLLM"),
    ],
)
def test_claims_repeat_the_figures(identifiers, name, series):
    """A claim about a printed gain has the value of the figure."""
    assert [claim(identifier).fact.value for identifier in identifiers] == points(name, series).tolist()


def test_saved_prefill_time_follows_from_the_bars():
    """The 36, 53 and 64 % of §5.2.3 are one minus the ratio of Mooncake's bar to that of vLLM."""
    saved = 1 - points("fast_fig08_prefill_gpu_time", "Mooncake") / points("fast_fig08_prefill_gpu_time", "vLLM")
    for identifier, workload in (("F17", "Conversation"), ("F18", "Tool&Agent"), ("F19", "Synthetic")):
        assert round(100 * saved[workload]) == claim(identifier).fact.value
