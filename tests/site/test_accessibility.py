"""The built book for readers who do not see it, do not use a mouse, print it, or read it on a phone."""

import csv
import fcntl
import itertools
import json
import os
import re
from pathlib import Path

import pytest
from axe import ALL_BUT_CONTRAST, CONTRAST, figures_as_images, grave_faults, response
from colour_vision import LEAST_APART, apart

from mooncake_lab.book.figures.colours import COLOURS, DARK, css_property, letters

pytestmark = pytest.mark.site

NOT_ON_PAPER = (".bd-sidebar-primary", ".bd-sidebar-secondary", ".article-header-buttons", ".prev-next-footer")
FRONT_DOOR = "index.html"
LOOKS = Path(__file__).with_name("looks.js").read_text(encoding="utf-8")
HEAD = ("page", "checked", "passed", "violation", "impact", "places")
"""Of the report."""


def is_like_others(path):
    """Whether a page has the colours of another one: pages of the reference differ in their words alone."""
    return path.startswith("reference/") and not path.endswith("/core.html")


@pytest.fixture(scope="session")
def report(site, tmp_path_factory):
    """Collects what axe says of each page, of any impact, and leaves it beside the site as one table.

    Each worker of pytest-xdist sees some of the pages. Whoever ends writes what all that ended have seen.
    """
    lines = []
    yield lines
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    seen = tmp_path_factory.getbasetemp().parent if worker else tmp_path_factory.getbasetemp()
    with (seen / "accessibility.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (seen / f"accessibility{worker}.json").write_text(json.dumps(lines), encoding="utf-8")
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in seen.glob("accessibility*.json")]
        with (site.parent / "accessibility.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([HEAD, *sorted(line for part in parts for line in part)])


def contrast(page):
    """What axe finds of contrast in the page's present scheme, at a few places of each look that its text has.

    Where axe cannot decide at these, because something lies over them, a second time looks at all places.

    Returns:
        How many looks were decided, and the violations.
    """
    wanted, decided, violations = None, set(), []
    for _ in range(2):
        left = page.evaluate(LOOKS, wanted)
        found = response(page, CONTRAST, {"include": [["[data-probe]"]]})
        violations += found["violations"]
        nodes = [node for kind in ("passes", "violations") for each in found[kind] for node in each["nodes"]]
        decided |= {int(look[1]) for node in nodes if (look := re.search(r'data-look="(\d+)"', node["html"]))}
        wanted = [look for look, unmarked in enumerate(left) if unmarked and look not in decided]
        if not wanted:
            break
    return len(decided), violations


def rows(visit, what, passed, violations):
    """Lines of the report."""
    named = [(each["id"], each["impact"], len(each["nodes"])) for each in violations] or [("", "", 0)]
    return [(visit.path, what, passed, *each) for each in named]


def test_axe_finds_nothing_serious(visit, report):
    """No serious or critical violation of any of axe's rules; contrast is the next test's."""
    with figures_as_images(visit.page):
        found = response(visit.page, ALL_BUT_CONTRAST)
    report += rows(visit, "rules", len(found["passes"]), found["violations"])
    assert grave_faults(found["violations"]) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_there_is_contrast_in_both_schemes(visit, report, scheme):
    """Letters stand out from their ground, in the light and in the dark."""
    if is_like_others(visit.path):
        pytest.skip("coloured like reference/core.html")
    page = visit.page
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function("to => [to, undefined].includes(document.documentElement.dataset.theme)", arg=scheme)
    with figures_as_images(page):
        decided, violations = contrast(page)
    page.emulate_media(color_scheme="light")
    report += rows(visit, f"looks, {scheme}", decided, violations)
    assert decided
    assert grave_faults(violations) == []


def test_one_dim_word_in_a_crowd_is_found(browser):
    """Text that looks like no other is examined, be it its own colour or a box around it that differs."""
    words = ["<p>clear</p>"] * 300
    words[100] = "<p style='color: #999'>dim</p>"
    words[200] = "<div style='background: #555'><p>sunk</p></div>"
    words[250] = "<p style='color: #767676; opacity: 0.6'>faded</p>"
    page = browser.new_page()
    page.set_content(f"<body style='background: white; color: black'>{''.join(words)}</body>")
    decided, violations = contrast(page)
    dim = {re.sub("<[^>]+>", "", node["html"]) for each in violations for node in each["nodes"]}
    page.close()
    assert decided == 4
    assert dim == {"dim", "sunk", "faded"}


def test_the_first_key_skips_to_the_text(open_page):
    """Tab, Enter: past the side bar, and the next Tab is inside the main part."""
    page = open_page("index.html").page
    page.keyboard.press("Tab")
    assert "skip" in page.evaluate("document.activeElement.textContent").lower()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("!!document.activeElement.closest('main, #main-content')")


def test_every_page_says_its_language_and_title(visit):
    """A screen reader learns which language to speak, and tabs have names; the first page only sends on."""
    if visit.path == FRONT_DOOR:
        visit.page.wait_for_url("**/intro.html")
    assert visit.page.evaluate("document.documentElement.lang") == "en"
    assert visit.page.title()


def test_print_hides_what_paper_cannot_do(chapter):
    """On paper there is no side bar and no button, and solutions are unfolded."""
    page = chapter.page
    page.emulate_media(media="print")
    left = [name for name in NOT_ON_PAPER if page.locator(f"{name}:visible").count()]
    solutions = page.locator(".solution.admonition").all()
    shown = [each.locator("section, p:not(.admonition-title)").first.is_visible() for each in solutions]
    page.emulate_media(media="screen")
    assert left == []
    assert len(shown) >= 2
    assert all(shown)


BY_SHAPE = {"paper", "slo", "optimum", "all", "ink"}
"""Black diamonds, dashed limits, thin dark lines and text, which are not told apart by colour."""
DRAWING = re.compile(r'<svg role="img".*?</svg>', re.DOTALL)


def test_letters_of_figures_are_legible(site):
    """Letters of figures, where axe does not look, contrast with the page by at least 4.5:1 in both themes."""
    css = {css_property(name): name for name in COLOURS}
    legible = {key for key, name in css.items() if letters(COLOURS[name]) == COLOURS[name]}
    faint = set()
    for path in sorted(site.glob("chapters/*.html")):
        for figure in DRAWING.findall(path.read_text(encoding="utf-8")):
            used = set(re.findall(r"<text[^>]*fill: var\((--fig-[a-z0-9-]+)", figure))
            faint |= {(path.name, each) for each in used & css.keys() - legible}
    assert faint == set()


@pytest.mark.parametrize("colours", [COLOURS, DARK], ids=["light", "dark"])
def test_colours_of_a_figure_are_told_apart_by_the_colour_blind(site, colours):
    """No figure has two colours that look alike to a reader without one kind of cone, in either theme."""
    names = {css_property(name): name for name in COLOURS}
    close, figures = {}, 0
    for page in sorted(site.glob("chapters/*.html")):
        for figure in DRAWING.findall(page.read_text(encoding="utf-8")):
            figures += 1
            used = names.keys() & set(re.findall(r"var\((--fig-[a-z0-9-]+)", figure))
            for one, other in itertools.combinations(sorted(names[each] for each in used), 2):
                distance = apart(colours[one], colours[other])
                if distance < LEAST_APART and not {one, other} <= BY_SHAPE:
                    close.setdefault((one, other, round(distance, 1)), set()).add(page.name)
    assert figures
    assert close == {}
