"""Other readings of what the papers leave open: each does what its alternative says, and the default stays."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from mooncake_lab.book.chapters.chunked import experiment as chunked
from mooncake_lab.book.chapters.endtoend.experiment import EndToEnd, coupled_log
from mooncake_lab.book.chapters.endtoend.rates import AtRate, gap_p90_s, normalised
from mooncake_lab.book.chapters.overload.claims import MOST, highest_ratio, ratio_with_interval
from mooncake_lab.book.chapters.overload.experiment import OfChosenInstance
from mooncake_lab.book.chapters.piggyback.model import balanced, gain, predictions, ratio_sweep
from mooncake_lab.book.chapters.pipeline.claims import layouts
from mooncake_lab.book.chapters.pipeline.experiment import Gpt3
from mooncake_lab.book.chapters.placement.experiment import PlacementReplay, Replicas
from mooncake_lab.book.chapters.placement.readings import AloneEstimator, FewestDecodes
from mooncake_lab.book.chapters.stages.model import decode_over_prefill
from mooncake_lab.book.chapters.store.experiment import CountsOfAllTime, KeepsLate
from mooncake_lab.book.experiments import run
from mooncake_lab.book.testbeds import arxiv_testbed, paper_node_latency
from mooncake_lab.book.testbeds.arxiv import latency_of
from mooncake_lab.book.testbeds.sarathi import llama_13b_on_a6000
from mooncake_lab.book.testbeds.sarathi_serve import machines_beside_paper
from mooncake_lab.conductor import (
    ClusterView,
    DecodeView,
    EarlyRejection,
    KVCacheCentric,
    LatencyEstimator,
    PrefillView,
    Rejection,
)
from mooncake_lab.core import SLO, Request
from mooncake_lab.store.replay import replay

MODEL = paper_node_latency()


def request(input_tokens=1000):
    return Request(id=0, arrival_s=0.0, input_tokens=input_tokens, block_keys=(0, 1))


def view(*decode):
    """One idle prefill node, and decode nodes of (requests, tokens)."""
    pool = (DecodeView(f"d{i}", requests, tokens, 100_000) for i, (requests, tokens) in enumerate(decode))
    return ClusterView(0.0, (PrefillView("p0", 0.0, 0, 0, 0),), tuple(pool))


class TestDecodeChoice:
    """Assumption B05: the least predicted TBT, or the fewest requests."""

    def test_fewest_requests_decide_whatever_their_context(self):
        """Three short requests take less time than one very long one, and are more."""
        here, believed = view((3, 3000), (1, 90_000)), LatencyEstimator(MODEL)
        inner = KVCacheCentric()
        assert inner.place(request(), here, believed).decode == "d0"
        placed = FewestDecodes(inner).place(request(), here, believed)
        assert placed.decode == "d1"
        assert placed.expected_tbt_s == believed.decode_step_s(2, 91_000)
        assert replace(placed, decode="d0", expected_tbt_s=0.0) == replace(
            inner.place(request(), here, believed), expected_tbt_s=0.0
        )
        assert FewestDecodes(inner).needs == inner.needs

    def test_an_instance_without_room_is_not_chosen(self):
        """Where none has room, the policy's own choice stays."""
        believed = LatencyEstimator(MODEL)
        full = FewestDecodes(KVCacheCentric()).place(request(), view((1, 99_500), (9, 9000)), believed)
        assert full.decode == "d1"
        none = FewestDecodes(KVCacheCentric()).place(request(), view((1, 99_900), (9, 99_500)), believed)
        assert none.decode == "d1"  # which holds least


def test_a_transfer_alone_ignores_others():
    """Assumption B02: three flows under way take four times as long, or do not count."""
    alone, shared = AloneEstimator(MODEL), LatencyEstimator(MODEL)
    assert shared.transfer_s(512, 3) == MODEL.transfer_s(4 * 512)
    assert [alone.transfer_s(512, flows) for flows in (0, 3)] == [MODEL.transfer_s(512)] * 2
    assert alone.prefill_s(0, 5000, 512) == shared.prefill_s(0, 5000, 512)


def test_the_chosen_instance_alone_decides():
    """Assumption B24: the mean of a full and an idle instance is half full, and the full one is full."""
    slo, believed = SLO(ttft_s=30.0, tbt_s=0.1), LatencyEstimator(MODEL)
    here = view((400, 90_000), (0, 0))
    policy = EarlyRejection(believed.decode_step_s(250, 46_000) / slo.tbt_s)
    placed = KVCacheCentric().place(request(), here, believed)
    full, idle = (replace(placed, decode=name) for name in ("d0", "d1"))
    of_mean = [policy.admit(request(), each, here, estimate=believed, slo=slo) for each in (full, idle)]
    assert of_mean == [full, idle]
    chosen = OfChosenInstance(policy)
    refused = chosen.admit(request(), full, here, estimate=believed, slo=slo)
    assert isinstance(refused, Rejection)
    assert chosen.admit(request(), idle, here, estimate=believed, slo=slo) == idle
    assert chosen.needs == policy.needs


def test_counts_of_all_time_outlive_eviction():
    """Assumption B26: a block used twice comes back, and stays before one used twice since."""
    requests = [["a"], ["a"], ["b"], ["b"], ["b"], ["c"], ["a"], ["c"], ["a"]]
    in_cache = replay(requests, "lfu", 2).hits_by_request
    of_all_time = replay(requests, lambda _: CountsOfAllTime(), 2).hits_by_request
    assert in_cache == [0, 1, 0, 1, 1, 0, 0, 0, 0]
    assert of_all_time == [0, 1, 0, 1, 1, 0, 0, 0, 1]


def test_kept_late_blocks_break_prefixes():
    """Assumption B25: if the first blocks of a request go first, the next request finds no prefix."""
    requests = [[1, 2, 3], [9], [1, 2, 3]]
    assert replay(requests, "length_aware", 3).prefix_hits_by_request == [0, 0, 2]
    late = replay(requests, lambda _: KeepsLate(), 3)
    assert late.prefix_hits_by_request == [0, 0, 0]
    assert late.hits_by_request == [0, 0, 2]


def test_few_gaps_may_pass():
    """Assumption B17: answers of up to ten tokens are within the limit, and have no part in the mean."""
    (row,) = EndToEnd(system="vllm", first=300, host_s=0.05).rows()
    assert row["few_gaps_capacity_100_ms"] > row["capacity_100_ms"]
    assert row["few_gaps_within_tbt"] > row["within_tbt"]
    assert row["few_gaps_tbt_fast_mean_s"] != row["tbt_fast_mean_s"]
    assert row["within_mean_gap"] >= row["within_tbt"]  # assumption B44


def test_readings_of_mooncake_reach_the_cluster():
    """Each changes a replay that is long enough, and the defaults are what they were."""
    base = EndToEnd(first=400, prefill_nodes=2, decode_nodes=2)
    (plain,) = base.rows()
    for changed in (
        {"threshold": 20.0},
        {"offline_tests": 8},
        {"decode_choice": "fewest_requests"},
        {"fetch_timeout_s": 0.001},
        {"testbed": "arxiv_point_a"},
    ):
        (row,) = replace(base, **changed).rows()
        assert row["ttft_mean_s"] != plain["ttft_mean_s"] or row["tbt_fast_mean_s"] != plain["tbt_fast_mean_s"]
    assert latency_of("arxiv_point_a") == arxiv_testbed(1.7, 6.5)


def test_readings_at_a_rate_reach_the_cluster():
    """Nodes, memory, router, chunks and the host change what vLLM shows; the end of TTFT what Mooncake does."""
    vllm = AtRate(dataset="L-Eval", system="4M", requests=40, requests_per_s=4.0)
    mooncake = replace(vllm, system="2P+2D")
    for point, changed in (
        (vllm, {"testbed": "arxiv"}),
        (vllm, {"device_tokens": 40_000}),
        (vllm, {"router": "random"}),
        (vllm, {"chunk_tokens": 2048}),
        (vllm, {"host_s": 0.004, "host_free": 1.5}),
        (mooncake, {"first_shown_by": "prefill"}),
    ):
        plain, other = (next(iter(each.rows())) for each in (point, replace(point, **changed)))
        names = [name for name in plain if name.endswith("_s")]
        assert [plain[name] for name in names] != [other[name] for name in names], changed


def test_the_gap_of_a_token_is_not_that_of_a_request():
    """Assumption B19: of twenty gaps two are long, in two of four requests, whose means are long then."""
    assert gap_p90_s(coupled_log()) == pytest.approx(np.percentile([0.1] * 18 + [1.1, 2.1], 90))
    rows = run([replace(AtRate(dataset="16k", requests=24), system=name) for name in ("3P+1D", "2P+2D", "4M")])
    by_request, by_token = normalised(rows), normalised(rows, "gap_p90_s")
    assert by_request["ttft"].tolist() == by_token["ttft"].tolist()
    assert by_request["tbt"].tolist() != by_token["tbt"].tolist()


def test_replicas_are_those_of_the_cluster():
    """Fewer prefill nodes hold fewer copies, and a faster replay ends earlier."""
    base = Replicas(first=300, ranks=(1,), every_s=10.0)
    plain, few, fast = (run(each) for each in (base, replace(base, prefill_nodes=2), replace(base, speed=2.0)))
    assert few["replicas"].max() <= 2 < plain["replicas"].max()
    assert len(fast) < len(plain)
    assert PlacementReplay().fetch_timeout_s == 30.0


def test_short_last_chunks_cost():
    """Assumption B35: chunks of one length gain no more than chunks that fill what decodes leave."""
    filled, fixed = (ratio_sweep(("1K",), filled=each)["gain"].to_numpy() for each in (True, False))
    assert (fixed <= filled + 1e-12).all()
    assert fixed.mean() < filled.mean()
    place = ("Figure 11a", "SARATHI, 1K")
    gains = [
        predictions(**each).set_index(["place", "cell"])["model"][place]
        for each in ({}, {"printed_ratio": True}, {"printed_ratio": True, "filled": True})
    ]
    assert gains[1] <= gains[2]
    assert gain(llama_13b_on_a6000(), balanced("1K")) == gains[0]


def test_gpt3_may_get_its_requests_over_time_and_over_a_slower_network():
    """Assumptions B35, B36 and B40 change the time until all are done; a slower network makes it longer."""
    base = Gpt3(requests=120)
    done = {
        name: next(iter(replace(base, **changed).rows()))["completion_s"]
        for name, changed in {
            "plain": {},
            "slow": {"card_gbps": 5.0},
            "late": {"rate": 0.5},
            "fixed": {"chunk": "fixed"},
        }.items()
    }
    assert done["slow"] > done["plain"] < done["late"]
    assert done["fixed"] != done["plain"]
    assert done["late"] > 120 / 0.5 / 2


def test_falcon_may_take_what_its_limit_says():
    """Assumption B48: a decode iteration of a fifth of 1 s on either layout; prompts take what they took."""
    plain, printed = (
        machines_beside_paper(printed_decodes=each).set_index("testbed").loc["Falcon-180B"]
        for each in (False, True)
    )
    assert printed["model_decode_ms"] == pytest.approx(printed["paper_decode_ms"])
    assert plain["model_decode_ms"] != pytest.approx(printed["paper_decode_ms"])
    assert plain["model_prompt_ms"] == printed["model_prompt_ms"]
    assert layouts((0.0,), printed_decodes=True)["over"].iloc[0] == pytest.approx(1.0, abs=0.1)


def test_ratios_where_nothing_is_rejected():
    """Nothing over nothing is no gain, and something over nothing is infinitely more."""
    rows = pd.DataFrame(
        {"seed": [0, 1, 0, 1], "policy": ["a", "a", "b", "b"], "n": [0, 0, 0, 0], "m": [1, 2, 0, 0]}
    )
    assert ratio_with_interval(rows, "n", "a", "b") == (1.0, 1.0, 1.0)
    assert ratio_with_interval(rows, "m", "a", "b") == (np.inf, np.inf, np.inf)
    assert ratio_with_interval(rows, "m", "b", "a")[0] == 0.0
    names = ("after_prefill", "early", "predictive")
    table = pd.DataFrame(
        {"ttft_limit_s": 30.0, "twin": twin, "policy": name, "rejected_share": 0.1 * (name == "early")}
        for twin in (0, 1)
        for name in names
    )
    assert highest_ratio(table) == (30.0, "early", (MOST,) * 3)  # a verdict needs a finite number


def test_readings_of_sarathi_reach_its_models():
    """Chunks that do not reread cost no more attention, and another A100 changes the numbers on it alone."""
    reread, once = (
        chunked.chunk_overhead((1024,), (64,), rereads=rereads)["attention"].to_numpy()
        for rereads in (True, False)
    )
    assert (reread > 2).all()
    assert once == pytest.approx(1.0)
    usual, other = (predictions(a100_share=share) for share in (1.0, 0.8))
    moved = usual.loc[usual["model"] != other["model"], "cell"]
    assert len(moved) > 0
    assert moved.str.startswith("LLaMA-33B").all()
    assert decode_over_prefill(1, fitted=True) != decode_over_prefill(1)
    assert decode_over_prefill(1, fitted=True) == pytest.approx(decode_over_prefill(1), rel=0.1)
