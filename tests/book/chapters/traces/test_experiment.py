"""The experiments of the traces chapter, and the comparison with the papers."""

import numpy as np
import pytest

from mooncake_lab.book.chapters.traces.experiment import (
    Arrivals,
    BlockUses,
    Conversations,
    LargerBlocks,
    ReuseGaps,
    TraceLengths,
    TraceNumbers,
    beside_papers,
    bin_edges,
    same_bins,
)
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.experiments.cache import CACHE_VARIABLE
from mooncake_lab.book.paper import Verdict, curve
from mooncake_lab.workload import WORKLOADS

FEW = 300


@pytest.fixture(autouse=True)
def computed(monkeypatch):
    """Nothing kept from an earlier run is used."""
    monkeypatch.setenv(CACHE_VARIABLE, "off")


@pytest.fixture(scope="module")
def numbers():
    """The statistics of all four traces, cut short."""
    return run(vary(TraceNumbers(first=FEW), workload=WORKLOADS), cache=False)


class TestLaws:
    @pytest.mark.parametrize("of", ["input", "output"])
    def test_every_request_is_in_one_bin(self, of):
        """A histogram holds every request once, in 40 bins that touch."""
        table = run(TraceLengths(of=of, first=FEW))
        assert table["requests"].sum() == FEW
        assert len(table) == 40
        assert (table["right"][:-1].to_numpy() == table["left"][1:].to_numpy()).all()

    @pytest.mark.parametrize("of", ["input", "output"])
    def test_the_bins_are_the_papers(self, of):
        """Our edges are the left edges that the paper's figure has, to its reading error."""
        left = curve(f"arxiv_fig05_{of}_length_histogram")["x"].to_numpy()
        edges = bin_edges(of)
        assert np.abs(edges[:-1] - left).max() < 0.1
        assert np.diff(edges) == pytest.approx(np.full(40, edges[1] - edges[0]))

    def test_block_uses_are_a_distribution(self):
        """Shares of blocks grow with the number of uses and end at one."""
        table = run(BlockUses(first=FEW))
        assert (np.diff(table["share_at_most"]) > 0).all()
        assert table["share_at_most"].iloc[-1] == pytest.approx(1)

    def test_arrivals_hold_the_first_minute(self):
        """Arrivals of the window are those of the trace, none twice."""
        table = run(Arrivals(first=FEW))
        assert 0 < table["arriving"].sum() <= FEW
        assert table["at_s"].is_monotonic_increasing
        assert table["at_s"].max() <= table["at_s"].min() + 60

    def test_conversations_hold_every_request(self):
        """All requests are in conversations of at least one turn, and conversations times turns are requests."""
        table = run(Conversations(first=FEW))
        assert table["share_at_least"].iloc[0] == 1
        assert (table["turns"] * table["conversations"]).sum() == FEW

    def test_reuse_gaps_are_quantiles(self):
        """Gaps grow with the share of reuses and are never negative."""
        table = run(ReuseGaps(first=FEW))
        assert table["gap_s"].is_monotonic_increasing
        assert table["gap_s"].min() >= 0
        assert len(table) == 101

    @pytest.mark.parametrize("workload", ["conversation", "synthetic"])
    def test_larger_blocks_share_less(self, workload):
        """Joining blocks never uncovers tokens to reuse: the token hit rate falls with the factor."""
        table = run(vary(LargerBlocks(workload=workload, first=FEW), factor=(1, 2, 4, 8)))
        assert table["block_size_tokens"].tolist() == [512, 1024, 2048, 4096]
        assert table["ideal_token_hit_rate"].is_monotonic_decreasing


class TestBesidePapers:
    def test_a_twin_gets_no_verdict(self, numbers):
        """Rows that rest on a twin wait for the trace and say so; what nobody can compute is out of scope."""
        twins = numbers.assign(origin="twin")
        table = beside_papers(twins).frame()
        assert set(table.loc[table["ours"].notna(), "verdict"]) == {Verdict.TRACE_NOT_HERE.value}
        assert set(table.loc[table["ours"].isna(), "verdict"]) == {Verdict.OUT_OF_SCOPE.value}
        assert table["quantity"].str.contains("twin, made to match").sum() == table["ours"].notna().sum()

    def test_a_released_trace_is_judged(self, numbers):
        """Rows that rest on a released trace get a verdict, and 300 requests are not the paper's number."""
        table = beside_papers(numbers.assign(origin="released")).frame().set_index("quantity")
        assert table.loc["Conversation: requests", "verdict"] == Verdict.NOT_REPRODUCED.value

    def test_single_uses_are_judged_on_the_open_trace(self, numbers):
        """Without the open trace there is no verdict; the conversation trace is shown beside it."""
        origins = numbers["workload"].map({"conversation": "released"}).fillna("twin")
        table = beside_papers(numbers.assign(origin=origins)).frame()
        decides, beside = table[table["claim"] == "A12"].to_dict(orient="records")
        assert (decides["decides"], decides["verdict"]) == (True, Verdict.TRACE_NOT_HERE.value)
        assert (beside["decides"], beside["verdict"]) == (False, Verdict.REPRODUCED.value)


@pytest.mark.traces("conversation", "synthetic")
class TestReleased:
    def test_counts_and_lengths_are_the_printed_ones(self):
        """Counts and mean lengths of both traces agree with FAST'25 Table 2; one of the two cache ratios does."""
        table = (
            beside_papers(run(vary(TraceNumbers(), workload=WORKLOADS))).frame().set_index("quantity")["verdict"]
        )
        for series in ("Conversation", "Synthetic"):
            for quantity in ("requests", "mean input", "mean output"):
                assert table[f"{series}: {quantity}"] == Verdict.REPRODUCED.value
        assert table["Synthetic: cache ratio"] == Verdict.CONDITIONAL.value  # on assumption B66
        assert table["Conversation: cache ratio"] == Verdict.NOT_REPRODUCED.value

    def test_the_chat_trace_is_part_of_the_open_trace(self):
        """All but the four shortest output bins of the conversation trace equal those of arXiv Fig. 5."""
        bins = same_bins(run(TraceLengths(of="output")), curve("arxiv_fig05_output_length_histogram"))
        assert bins["same"].tolist() == [False] * 4 + [True] * 36

    def test_the_ticks(self):
        """The conversation trace ticks every three seconds, the synthetic one does not."""
        ticks_s = run(vary(TraceNumbers(), workload=["conversation", "synthetic"])).set_index("workload")["tick_s"]
        assert ticks_s["conversation"] == pytest.approx(3.0)
        assert ticks_s["synthetic"] < 1
