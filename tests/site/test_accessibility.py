"""The built book for readers who do not see it, do not use a mouse, print it, or read it on a phone."""

import pytest
from axe_playwright_python.sync_playwright import Axe

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


def grave_faults(page, rules):
    """Serious and critical violations, each with the first places where it is."""
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:160]} | {node['failureSummary'][:240]}"
        for each in Axe().run(page, options=rules).response["violations"]
        if each["impact"] in GRAVE
        for node in each["nodes"][:3]
    ]


def test_axe_finds_nothing_serious(visit):
    """No serious or critical violation of any of axe's rules."""
    assert grave_faults(visit.page, NO_CONTRAST if is_like_others(visit.path) else ALL_RULES) == []


def test_there_is_contrast_in_the_dark(visit):
    """Colours are told apart in the dark scheme, too."""
    if is_like_others(visit.path):
        pytest.skip("coloured like reference/core.html")
    page = visit.page
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("['dark', undefined].includes(document.documentElement.dataset.theme)")
    faults = grave_faults(page, CONTRAST)
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
