"""The figures of the traces chapter."""

import pytest
from figure_laws import FigureLaws

from mooncake_lab.book.chapters.traces import figures as draw
from mooncake_lab.book.chapters.traces.experiment import (
    Arrivals,
    BlockUses,
    Conversations,
    LargerBlocks,
    ReuseGaps,
    TraceLengths,
    TraceNumbers,
)
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.paper import constant, curve, fact

BOTH = ("conversation", "synthetic")
FIRST = 200


@pytest.fixture(scope="module")
def numbers():
    return run(vary(TraceNumbers(first=FIRST), workload=BOTH), cache=False)


def few(kind, **axes):
    """The table of an experiment on both workloads, cut short."""
    return run(vary(kind(first=FIRST), workload=BOTH, **axes), cache=False)


@pytest.fixture(scope="module")
def figures(numbers):
    """Every figure of the chapter, by name."""
    paper = {of: curve(f"arxiv_fig05_{of}_length_histogram") for of in ("input", "output")}
    ratio = {name: fact("fast_table2_workloads", series=name.title(), x="cache_ratio_percent") for name in BOTH}
    return {
        "lengths": draw.lengths(few(TraceLengths, of=("input", "output")), paper, numbers),
        "block_uses": draw.block_uses(few(BlockUses), curve("arxiv_fig06_block_hit_count_cdf"), numbers),
        "arrivals": draw.arrivals(few(Arrivals), numbers),
        "sharing": draw.sharing(few(Conversations), few(ReuseGaps), numbers),
        "block_sizes": draw.block_sizes(
            few(LargerBlocks, factor=(1, 2)), ratio, constant("block_tokens_store"), numbers
        ),
    }


NAMES = ["lengths", "block_uses", "arrivals", "sharing", "block_sizes"]


@pytest.mark.parametrize("name", NAMES)
class TestEvery(FigureLaws):
    def test_says_where_the_numbers_come_from(self, figures, numbers, name):
        """The footer names the source of each trace drawn."""
        footer = " ".join(figures[name].get_supxlabel().split())
        assert all(source in footer for source in numbers["source"])

    def test_marker_is_provenance(self, figures, name):
        """Diamonds without a line are the paper's, everything else is a line of ours."""
        for axes in figures[name].axes:
            for line in axes.get_lines():
                assert (line.get_marker() == "D") == (line.get_linestyle() == "None")


class TestPaper:
    @pytest.mark.parametrize("name", ["lengths", "block_uses", "block_sizes"])
    def test_the_papers_points_are_drawn(self, figures, name):
        """Figures with a counterpart in the papers show it as diamonds in every panel."""
        for axes in figures[name].axes:
            assert any(line.get_marker() == "D" for line in axes.get_lines())
