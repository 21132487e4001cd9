"""A figure as part of a page."""

import re

import pytest

from mooncake_lab.book.figures.embed import inlined
from mooncake_lab.book.figures.style import COLOURS, footer, new_figure, paper_points, styled


@styled
def small():
    figure, (axes,) = new_figure()
    axes.plot([1, 2], [3, 4], color=COLOURS["vllm"], marker="s")
    axes.bar([1, 2], [1, 1], hatch="///", edgecolor="white", color=COLOURS["decode"])
    paper_points(axes, [1, 2], [3, 4])
    footer(figure, "simulated, seed 0")
    return figure


@pytest.fixture
def drawing():
    return inlined(small()._repr_svg_(), "fig-a-", 'Rates: "high" & low')


def test_colours_are_properties_with_the_light_value_behind(drawing):
    """Each colour of the drawing follows the theme of the page, and is itself where there is no theme."""
    assert f"var(--fig-vllm, {COLOURS['vllm'].lower()})" in drawing
    assert "fill: var(--fig-paper, #000000)" in drawing.partition(">")[0]
    assert set(re.findall(r"(?<!, )#[0-9a-f]{6}\b", drawing)) == set()


def test_ids_are_the_drawing_s_own(drawing):
    """Two drawings in one page share no id, and every reference inside leads to an id of the same drawing."""
    ids = re.findall(r'\bid="([^"]+)"', drawing)
    references = re.findall(r'(?:href="#|url\(#)([^")]+)', drawing)
    assert ids
    assert all(name.startswith("fig-a-") for name in ids)
    assert set(references) == set(ids)
    assert len(set(ids)) == len(ids)


def test_it_is_one_picture_with_its_description(drawing):
    """It begins with the element itself, with role and alternative text, and has no rule for others."""
    assert drawing.startswith('<svg role="img" aria-label="Rates: &quot;high&quot; &amp; low" ')
    assert "<style" not in drawing


def test_text_stays_text(drawing):
    """Words of the figure can be selected and found, in the fonts of the reader's system."""
    assert ">simulated, seed 0</text>" in drawing
    assert 'font-family="system-ui' in drawing
