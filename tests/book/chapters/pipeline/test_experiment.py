"""GPT-3's pipelines, long prompts, KV-Runahead, Sarathi-Serve and the crews of chapter 06: laws before values."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mooncake_lab.batching import Sarathi
from mooncake_lab.book.chapters.pipeline import claims as stalls
from mooncake_lab.book.chapters.pipeline import experiment as pipeline
from mooncake_lab.book.chapters.pipeline import long as pipeline_long
from mooncake_lab.book.chapters.pipeline import serving as pipeline_serving
from mooncake_lab.book.chapters.pipeline.claims import _gain, beside_papers
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.paper import claims, fact
from mooncake_lab.book.testbeds import sarathi_serve as beds
from mooncake_lab.metrics.pipeline_bubbles import CAUSES

SMALL = pipeline.Gpt3(requests=120)


@pytest.fixture(scope="module")
def three():
    """The three schemes on a run that is small, but longer than a ramp of one micro-batch."""
    return run(vary(SMALL, scheme=pipeline.SCHEMES), cache=False)


def test_lengths_are_those_of_the_paper():
    """Between 1K and 4K tokens, shorter ones more often, ten prompt tokens for every decode."""
    work = pipeline.zipf_requests(2000, seed=1)
    totals = np.array([each.request.input_tokens + each.output_tokens for each in work])
    assert totals.min() >= pipeline.SHORTEST
    assert totals.max() <= pipeline.LONGEST
    assert np.median(totals) < (pipeline.SHORTEST + pipeline.LONGEST) / 2
    ratios = [each.request.input_tokens / each.output_tokens for each in work]
    assert np.mean(ratios) == pytest.approx(pipeline.RATIO, rel=0.01)
    alike = pipeline.zipf_requests(50, spread=0.0)
    assert len({each.request.input_tokens for each in alike}) == 1


def test_the_order_is_the_papers(three):
    """SARATHI is done first and idles least of the pipelines; replicas have no bubbles at all."""
    by = three.set_index("scheme")
    assert by["completion_s"].idxmin() == "SARATHI"
    assert by.loc["SARATHI", "idle_share"] < by.loc["Orca-best", "idle_share"]
    assert by.loc["TP8 replicas", "median_bubble_s"] == pytest.approx(0)


def test_all_time_is_accounted_for(three):
    """Shares by cause add up to all of the time, for every scheme."""
    shares = pipeline.shares_by_cause(three)
    assert list(shares.columns) == ["busy", *CAUSES]
    assert shares.sum(axis=1).to_numpy() == pytest.approx(100)


def test_quantiles_rise(three):
    """Bubbles and completions as rows: one a scheme and share, in order."""
    for prefix in ("bubble", "done"):
        rows = pipeline.quantiles(three, prefix)
        assert len(rows) == len(pipeline.SCHEMES) * len(pipeline.PERCENTS)
        for _, each in rows.groupby("scheme"):
            assert each["value"].is_monotonic_increasing


def test_a_cheaper_decode_makes_bubbles_matter_more(three):
    """With decode attention eight times as dear, SARATHI gains less over Orca: prompts stick out less."""
    dear = run(vary(SMALL, scheme=pipeline.SCHEMES, decode_attention=(8.0,)), cache=False)
    plain, slow = (pipeline.sensitivity(each).iloc[0] for each in (three, dear))
    assert slow["prompt_over_decode"] < plain["prompt_over_decode"]
    assert slow["orca_over_sarathi"] < plain["orca_over_sarathi"]


def test_timelines_hold_every_iteration_and_every_gap():
    """Rows of work and of gaps cover each stage from 0 to its last iteration without overlap."""
    for scheme in ("Orca-best", "SARATHI"):
        rows = pipeline.timeline(pipeline.two_stages(scheme))
        for _, stage in rows.groupby("stage"):
            ordered = stage.sort_values("start_ms")
            ends = np.concatenate([[0.0], ordered["end_ms"].to_numpy()[:-1]])
            assert ordered["start_ms"].to_numpy() == pytest.approx(ends, abs=1e-5)


def test_any_policy_can_be_tried():
    """The exercise's function gives seconds and an idle share, and names of schemes are checked."""
    seconds, idle = pipeline.with_policy(Sarathi(chunk_tokens=256))
    assert seconds > 0
    assert 0 < idle < 1
    with pytest.raises(ValueError, match="allowed are Orca-best, SARATHI, TP8 replicas"):
        pipeline.policy_of("vLLM", 256)


def test_long_prompts_speed_up_towards_the_number_of_nodes():
    """Chunked pipelines gain with length, sequence parallelism is ahead, and bytes are in the other order."""
    table = pipeline_long.three_ways((32_768, 1_048_576), (4,))
    cpp = table[table["way"] == "CPP"].set_index("tokens")["speed_up"]
    assert cpp[32_768] < cpp[1_048_576] < 4
    long = table[table["tokens"] == 1_048_576].set_index("way")
    assert long["speed_up"].idxmax() == "sequence parallel"
    assert long["network_gb"].idxmin() == "CPP"
    assert pipeline_long.recurrence_against_events((32_768,)) < 1e-9


def test_chunks_of_equal_time_ramp_less():
    """As many chunks of equal time end before chunks of equal tokens, and hold the same prompt."""
    table = pipeline_long.equal_tokens_or_time().set_index("cut")
    assert table.loc["equal time", "ttft_s"] < table.loc["equal tokens", "ttft_s"]
    sizes = pipeline_long.equal_time_sizes(pipeline_long.group(4), 65_536, 16)
    assert (sum(sizes), len(sizes)) == (65_536, 16)


def test_the_best_slices_are_the_best():
    """Best slices are no slower than even or equal-work ones."""
    table = pipeline_long.runahead_sweep((2048, 8192), (2, 4))
    assert (table["best_ms"] <= table[["even_ms", "equal_work_ms"]].min(axis=1) * (1 + 1e-12)).all()


def test_the_artifact_is_met():
    """Prefills exactly, decodes within a quarter, and the mixed row, which was not used, within a percent."""
    table = beds.calibration()
    missed = table.set_index("what")["miss_percent"].abs()
    assert missed["prefill"].max() < 1e-6
    assert missed["decode"].max() < 25
    assert missed["1021 prefill tokens + 3 decodes"] < 1


def test_decode_times_may_be_left_out():
    """A line through the first and the last time misses those between; that of large batches the small ones."""
    batches, steps = beds._points(beds.DECODES)

    def missed(rows):
        cost = beds.yi_34b_on_two_a100s(decode_rows=rows)
        found = [cost.step_s(0, 0, n, n * beds.CONTEXT_TOKENS) for n in batches]
        return dict(zip(batches, np.round(100 * (np.array(found) / steps - 1), 1), strict=True))

    straight, large = missed("first and last"), missed("from 8")
    assert (straight[1], straight[8], straight[16], straight[128]) == (0, -21.6, -17.7, 0)
    assert large[4] > 30
    assert all(large[n] == 0 for n in (8, 16, 32, 64, 128))
    assert set(missed("all").values()) == {0}


def test_budgets_fit_their_limit():
    """A larger limit allows a larger budget, each iteration keeps its limit, and one tile more would not."""
    table = pipeline_serving.budgets((0.01, 0.2, 1.0))
    assert table["budget_tokens"].tolist()[0] == 0
    assert table["budget_tokens"].is_monotonic_increasing
    assert (table["iteration_s"][1:] <= table["slo_s"][1:]).all()
    cost = beds.yi_34b_on_two_a100s()
    over = [pipeline_serving._fused_s(cost, int(n) + 128) for n in table["budget_tokens"][1:]]
    assert all(seconds > limit for seconds, limit in zip(over, table["slo_s"][1:], strict=True))


def test_drawn_lengths_have_the_published_percentiles():
    """Medians of many draws are near the published ones, and no request is longer than the paper keeps."""
    drawn = np.array(pipeline_serving.draw_lengths("openchat_sharegpt4", 4000, seed=2))
    assert drawn.sum(axis=1).max() <= 8192
    for column, part in enumerate(("prompt", "output")):
        printed = fact("sarathi_serve_table2_workloads", series="openchat_sharegpt4", x=f"{part}_median").value
        assert np.median(drawn[:, column]) == pytest.approx(printed, rel=0.12)


@pytest.fixture(scope="module")
def served():
    """VLLM and Sarathi-Serve at a low and a higher rate."""
    base = pipeline_serving.Serving(requests=60)
    return run(vary(base, policy=("vLLM", "Sarathi-Serve 512"), rate=(0.16, 0.6)), cache=False)


def test_stall_free_batching_bounds_the_gap_between_tokens(served):
    """No gap under Sarathi-Serve is longer than its largest iteration; vLLM's are prompts long."""
    cost = beds.yi_34b_on_two_a100s()
    longest = cost.step_s(512, 8192, 128, 128 * 8192)
    by = served.groupby("policy")["largest_tbt_s"].max()
    assert by["Sarathi-Serve 512"] < longest < by["vLLM"]


def test_capacity_is_the_last_rate_that_passes(served):
    """Capacity rises with the limit, and where the lowest rate fails there is none."""
    table = pipeline_serving.capacity(served, (0.01, 0.2, 10.0))
    for _, each in table.groupby("policy"):
        assert each["requests_per_s"].tolist()[0] == 0
        assert each["requests_per_s"].is_monotonic_increasing
    with pytest.raises(ValueError, match="at none of the rates"):
        _gain("S18", table.assign(requests_per_s=0.0), "strict", "Sarathi-Serve 512")


@pytest.fixture(scope="module")
def apart():
    """Table 4 of Sarathi-Serve from few requests."""
    return stalls.ablation(run(stalls.ablation_points("smoke"), cache=False))


def test_a_capacity_at_the_end_of_the_grid_is_a_lower_bound():
    """A policy that passes the highest rate tried may pass more; one that fails it does not."""
    slo_s = fact("sarathi_serve_slo", series="Yi-34B", x="strict").value
    row = {"slo_s": slo_s, "requests": 1000, "highest_tested": 1.2}
    for reached, bound in ((1.2, "at least"), (0.6, "exact")):
        table = pd.DataFrame(
            [
                {**row, "policy": "Sarathi-Serve 512", "requests_per_s": reached},
                {**row, "policy": "vLLM", "requests_per_s": 0.3},
            ]
        )
        assert _gain("S18", table, "strict", "Sarathi-Serve 512").bound == bound


def test_the_ablation_is_a_mean_over_seeds():
    """Two seeds of one variant are one row with the means of both."""
    rows = [
        {"workload": "openchat_sharegpt4", "policy": "Sarathi-Serve 512", "apart": False, "requests": 9,
         "p50_ttft_s": ttft_s, "p99_tbt_s": tbt_s}
        for ttft_s, tbt_s in ((1.0, 0.2), (3.0, 0.4))
    ]  # fmt: skip
    (row,) = stalls.ablation(pd.DataFrame(rows)).to_dict(orient="records")
    assert (row["ttft_s"], row["tbt_s"], row["variant"]) == (2.0, pytest.approx(0.3), "both")


def test_claims_are_judged(three, apart):
    """Every claim of the chapter is decided once; those that hang on the length of a run are too short here."""
    rates = pd.DataFrame(
        [(policy, rate, 24, 0.15, 1.0) for policy in pipeline_serving.POLICIES for rate in (0.2, 0.4)],
        columns=["policy", "rate", "requests", "p99_tbt_s", "median_delay_s"],
    )
    machines = [replace(each, requests=8, seconds=4.0) for each in pipeline_serving.cells("smoke")]
    table = beside_papers(
        pipeline.sensitivity(three),
        pipeline_serving.capacity(rates, (0.2, 1.0)),
        pipeline_long.runahead_sweep((12_288,), (4,)),
        apart,
        pipeline_serving.over_vllm(run(machines, cache=False)),
    ).frame()
    decided = table[table["decides"]]
    assert table[~table["decides"]]["claim"].tolist() == ["S26", "S27", "S17", "S37", "S38"]
    assert set(decided["claim"]) == {each.id for each in claims() if each.chapter == "06_pipeline"}
    verdicts = decided.set_index("claim")["verdict"]
    assert set(verdicts[["S13", "S18", "S23", "S26", "S39", "S47", "S51", "S53"]]) == {"too short to judge"}
    numbers = decided.set_index("claim")["ours"]
    assert (numbers["S50"], numbers["S53"], numbers["K01"]) == (numbers["S23"], numbers["S18"], numbers["K02"])
    assert verdicts["S25"] != verdicts["S13"]


def test_a_ratio_of_capacities_names_both_sides():
    """Each printed ratio divides Sarathi-Serve's capacity by that of its own machine, limit and policy."""
    rates = {("Yi-34B", "strict"): (1.0, 2.0, 8.0), ("Mistral-7B", "strict"): (2.0, 0.0, 4.0)}
    rates |= {("LLaMA2-70B", "strict"): (1.0, 3.0, 6.0), ("Falcon-180B", "strict"): (2.0, 0.0, 6.0)}
    rates |= {
        ("Falcon-180B", "relaxed"): (4.0, 0.0, 5.0),
        ("Falcon-180B, TP8", "strict"): (1.0, 0.0, np.nan),
    }
    rows = [
        {"testbed": name, "limit": limit, "workload": "openchat_sharegpt4", "requests": 256}
        | dict(zip(("vllm", "orca", "sarathi"), each, strict=True))
        for (name, limit), each in rates.items()
    ]
    found = {row.claim: row.ours for row in stalls.capacity_ratios(pd.DataFrame(rows))}
    assert found == {
        "S21": 2.0, "S22": 6.0, "S23": 3.0, "S50": 3.0, "S51": 1.25, "S49": 6.0, "S47": 4.0, "S48": 2.0
    }  # fmt: skip


def test_noise_slows_what_waits_for_the_network_more():
    """The baseline computes nothing while it gathers; KV-Runahead sends beside its work and loses less."""
    assert pipeline_long.noise_ratio() > 1


def test_gains_of_other_models_come_from_their_shape():
    """With one KV head, Falcon-7B has little to gather, so it gains less than LLaMA-7B on a slow network."""
    llama, falcon = (
        pipeline_long.runahead_sweep((8192,), (8,), (10e9,), model=name)["gain"].iloc[0]
        for name in ("llama-7b", "falcon-7b")
    )
    assert falcon < llama


def test_processes_agree_with_one():
    """On this machine: same token, same KVCache, the predicted bytes, and a timeline of every process."""
    rows, charts = pipeline_long.measure_live(
        pipeline_long.Live(model="lab-tiny", prompt_tokens=96, chunk_tokens=32, timeout_s=120)
    )
    assert rows["same_token"].all()
    assert rows["kv_difference"].max() < 1e-4
    assert (rows["sent_bytes"] == rows["predicted_bytes"]).all()
    assert {way: set(chart["rank"]) for way, chart in charts.items()} == {"CPP": {0, 1}, "KV-Runahead": {0, 1}}


def test_two_printed_numbers_of_sarathi_serve_cannot_both_be():
    """The strict limit is said to be five decode iterations of 32 requests, which the artifact times at 88 ms."""
    strict_s = fact("sarathi_serve_slo", series="Yi-34B", x="strict").value
    shipped_s = fact("sarathi_serve_artifact_yi34b_decode", x=32).value / 1000
    assert 5 * shipped_s > 2 * strict_s


def test_the_printed_spread_of_answers_is_impossible():
    """With median 415 and 90th percentile 834, Cantelli's inequality rules out a standard deviation of 101."""
    median, high, spread = (
        fact("sarathi_serve_table2_workloads", series="openchat_sharegpt4", x=f"output_{name}").value
        for name in ("median", "p90", "std")
    )
    largest_mean = median + spread  # a mean is at most a standard deviation from the median
    above = high - largest_mean
    assert spread**2 / (spread**2 + above**2) < 0.1
