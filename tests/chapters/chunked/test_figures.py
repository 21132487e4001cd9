"""The figures of the chunked chapter."""

import pytest

from mooncake_lab.chapters.chunked import figures as draw
from mooncake_lab.chapters.chunked.experiment import MeasuredChunks, chunk_medians
from mooncake_lab.chapters.chunked.model import chunk_overhead, end_to_end_gain, intensities, masks, saturation
from mooncake_lab.experiments import run
from mooncake_lab.paper import curve, fact

NAMES = ["saturation", "masks", "overhead", "gain", "measured"]


@pytest.fixture(scope="module")
def figures():
    """Every figure of the chapter, by name."""
    tiny = MeasuredChunks(model="lab-tiny", prompt_tokens=(16, 32), chunks=(8,), rounds=2)
    measured = run(tiny, cache=False)
    layer = {"name": "sarathi_fig04_saturation", "series": "prefill"}
    best = {256: fact("sarathi_fig09_gain_vs_pd_ratio", series="1K/chunk 256")}
    return {
        "saturation": draw.saturation(
            saturation((64, 512), (1, 18)),
            intensities((1, 18)),
            fact(**layer, x="throughput_tokens_per_ms"),
            fact(**layer, x="saturates_at_tokens"),
        ),
        "masks": draw.masks(masks(12, 4)),
        "overhead": draw.overhead(chunk_overhead(), curve("sarathi_fig13_chunk_overhead")),
        "gain": draw.gain_by_chunk(end_to_end_gain([(1024, 18)]), best),
        "measured": draw.measured(chunk_medians(measured), measured["machine"].iloc[0]),
    }


@pytest.mark.parametrize("name", NAMES)
class TestEvery:
    def test_labelled_axes_say_quantity_and_unit(self, figures, name):
        """Each axis label names a quantity and, in brackets, its unit."""
        for axes in figures[name].axes:
            labels = [label for label in (axes.get_ylabel(), axes.get_xlabel()) if label]
            assert labels
            assert all(label.endswith(")") and "(" in label for label in labels)

    def test_it_says_where_its_numbers_come_from(self, figures, name):
        """The footer says modelled, counted or measured."""
        assert any(word in figures[name].get_supxlabel() for word in ("modelled", "counted", "measured"))

    def test_a_notebook_can_show_it(self, figures, name):
        """It renders to SVG."""
        assert "<svg" in figures[name]._repr_svg_()


@pytest.mark.parametrize("name", ["saturation", "overhead", "gain"])
def test_the_papers_points_are_open_diamonds(figures, name):
    """Figures with a counterpart in the paper show its points, hollow."""
    diamonds = [line for axes in figures[name].axes for line in axes.lines if line.get_marker() == "D"]
    assert diamonds
    assert {line.get_markerfacecolor() for line in diamonds} == {"none"}


def test_measured_points_are_circles_and_name_the_machine(figures):
    """What was measured is drawn as filled circles, and the footer says on what."""
    assert all(line.get_marker() in {"o", "_", "|", "None"} for line in figures["measured"].axes[0].lines)
    assert "torch" in figures["measured"].get_supxlabel()


def test_masks_have_a_square_for_every_pair(figures):
    """All 78 pairs of twelve tokens are drawn."""
    assert sum(len(axes.patches) for axes in figures["masks"].axes) == 78
