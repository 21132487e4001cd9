"""The figures of the chunked chapter."""

import pytest
from figure_laws import FigureLaws, diamonds

from mooncake_lab.book.chapters.chunked import figures as draw
from mooncake_lab.book.chapters.chunked.experiment import (
    MeasuredChunks,
    chunk_medians,
    chunk_overhead,
    end_to_end_gain,
    intensities,
    masks,
    saturation,
)
from mooncake_lab.book.experiments import run
from mooncake_lab.book.paper import curve, fact

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
            saturation((64, 512), (1, 18, 32)),
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
class TestEvery(FigureLaws):
    """Laws of every figure."""


@pytest.mark.parametrize("name", ["saturation", "overhead", "gain"])
def test_the_papers_points_are_drawn(figures, name):
    """Figures with a counterpart in the paper show its points."""
    assert diamonds(figures[name])


def test_masks_have_a_square_for_every_pair(figures):
    """All 78 pairs of twelve tokens are drawn."""
    assert sum(len(axes.patches) for axes in figures["masks"].axes) == 78
