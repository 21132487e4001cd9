"""The built book for readers who do not see it, do not use a mouse, print it, or read it on a phone."""

import csv
import io
import itertools
import math
import os

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from matplotlib.image import imread

from mooncake_lab.figures import COLOURS

pytestmark = pytest.mark.site

GRAVE = {"serious", "critical"}
ALL_RULES = {"resultTypes": ["violations"], "preload": False}
"""Without preloading: axe would fetch style sheets again, by paths that only hold where they were."""
CONTRAST = ALL_RULES | {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
"""What a colour scheme can change."""
NO_CONTRAST = ALL_RULES | {"rules": {"color-contrast": {"enabled": False}}}


def is_like_others(path):
    """Whether a page has the colours of another one: pages of the reference differ in their words alone."""
    return path.startswith("reference/") and not path.endswith("/core.html")


@pytest.fixture(scope="session")
def report(site):
    """Collects what axe says of each page, of any impact, and leaves it beside the site as a table."""
    rows = []
    yield rows
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    with (site.parent / f"accessibility{worker}.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("page", "scheme", "rules passed", "violation", "impact", "places"), *rows])


def grave_faults(visit, rules, report, scheme):
    """Serious and critical violations, each with the first places where it is."""
    found = Axe().run(visit.page, options=rules).response
    passed = len(found["passes"])
    report += [
        (visit.path, scheme, passed, each["id"], each["impact"], len(each["nodes"]))
        for each in found["violations"]
    ] or [(visit.path, scheme, passed, "", "", 0)]
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:160]} | {node['failureSummary'][:240]}"
        for each in found["violations"]
        if each["impact"] in GRAVE
        for node in each["nodes"][:3]
    ]


def test_axe_finds_nothing_serious(visit, report):
    """No serious or critical violation of any of axe's rules."""
    rules = NO_CONTRAST if is_like_others(visit.path) else ALL_RULES
    assert grave_faults(visit, rules, report, "light") == []


def test_there_is_contrast_in_the_dark(visit, report):
    """Colours are told apart in the dark scheme, too."""
    if is_like_others(visit.path):
        pytest.skip("coloured like reference/core.html")
    page = visit.page
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("['dark', undefined].includes(document.documentElement.dataset.theme)")
    faults = grave_faults(visit, CONTRAST, report, "dark")
    page.emulate_media(color_scheme="light")
    assert faults == []


def test_the_first_key_skips_to_the_text(open_page):
    """Tab, Enter: past the side bar, and the next Tab is inside the main part."""
    page = open_page("index.html").page
    page.keyboard.press("Tab")
    assert "skip" in page.evaluate("document.activeElement.textContent").lower()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("!!document.activeElement.closest('main, #main-content')")


def test_every_page_says_its_language_and_title(visit):
    """A screen reader learns which language to speak, and tabs have different names."""
    assert visit.page.evaluate(
        "document.documentElement.lang || document.querySelector('meta[http-equiv]') && 'en'"
    )
    assert visit.page.title()


def test_print_hides_what_paper_cannot_do(open_page, site):
    """On paper there is no side bar and no button, and solutions are unfolded."""
    chapter = min(site.glob("chapters/*.html"))
    page = open_page(f"chapters/{chapter.name}").page
    page.emulate_media(media="print")
    for gone in (".bd-sidebar-primary", ".bd-sidebar-secondary", ".article-header-buttons", ".prev-next-footer"):
        assert page.locator(f"{gone}:visible").count() == 0, gone
    solution = page.locator(".solution.admonition").first
    if solution.count():
        assert solution.locator("p:not(.admonition-title)").first.is_visible()


LEAST_APART = 7.0
"""Of two colours in one figure, in hundredths of Oklab; about three times what can just be told apart."""
BY_SHAPE = {"paper", "slo", "optimum", "all"}
"""Black diamonds, dashed limits and thin dark lines, which are not told apart by colour."""


@pytest.fixture(scope="session")
def apart(browser):
    """How far two colours of the book are apart for whoever sees them worst, by Chromium's vision emulation."""
    hexes = sorted({colour.lower() for colour in COLOURS.values()})
    page = browser.new_page(viewport={"width": 10 * len(hexes), "height": 10})
    swatches = (f'<i style="flex:none;width:10px;height:10px;background:{colour}"></i>' for colour in hexes)
    page.set_content(f'<body style="margin:0;display:flex">{"".join(swatches)}</body>')
    session = page.context.new_cdp_session(page)
    least = {}
    for deficiency in ("none", "deuteranopia", "protanopia", "tritanopia"):
        session.send("Emulation.setEmulatedVisionDeficiency", {"type": deficiency})
        picture = imread(io.BytesIO(page.screenshot()))
        seen = {colour: oklab(picture[5, 10 * i + 5, :3]) for i, colour in enumerate(hexes)}
        for one, other in itertools.combinations(hexes, 2):
            distance = 100 * float(np.linalg.norm(seen[one] - seen[other]))
            least[one, other] = min(least.get((one, other), math.inf), distance)
    page.close()
    return least


def oklab(srgb):
    """A colour where equal distances look equal (Ottosson 2020); shape (3,), from 0 to 1."""
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    cones = np.cbrt(
        np.array(
            [
                [0.4122214708, 0.5363325363, 0.0514459929],
                [0.2119034982, 0.6806995451, 0.1073969566],
                [0.0883024619, 0.2817188376, 0.6299787005],
            ]
        )
        @ linear
    )
    return (
        np.array(
            [
                [0.2104542553, 0.7936177850, -0.0040720468],
                [1.9779984951, -2.4285922050, 0.4505937099],
                [0.0259040371, 0.7827717662, -0.8086757660],
            ]
        )
        @ cones
    )


def test_colours_of_a_figure_are_told_apart_by_the_colour_blind(site, apart):
    """No figure has two colours that look alike to a reader without one kind of cone."""
    names = {}
    for name, colour in COLOURS.items():
        names.setdefault(colour.lower(), set()).add(name)
    figures = sorted(site.glob("_images/*.svg"))
    assert figures
    close = {}
    for figure in figures:
        text = figure.read_text(encoding="utf-8").lower()
        for one, other in itertools.combinations([colour for colour in sorted(names) if colour in text], 2):
            if apart[one, other] < LEAST_APART and not (names[one] | names[other]) <= BY_SHAPE:
                close.setdefault((one, other, round(apart[one, other], 1)), []).append(figure.name)
    assert close == {}
