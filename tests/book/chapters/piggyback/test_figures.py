"""The figures of the piggyback chapter."""

import pytest
from figure_laws import FigureLaws, diamonds

from mooncake_lab.book.chapters.piggyback import figures as draw
from mooncake_lab.book.chapters.piggyback import model
from mooncake_lab.book.chapters.piggyback.experiment import MeasuredRiders, rider_accounts
from mooncake_lab.book.experiments import run
from mooncake_lab.book.paper import curve

NAMES = ["time", "tiles", "accounts", "ratio", "breakdown", "orca", "predicted", "measured"]
OF_PAPER = NAMES[:-1]


@pytest.fixture(scope="module")
def figures():
    """Every figure of the chapter, by name."""
    tiny = MeasuredRiders(model="lab-tiny", fused_tokens=(8, 16), riders=(1, 2), context_tokens=8, rounds=2)
    riders = run(tiny, cache=False)
    return {
        "time": draw.time_per_token(model.time_per_token(), curve("sarathi_fig03_time_per_token")),
        "tiles": draw.sawtooth(model.sawtooth(300), curve("sarathi_fig07_tile_quantisation")),
        "accounts": draw.accounts(model.account_sweep(), curve(model.FIGURE_8)),
        "ratio": draw.ratio_sweep(model.ratio_sweep(("1K",)), curve(model.FIGURE_9), model.peaks(("1K",))),
        "breakdown": draw.breakdown(model.breakdown(), curve(model.FIGURE_10)),
        "orca": draw.beside_orca(model.beside_orca(), curve(model.FIGURE_11)),
        "predicted": draw.predicted(model.predictions()),
        "measured": draw.measured_accounts(rider_accounts(riders), riders["machine"].iloc[0]),
    }


@pytest.mark.parametrize("name", NAMES)
class TestEvery(FigureLaws):
    """Laws of every figure."""


@pytest.mark.parametrize("name", OF_PAPER)
def test_the_papers_points_are_drawn(figures, name):
    """Figures with a counterpart in the paper show its points."""
    assert diamonds(figures[name])


def test_accounts_have_one_name_in_legend_and_table(figures):
    """Both figures with accounts call each account what its column is called: `by token` is `by_token`."""
    table = model.account_sweep().columns
    for name in ("accounts", "measured"):
        handles = [axes.get_legend_handles_labels()[1] for axes in figures[name].axes]
        words = {label.partition(" (")[0].replace(" ", "_") for labels in handles for label in labels}
        assert {"marginal", "by_token", "by_order"} <= words & set(table)
