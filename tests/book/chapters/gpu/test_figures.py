"""Figures of a GPU, from a dry run on a CPU: every point that was measured is drawn."""

import itertools

import pandas as pd
import pytest
from measured import dry_run

from mooncake_lab.book.chapters.gpu import figures as draw

USED = ("decode", "prefill", "hybrid", "tiles", "copies", "layerwise", "beside_transformers", "chunks", "pd_sweep")


@pytest.fixture
def tables(tmp_path_factory):
    """All sections that figures draw."""
    found = dry_run(tmp_path_factory)["sections"]
    return {name: pd.DataFrame(found[name]["rows"]) for name in USED}


def points(axes):
    """All points that have a marker, of all lines."""
    return [
        (float(x), float(y))
        for line in axes.lines
        if line.get_marker() not in ("", "None", None)
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def all_visible(figure):
    """Whether no point lies outside its panel."""
    limits = [(axes, *sorted(axes.get_ylim())) for axes in figure.axes]
    return all(low <= y <= high for axes, low, high in limits for _, y in points(axes))


def pairs(table, x, y, scale=1.0):
    """What should be drawn of a table."""
    return sorted((float(a), scale * float(b)) for a, b in zip(table[x], table[y], strict=True))


def test_rates_draws_every_point(tables):
    """Decode by batch, prefill by length, and a ratio for each way of transformers."""
    figure = draw.rates(tables["decode"], tables["prefill"], tables["beside_transformers"], "measured: dry run")
    assert sorted(points(figure.axes[0])) == pairs(tables["decode"], "batch", "share_of_copy")
    assert sorted(points(figure.axes[1])) == pairs(tables["prefill"], "tokens", "share_of_gemm")
    assert sorted(x for x, _ in points(figure.axes[2])) == sorted(tables["beside_transformers"]["ratio"])


def test_chunks_draws_every_point(tables):
    """Chunks over the whole prompt, and every width."""
    figure = draw.chunks(tables["chunks"], tables["tiles"], "measured: dry run")
    assert sorted(points(figure.axes[0])) == pairs(tables["chunks"], "chunk", "over_whole")
    assert sorted(points(figure.axes[1])) == pairs(tables["tiles"], "tokens", "seconds", 1e3)


def test_riders_draws_three_accounts_and_the_law(tables):
    """Each account of each hybrid iteration; the dotted line is at (C - (B - 1)) / (B - 1)."""
    tables["hybrid"].loc[0, "decode_token_marginal_s"] = -0.001  # a step that was faster with decodes than without
    figure = draw.riders(tables["hybrid"], tables["pd_sweep"], "measured: dry run")
    of_accounts = (
        pairs(tables["hybrid"], "decodes", f"decode_token_{account}_s", 1e3)
        for account in ("alone", "marginal", "fair")
    )
    assert sorted(points(figure.axes[0])) == sorted(itertools.chain.from_iterable(of_accounts))
    assert sorted(points(figure.axes[1])) == pairs(tables["pd_sweep"], "ratio", "gain")
    assert all_visible(figure)
    dotted = [line for line in figure.axes[1].lines if line.get_linestyle() == ":"]
    assert [line.get_xdata()[0] for line in dotted] == [(8 - 2) / 2]


def test_copies_draws_both_ways_and_both_operations(tables):
    """Every size both ways, and what is hidden of loading and storing."""
    figure = draw.copies(tables["copies"], tables["layerwise"], "measured: dry run")
    drawn = sorted(y for _, y in points(figure.axes[0]))
    assert drawn == sorted([*tables["copies"]["device_to_host_share"], *tables["copies"]["host_to_device_share"]])
    assert all_visible(figure)
    assert sorted(points(figure.axes[1])) == pairs(tables["layerwise"], "moved_tokens", "hidden_share")
    assert b"goal 0.9" in figure._repr_svg_().encode()
