"""The colours of the figures, on light and on dark paper."""

import ast
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from mooncake_lab.figures.colours import COLOURS, DARK, FRAME, css_property, letters, properties

ROOT = Path(__file__).parents[2]
PAPERS = {"light": ("#FFFDF9", COLOURS), "dark": ("#121212", DARK)}
"""The pages' backgrounds and what is drawn on them."""

TOGETHER = (
    ("mooncake", "mooncake_variant", "vllm", "vllm_prefix", "vllm_chunked", "straw_man", "straw_man_light"),
    ("conversation", "toolagent", "synthetic", "all"),
    ("prefill", "decode", "transfer", "dram"),
    ("mooncake", "mooncake_variant", "committed", "length_predicting", "straw_man"),
    ("gpu", "dram", "ssd"),
    ("lru", "lfu", "length_aware"),
    ("finished", "refused_late", "refused_early"),
    ("pb1", "pb2", "pb3"),
    ("snapkv", "pyramidinfer"),
    ("minicache", "rounding"),
    ("kcache", "snapkv"),
    ("vllm_chunked", "by_tokens", "by_order"),
    ("latency", "throughput"),
    ("size_1", "size_2", "size_3", "size_4"),
)
"""Colours that stand side by side in one figure."""
LEAST_APART = 6.5
"""Hundredths of Oklab; about three times what can just be told apart."""

CONES = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]])
OKLAB = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]])
DEFICIENCIES = {  # Machado, Oliveira and Fernandes 2009, severity 1
    "none": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}  # fmt: skip


def linear(colour):
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """As WCAG defines it, 1 to 21."""
    dim, bright = sorted(float(linear(each) @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (bright + 0.05) / (dim + 0.05)


def apart(one, other):
    """The distance of two colours in Oklab for whoever sees them worst."""
    seen = lambda colour, sight: OKLAB @ np.cbrt(CONES @ np.clip(np.array(sight) @ linear(colour), 0, 1))  # noqa: E731
    return min(100 * np.linalg.norm(seen(one, each) - seen(other, each)) for each in DEFICIENCIES.values())


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize("name", COLOURS)
def test_every_colour_is_visible_on_both_papers(name, paper):
    """A colour is written as hex and contrasts with the page by at least 3:1, which graphics need."""
    ground, colours = PAPERS[paper]
    assert re.fullmatch(r"#[0-9A-F]{6}", colours[name])
    assert contrast(colours[name], ground) >= 3.0


@pytest.mark.parametrize("name", COLOURS)
def test_letters_are_legible_on_both_papers(name):
    """Letters that name something in its colour contrast with the page by at least 4.5:1, in both themes."""
    written = {light: key for key, light in COLOURS.items()}[letters(COLOURS[name])]
    assert all(contrast(colours[written], ground) >= 4.5 for ground, colours in PAPERS.values())


@pytest.mark.parametrize("colours", [COLOURS, DARK])
def test_no_two_meanings_share_a_colour(colours):
    """Whoever knows what a colour means knows it in every chapter."""
    assert len(set(colours.values())) == len(colours)


@pytest.mark.parametrize("colours", [COLOURS, DARK])
@pytest.mark.parametrize("names", TOGETHER)
def test_colours_of_a_figure_are_told_apart_without_one_kind_of_cone(names, colours):
    """Series side by side differ for every kind of colour vision, in both themes."""
    close = {
        (one, other): round(apart(colours[one], colours[other]), 1)
        for one, other in itertools.combinations(names, 2)
        if apart(colours[one], colours[other]) < LEAST_APART
    }
    assert close == {}


def test_the_style_sheet_has_these_colours():
    """The page's properties are those of the dictionary: light everywhere, dark on screens, light on paper."""
    sheet = (ROOT / "book" / "_static" / "figures.css").read_text(encoding="utf-8")
    everywhere, _, screens = sheet.partition("@media screen {")
    assert properties(0) in everywhere
    assert properties(1).replace("  ", "    ") in screens.partition("\n}\n")[0]
    assert "--fig" not in screens.partition("@media print {")[2]  # paper keeps the light ones


def test_the_widgets_fall_back_to_these_colours():
    """Where a page has no properties, a widget shows the light colour of the same meaning."""
    css = (ROOT / "mooncake_lab" / "figures" / "static" / "widgets.css").read_text(encoding="utf-8")
    found = re.findall(r"var\((--fig-[\w-]+), (#[0-9a-f]{6})\)", css)
    light = {css_property(name): colour.lower() for name, colour in COLOURS.items()}
    assert len(found) >= 2
    assert all(light[name] == colour for name, colour in found)


def test_figures_draw_with_named_colours_only():
    """No module names a colour of its own, which would have no dark variant."""
    hexes = {
        (path.name, node.value)
        for path in (ROOT / "mooncake_lab" / "figures").glob("*.py")
        if path.name != "colours.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"#[0-9a-fA-F]{6}", node.value) and node.value.lower() != "#ffffff"
    }
    assert hexes == set()
    assert len(FRAME) == 3
