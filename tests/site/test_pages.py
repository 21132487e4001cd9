"""The built book, page by page, as a reader's browser sees it."""

import re
from pathlib import Path

import pytest
from axe import ALL_BUT_CONTRAST, figures_as_images, grave_faults, response, settled
from PIL import Image

pytestmark = pytest.mark.site

DESK = {"width": 1440, "height": 1000}
PHONE = {"width": 390, "height": 844}
FRONT = "intro.html"


def test_page_opens_without_complaint(visit):
    """No console message, no script error, no missing file, and no request that leaves this machine."""
    assert visit.faults == []


def test_formulas_are_typeset(visit):
    """Each formula is a `math` element with a size, and none has a part that the browser refused."""
    wrong = """() => [...document.querySelectorAll('.math')].filter(e => {
      const formula = e.querySelector('math');
      return !formula || !formula.getBoundingClientRect().width || formula.querySelector('merror');
    }).map(e => e.outerHTML)"""
    assert visit.page.evaluate(wrong) == []


MOST_SCRIPT_BYTES = 1_000_000
SCRIPT_BYTES = """() => {
  const kinds = /\\.(m?js|wasm)$/;
  const files = performance.getEntriesByType('resource').filter(e => kinds.test(new URL(e.name).pathname));
  const inline = [...document.scripts].filter(s => !s.src && s.type !== 'application/json');
  return [files.reduce((sum, e) => sum + e.decodedBodySize, 0), inline.reduce((sum, s) => sum + s.text.length, 0)];
}"""
"""Bytes of scripts and WebAssembly that a page loaded, and characters of the scripts that it contains."""


def test_a_page_loads_little_script(visit):
    """Before the first click, a page loads at most 1 MB of JavaScript and WebAssembly, unpacked."""
    loaded, inline = visit.page.evaluate(SCRIPT_BYTES)
    assert 0 < loaded + inline <= MOST_SCRIPT_BYTES
    assert visit.path == "index.html" or loaded > 50_000, "the theme's scripts were not counted"


def test_the_note_can_be_closed(site, open_page):
    """The note on generated traces, once closed by key, is on no page."""
    visit = open_page(FRONT)
    page, note = visit.page, visit.page.locator(".bd-header-announcement")
    if "bd-header-announcement" not in (site / FRONT).read_text(encoding="utf-8"):
        pytest.skip("built with the released traces")
    note.get_by_role("button", name="Close this note").press("Enter")
    assert note.count() == 0
    page.reload()
    closed = note.count()
    page.evaluate("localStorage.clear()")  # the other tests see it again
    assert closed == 0
    assert visit.faults == []


def test_a_mark_says_what_is_so(visit):
    """Each mark of a twin build is a sentence that names the run; no warning stands below a cell."""
    marks = visit.page.locator(".bd-article .not-here").all_text_contents()
    section = r"(?:\d+ of the \d+|The) statements of this section (?:do not hold|cannot be checked)"
    shape = rf"(?:Not|Cannot be checked|{section}) on this (?:build, which uses|machine).*\."
    assert [mark for mark in marks if not re.fullmatch(shape, mark)] == []
    assert visit.page.locator(".bd-article .admonition.warning").filter(has_text="In this run").count() == 0


TABLES_OF_VERDICTS = "table.comparison, table.chapters"
OUTSIDE = """([selector, width]) => [...document.querySelectorAll(selector)].flatMap(table => {
  const cells = table.querySelectorAll(table.matches('.chapters') ? 'tbody td:last-child' : 'tbody td.verdict');
  if (cells.length !== table.querySelectorAll('tbody tr').length) return ['a row without a verdict'];
  return [...cells].filter(cell => cell.textContent.trim()).map(cell => [cell, cell.getBoundingClientRect()])
    .filter(([_, box]) => box.width === 0 || box.left < 0 || box.right > width)
    .map(([cell, box]) => `${cell.textContent}: ${box.left} to ${box.right}`);
})"""
"""The verdicts of all tables that lie outside the window, or that are not shown."""

SCROLLED = """selector => [...document.querySelectorAll(selector)]
  .filter(table => table.scrollWidth > table.parentElement.clientWidth).length"""


SILENT = """() => [...document.querySelectorAll('.bd-article :is(table, div.math)')]
  .filter(box => box.checkVisibility()) // not in a closed box, which marks what it holds when it opens
  .filter(box => box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).overflowX === 'auto')
  .filter(box => box.tabIndex !== 0 || !box.previousElementSibling?.checkVisibility())
  .map(box => box.outerHTML.slice(0, 100))"""
"""Boxes that scroll sideways, but not by key or without a hint above them."""


def hidden_verdicts(page, width):
    """Verdicts outside a window of this width, and how many tables of verdicts are wider than their place."""
    return page.evaluate(OUTSIDE, [TABLES_OF_VERDICTS, width]), page.evaluate(SCROLLED, TABLES_OF_VERDICTS)


def test_a_desk_shows_every_verdict(visit):
    """No table of verdicts has to be scrolled sideways to see how a claim ended."""
    assert hidden_verdicts(visit.page, DESK["width"]) == ([], 0)


def test_a_phone_shows_the_page(visit):
    """Only tables, formulas and code scroll, each with a hint; verdicts are in the window; axe finds nothing."""
    page = visit.page
    page.set_viewport_size(PHONE)
    settled(page)
    width = page.evaluate("document.documentElement.scrollWidth")
    verdicts = hidden_verdicts(page, PHONE["width"])
    silent = page.evaluate(SILENT)
    violations = []
    if visit.path.startswith("chapters/"):  # they alone have widgets and wide outputs; colours are those of a desk
        with figures_as_images(page):
            violations = grave_faults(response(page, ALL_BUT_CONTRAST)["violations"])
    page.set_viewport_size(DESK)
    assert width <= PHONE["width"]
    assert verdicts == ([], 0)
    assert silent == violations == visit.faults == []


WIDE_FIGURES = """() => [...document.querySelectorAll('.bd-article .drawing')]
  .filter(box => box.checkVisibility() && box.scrollWidth > box.clientWidth)
  .map(box => `${box.scrollWidth} px in ${box.clientWidth}`)"""
LETTERS = """() => [...document.querySelectorAll('.bd-article .drawing svg text')]
  .filter(text => text.checkVisibility())
  .map(text => [parseFloat(getComputedStyle(text).fontSize), text.getScreenCTM()])
  .map(([size, { a, b }]) => size * Math.hypot(a, b))"""
"""Heights of the letters of all figures as they are shown (px)."""


@pytest.mark.parametrize("width", [390, 768, 1200, 1280, 1440])
def test_a_figure_fits_its_column(chapter, width):
    """Figures shrink before they scroll, down to a column of 560 px; in a narrower one letters keep their size."""
    page = chapter.page
    page.set_viewport_size({"width": width, "height": DESK["height"]})
    wide, letters = page.evaluate(WIDE_FIGURES), page.evaluate(LETTERS)
    page.set_viewport_size(DESK)
    assert min(letters, default=11) >= (9 if wide == [] else 11 - 0.01)
    assert width == PHONE["width"] or wide == []


def test_search_finds_a_word(open_page):
    """A word of the glossary finds the page that explains it."""
    visit = open_page("search.html?q=KVCache")
    page = visit.page
    page.wait_for_selector("ul.search li a")
    found = page.eval_on_selector_all("ul.search li a", "links => links.map(l => l.getAttribute('href'))")
    assert any("glossary.html" in link for link in found), found
    assert visit.faults == []


def test_dark_mode_toggles(open_page):
    """The switch changes the theme, and the background follows."""
    page = open_page("index.html").page

    def background():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    seen = {background()}
    for _ in range(2):  # automatic, light, dark
        page.locator("button.theme-switch-button:visible").first.click()
        seen.add(background())
    assert len(seen) == 2


def test_chapters_can_be_taken_home_and_launched(chapter, site):
    """Each chapter downloads as a notebook from the book itself, and its launch links name the source notebook."""
    stem = Path(chapter.path).stem
    links = chapter.page.eval_on_selector_all("a[href]", "links => links.map(l => l.getAttribute('href'))")
    assert [link for link in links if link.endswith(f"_sources/chapters/{stem}.ipynb")]
    assert (site / "_sources" / "chapters" / f"{stem}.ipynb").is_file()
    launches = [link for link in links if "mybinder.org" in link or "colab.research" in link]
    assert len(launches) == 2
    assert all(link.endswith(f"notebooks/{stem}.ipynb") for link in launches)


def test_reading_order_passes_through_every_chapter(site):
    """Following "next" from the front page never returns, and meets each chapter once, in order."""
    page, seen = site / FRONT, []
    while following := re.search(r'class="right-next"\s+href="([^"#]+)', page.read_text(encoding="utf-8")):
        page = (page.parent / following[1]).resolve()
        assert page not in seen
        seen.append(page)
    met = [page.name for page in seen if page.parent.name == "chapters"]
    assert met == sorted(path.name for path in site.glob("chapters/*.html"))


def test_solutions_are_folded(chapter):
    """A solution shows itself only when asked, and folds again."""
    solutions = chapter.page.locator(".solution.admonition").all()
    assert len(solutions) >= 2
    for solution in solutions:
        title = solution.locator(".admonition-title").first
        body = solution.locator("section, p:not(.admonition-title)").first
        seen = [body.is_visible()]
        for _ in range(2):
            solution.locator(".toggle-button").first.click()  # the middle of the title is a link to the exercise
            seen.append(body.is_visible())
        assert seen == [False, True, False], title.inner_text()


def test_every_drawn_figure_offers_its_data(visit, address):
    """Below each figure of a chapter there is a link to a table of what it draws."""
    if not visit.path.startswith("chapters/"):
        pytest.skip("only chapters draw")
    page = visit.page
    figures = page.locator("figure:has(.drawing svg)")
    links = page.locator("figure a.figure-data").evaluate_all("found => found.map(link => link.href)")
    assert len(links) == figures.count() > 0
    for link in links:
        assert link.startswith(f"{address}/data/")
        head, *rows = page.request.get(link).text().splitlines()
        assert {"panel", "kind", "x", "y"} <= set(head.split(","))
        assert rows


def test_a_figure_can_be_saved(chapter, tmp_path):
    """A click saves the drawing as SVG, whole without its page, or as PNG, which shows more than paper."""
    figure = chapter.page.locator("figure:has(.drawing svg)").first
    saved: dict[str, Path] = {}
    for kind in ("SVG", "PNG"):
        with chapter.page.expect_download() as download:
            figure.get_by_role("button", name=f"Save this figure as {kind}").click()
        saved[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(saved[kind])
        assert saved[kind].name == f"{figure.get_attribute('id')}.{kind.lower()}"
    read = "text => new DOMParser().parseFromString(text, 'image/svg+xml').documentElement.tagName"
    assert chapter.page.evaluate(read, saved["SVG"].read_text(encoding="utf-8")) == "svg"
    with Image.open(saved["PNG"]) as picture:
        shades = picture.convert("L").getcolors()
    assert shades is not None
    assert len(shades) > 10
    assert max(shades)[1] == 255
