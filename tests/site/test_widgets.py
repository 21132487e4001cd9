"""What moves in the book: requests to drag, sliders, the table of claims, definitions of terms."""

import pytest
from axe import figures_as_images, grave_faults, response

from mooncake_lab.book.figures.colours import COLOURS, DARK, GROUND

pytestmark = pytest.mark.site

PHONE = {"width": 390, "height": 844}


def page_with(site, selector):
    """The address of the chapter that has a widget of this class."""
    found = [
        path for path in sorted(site.glob("chapters/*.html")) if f'class="{selector}"' in path.read_text("utf-8")
    ]
    if not found:
        pytest.skip(f"no chapter has a {selector}; run `make book`")
    return found[0].relative_to(site).as_posix()


def test_scripts_of_widgets_are_files(site):
    """No page carries a widget's script or style in itself."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in site.glob("**/*.html")}
    assert [name for name, text in pages.items() if "data-shared=" in text] == []


def test_claims_are_filtered_and_sorted(open_page, site):
    """A filter leaves the rows that it names, a heading sorts them, and the address keeps both."""
    path = page_with(site, "claims-table")
    visit = open_page(path)
    page = visit.page
    rows = page.locator(".claims-table tbody tr")
    everything = rows.count()
    page.get_by_role("combobox", name="verdict").select_option("not reproduced")
    verdicts = page.locator(".claims-table td.verdict").all_text_contents()
    assert 0 < len(verdicts) < everything
    assert set(verdicts) == {"not reproduced"}
    assert page.locator(".claims-table [role=status]").inner_text() == f"{len(verdicts)} of {everything} claims"
    page.get_by_role("button", name="chapter").click()
    chapters = page.locator(".claims-table td.chapter").all_text_contents()
    digits = [int(each) for each in chapters if each.isdigit()]
    assert digits == sorted(digits)
    claims = page.locator(".claims-table td.claim").all_text_contents()
    again = open_page(path + page.evaluate("location.hash"))
    assert again.page.locator(".claims-table td.claim").all_text_contents() == claims
    again.page.get_by_role("button", name="Show all").click()
    assert again.page.locator(".claims-table tbody tr").count() == everything
    assert visit.faults == again.faults == []


def test_every_term_has_its_definition(visit):
    """What leads to an entry of the glossary has the entry's text at hand."""
    missing = """() => {
      const source = document.getElementById('glossary-definitions');
      const known = source ? JSON.parse(source.textContent) : {};
      return [...document.querySelectorAll("article a[href*='glossary.html#term']")]
        .filter(link => !known[link.hash.slice(1)]).map(link => link.outerHTML);
    }"""
    if visit.path == "glossary.html" or visit.path.startswith(("reference/", "genindex", "search")):
        pytest.skip("not a page of prose")
    assert visit.page.evaluate(missing) == []


@pytest.fixture
def term(open_page, site):
    """A chapter, the first term in it, and the box that shows its definition."""
    path = sorted(site.glob("chapters/*.html"))[3].relative_to(site).as_posix()
    page = open_page(path).page
    return page, page.locator("article a[href*='glossary.html#term']").first, page.locator("#term-definition")


def test_a_definition_shows_under_the_pointer_and_with_the_focus(term):
    """Both show the same words, tell a screen reader, and Escape closes them."""
    page, link, box = term
    assert not box.is_visible()
    link.hover()
    said = box.inner_text()
    assert len(said) > 20
    assert link.get_attribute("aria-describedby") == "term-definition"
    page.keyboard.press("Escape")
    assert not box.is_visible()
    link.focus()
    assert box.inner_text() == said
    with figures_as_images(page):
        assert grave_faults(response(page)["violations"]) == []
    page.keyboard.press("Escape")
    assert not box.is_visible()
    assert link.get_attribute("aria-describedby") is None


def test_a_tap_shows_a_definition_and_a_second_one_follows_it(browser, address, site):
    """On a touch screen the first tap stays on the page."""
    path = sorted(site.glob("chapters/*.html"))[3].relative_to(site).as_posix()
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(f"{address}/{path}", wait_until="networkidle")
    link, box = page.locator("article a[href*='glossary.html#term']").first, page.locator("#term-definition")
    link.tap()
    assert box.is_visible()
    place = box.bounding_box()
    assert place["x"] >= 0
    assert place["x"] + place["width"] <= PHONE["width"]
    link.tap()
    page.wait_for_url("**/glossary.html#term*")
    context.close()


def test_figures_are_light_on_paper(open_page):
    """A page that is dark on the screen prints its figures in their light colours."""
    page = open_page("chapters/09_placement.html").page
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    ink = "getComputedStyle(document.documentElement).getPropertyValue('--fig-ink').trim()"
    assert page.evaluate(ink) == DARK["ink"].lower()
    page.emulate_media(media="print")
    assert page.evaluate(ink) == COLOURS["ink"].lower()
    assert page.evaluate(ink.replace("ink", "ground")) == GROUND.lower()
