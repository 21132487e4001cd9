"""Where the papers contradict themselves or the released data: each test shows one contradiction."""

import numpy as np
import pytest

from mooncake_lab.book.paper import claim, constant, curve, fact
from mooncake_lab.metrics import token_hit_rate
from mooncake_lab.workload import load, reusable_blocks


def points(name, series):
    """One series of a curve, y by x."""
    table = curve(name)
    return table[table["series"] == series].set_index("x")["y"]


def test_the_mean_input_of_the_arxiv_trace_is_a_misprint():
    """In arXiv §4 stands a mean input below the one its own histogram and FAST'25 Table 2 give."""
    printed = fact("arxiv_sec4_trace_statistics", series="printed", x="mean_input_tokens").value
    left = points("arxiv_fig05_input_length_histogram", "requests")
    width = np.diff(left.index).mean()
    least = np.average(left.index, weights=left)
    most = np.average(left.index + width, weights=left)
    later = fact("fast_table2_workloads", series="Tool&Agent", x="avg_input_tokens").value
    assert least < later < most
    assert np.average(left.index + width / 2, weights=left) > printed * 1.1


def test_the_saved_ttft_at_128k_is_more_than_printed():
    """FAST'25 §5.4.3 prints 86 % less TTFT; the bars of Fig 14 give over 88 %."""
    series = "prefix {}/TTFT = schedule+prefill+transfer+load cache"
    with_prefix, without = (
        points("fast_fig14_latency_breakdown", series.format(share))[131072] for share in ("95%", "0%")
    )
    assert 100 * (1 - with_prefix / without) > claim("F42").fact.value + 2


def test_fewer_nodes_hold_50m_tokens_than_printed():
    """FAST'25 §5.3.1 asks for at least 20 nodes; 50M tokens at 3M a node are 16.7."""
    nodes = constant("kv_bytes_p50000000").value / constant("kv_bytes_p3000000").value
    assert nodes == pytest.approx(constant("nodes_for_50M_tokens").value)
    assert nodes < claim("F26").fact.value - 3


def test_block_hits_of_figure_6_contradict_table_1():
    """Figure 6 of arXiv v3 implies a higher unlimited hit rate than its Table 1 prints, hot blocks left out."""
    cdf = points("arxiv_fig06_block_hit_count_cdf", "CDF")
    share = np.diff(cdf.to_numpy(), prepend=0.0)
    uses = cdf.index.to_numpy()
    cold = uses < 100
    mean_uses = np.average(uses[cold], weights=share[cold])
    assert 1 - 1 / mean_uses > fact("arxiv_table1_cache_policies", series="LRUCache", x="inf").value + 0.03


def test_20_percent_on_arxiv_summarization_come_from_the_grid():
    """Interpolated to the TTFT limit, 3P+1D gains under half of the printed 20 % over vLLM."""
    rates = []
    for system in ("Mooncake-[3P+1D]", "vLLM-[4M]"):
        ttft = points("arxiv_fig11_public_datasets", f"ArXiv Summarization/TTFT/{system}")
        above = int(np.argmax(ttft.to_numpy() > 1))
        low, high = ttft.index[above - 1], ttft.index[above]
        rates.append(low + (high - low) * (1 - ttft[low]) / (ttft[high] - ttft[low]))
    assert 0 < 100 * (rates[0] / rates[1] - 1) < claim("A07").fact.value / 2


def test_40_percent_on_l_eval_ignore_the_tbt_limit():
    """At the rate behind the printed 40 %, 3P+1D breaks its TBT limit."""
    ttft = points("arxiv_fig11_public_datasets", "L-Eval/TTFT/Mooncake-[3P+1D]")
    tbt = points("arxiv_fig11_public_datasets", "L-Eval/TBT/Mooncake-[3P+1D]")
    rate = ttft.index[ttft <= 1].max()
    assert tbt[rate] > 1


def test_the_printed_range_of_gains_leaves_out_128k():
    """At 128k the highest passing rates differ by less than the lower end of the printed 50-525 %."""
    rates = []
    for system in ("Mooncake-[3P+1D]", "vLLM-[4M]"):
        ttft = points("arxiv_fig12_simulated_data", f"128k/TTFT/{system}")
        rates.append(ttft.index[ttft <= 1].max())
    assert 100 * (rates[0] / rates[1] - 1) < claim("A02").fact.value


def test_synthetic_chunked_prefill_is_not_similar_to_plain_vllm():
    """FAST'25 §5.2.2 calls the vLLM variants similar; in Fig 7 chunked prefill is lower by over 8 points."""
    capacity = "fast_fig07_capacity_at_thresholds"
    gap = points(capacity, "vLLM") - points(capacity, "vLLM Chunked Prefill")
    assert gap.min() > 8


@pytest.mark.traces("conversation")
def test_the_conversation_trace_ends_before_the_hour():
    """The paper samples an hour; the released file ends before 3540 s and its clock ticks every 3 s."""
    trace = load("conversation")
    hour = fact("arxiv_sec4_trace_statistics", series="printed", x="duration_s").value
    assert trace.arrival_s.max() < hour - 60
    assert np.median(np.diff(np.unique(trace.arrival_s))) == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize(
    ("name", "workload"),
    [pytest.param(name, name.title(), marks=pytest.mark.traces(name)) for name in ("conversation", "synthetic")],
)
def test_blocks_of_512_tokens_cannot_give_figure_9(name, workload):
    """Counting whole 512-token blocks of the released traces stays below the paper's unlimited hit rate."""
    trace = load(name)
    covered = np.minimum(reusable_blocks(trace) * trace.block_size_tokens, trace.input_tokens)
    plain = token_hit_rate(covered, trace.input_tokens)
    assert plain < points("fast_fig09_hit_rate_vs_capacity", workload).max() - 0.005
