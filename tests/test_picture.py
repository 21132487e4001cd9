"""The pictures drawn by hand, of architecture and primer: true, and legible in the light and in the dark."""

import math
import re
from itertools import product
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from mooncake_lab.perf import attainable_flops_per_s, decode_work, hardware, model_shape, prefill_work

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
    package = ROOT / "mooncake_lab"
    packages = {path.parent.name for path in (*package.glob("*/__init__.py"), *package.glob("book/*/__init__.py"))}
    assert [word for word in words if word not in packages] == []


def test_it_can_be_read_by_ear(root):
    """Title and description are there and are what the picture is labelled by."""
    parts = {element.get("id"): element.text for element in root if element.tag in {f"{SVG}title", f"{SVG}desc"}}
    assert root.get("role") == "img"
    assert list(parts) == root.get("aria-labelledby").split()
    assert all(len(text.split()) > 5 for text in parts.values())


@pytest.mark.parametrize("palette", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), ON)
def test_letters_stand_out(palette, text, ground):
    """Contrast of text to its ground is at least what WCAG asks for."""
    colours = palettes()[palette]
    lighter, darker = sorted([luminance(colours[text]), luminance(colours[ground])], reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= READABLE


SMALL = [
    ROOT / "book" / "_static" / "landing.svg",
    ROOT / "book" / "_static" / "request-path.svg",
    *sorted((ROOT / "book" / "_static").glob("primer-*.svg")),
]
SHOWN_ON = {"landing": "intro.md", "request-path": "design.md"}
"""The pages of pictures that are not the primer's."""
NARROW_PX = 334
"""How wide the text of a page, and so a picture, is on a phone of 390 px."""


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
class TestSmallPictures:
    """The drawings of the first page, of the primer, and of the path of a request."""

    def test_is_shown_with_words_for_those_who_do_not_see_it(self, path):
        """The page shows it, it has title and description, and no id or class of another drawing."""
        page = SHOWN_ON.get(path.stem, "primer.md")
        assert f":file: _static/{path.name}" in (ROOT / "book" / page).read_text(encoding="utf-8")
        root = ET.fromstring(path.read_text(encoding="utf-8"))  # noqa: S314 - our own file
        test_it_can_be_read_by_ear(root)
        names = [element.get("id") for element in root.iter() if element.get("id")]
        assert all(name.startswith(f"{path.stem}-") for name in names)
        assert root.get("class") == path.stem

    def test_can_be_read_on_a_phone_and_in_the_dark(self, path):
        """Letters have 11 px at a width of 390 px; contrast is that of WCAG in both palettes."""
        text = path.read_text(encoding="utf-8")
        width = float(re.search(r'viewBox="0 0 (\d+)', text)[1])
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", text)]
        assert min(sizes) * NARROW_PX / width >= 11
        light, dark, alone = [
            dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in re.findall(r"\{ (--paper[^}]*)", text)
        ]
        assert dark == alone
        grounds = [
            ("ink", "paper"),
            ("soft", "paper"),
            ("on-blue", "blue"),
            ("on-green", "green"),
            ("ink", "wait"),
        ]
        if "name" in light:
            grounds += [("name", "paper"), ("name", "plain"), ("name", "pale"), ("ink", "pale")]
        for colours, (letters, ground) in product([light, dark], grounds):
            shades = sorted([luminance(colours[letters]), luminance(colours[ground])])
            assert (shades[1] + 0.05) / (shades[0] + 0.05) >= READABLE, (letters, ground)


def test_the_primers_roofline_is_drawn_to_scale():
    """Its three points are at the intensities and speeds of the model and node that the page names."""
    node, shape, tokens = hardware("a800-node"), model_shape("llama3-70b"), 8192
    works = {
        "decode-1": decode_work(shape, 1, tokens),
        "decode-64": decode_work(shape, 64, 64 * tokens),
        "prefill": prefill_work(shape, tokens),
    }
    text = (ROOT / "book" / "_static" / "primer-roofline.svg").read_text(encoding="utf-8")
    ticks = {
        float(word.replace(",", "")): float(x) for x, word in re.findall(r'x="([\d.]+)" y="240">([\d,]+)<', text)
    }
    found = re.findall(r'data-work="([\w-]+)" .*?cx="([\d.]+)" cy="([\d.]+)"', text)
    assert {name for name, *_ in found} == works.keys()
    for name, x, _ in found:
        at = ticks[1] + (ticks[10] - ticks[1]) * math.log10(works[name].intensity_flops_per_byte)
        assert float(x) == pytest.approx(at, abs=0.5)
    heights = {name: float(y) for name, _, y in found}
    speeds = {n: attainable_flops_per_s(node, work.intensity_flops_per_byte) for n, work in works.items()}
    decades = (
        math.log10(speeds["prefill"] / speeds["decode-1"]),
        math.log10(speeds["decode-64"] / speeds["decode-1"]),
    )
    rises = heights["decode-1"] - heights["prefill"], heights["decode-1"] - heights["decode-64"]
    assert rises[0] / rises[1] == pytest.approx(decades[0] / decades[1], rel=0.01)
