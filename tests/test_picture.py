"""The picture of the architecture: true to the package, and legible in the light and in the dark."""

import re
from itertools import product
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[1]
PICTURE = (ROOT / "book" / "_static" / "architecture.svg").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"
READABLE = 4.5
"""WCAG 2, level AA, for text of this size."""
ON = [*product(["ink", "name"], ["paper", "plain", "pool"]), ("on1", "g1"), ("on2", "g2"), ("on3", "g3")]
"""What is written on what."""


@pytest.fixture(scope="module")
def root():
    """The picture, parsed."""
    return ET.fromstring(PICTURE)  # noqa: S314 - our own file


def palettes():
    """The colours of each block of the style that sets them: light, dark in the book, dark alone."""
    blocks = re.findall(r"\{ (--paper.*?)(?:;? \}|font-family)", PICTURE, re.DOTALL)
    return [dict(re.findall(r"--(\w+): (#\w+)", block)) for block in blocks]


def luminance(colour):
    """Relative luminance by WCAG 2."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    shares = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_packages_in_the_picture_exist(root):
    """Every name in the package's lettering is a package."""
    words = [
        word
        for element in root.iter()
        if "package" in element.get("class", "").split()
        for word in re.findall(r"\w+", element.text or "")
    ]
    assert len(words) >= 10
    assert [word for word in words if not (ROOT / "mooncake_lab" / word / "__init__.py").is_file()] == []


def test_it_can_be_read_by_ear(root):
    """Title and description are there and are what the picture is labelled by."""
    parts = {element.get("id"): element.text for element in root if element.tag in {f"{SVG}title", f"{SVG}desc"}}
    assert root.get("role") == "img"
    assert list(parts) == root.get("aria-labelledby").split()
    assert all(len(text.split()) > 5 for text in parts.values())


def test_the_dark_is_the_same_in_the_book_and_alone():
    """Three palettes, the two dark ones equal."""
    light, dark, alone = palettes()
    assert dark == alone != light


@pytest.mark.parametrize("palette", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), ON)
def test_letters_stand_out(palette, text, ground):
    """Contrast of text to its ground is at least what WCAG asks for."""
    colours = palettes()[palette]
    lighter, darker = sorted([luminance(colours[text]), luminance(colours[ground])], reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= READABLE
