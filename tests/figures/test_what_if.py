"""The slider of a what-if: self-contained, to be used by keyboard and by ear, and readable without scripts."""

import json
import re
from html.parser import HTMLParser

import pandas as pd
import pytest

from mooncake_lab.batch.browser import find_browser
from mooncake_lab.figures.what_if import what_if

TABLE = pd.DataFrame({"speed": [2.0, 1.0] * 2, "policy": [*"aabb"], "share": [0.2, 0.1, 0.4, 0.3]})
SHARE = {"rejected": ("share", ".0%")}


def page_of(table=TABLE, label="speed", quantities=SHARE, **settings):
    """The HTML of a slider over the speed."""
    return what_if(table, "speed", label, quantities, caption="Invented.", **settings)._repr_html_()


def data_of(page):
    """What the page's script reads."""
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)[1])


def test_it_is_self_contained():
    """No address of anything else."""
    assert not re.search(r"https?:|src=|href=|@import", page_of())


def test_it_can_be_used_by_ear():
    """The slider has a label, the table a caption and headings, and the value is announced."""
    page = page_of()
    assert re.search(r'<label for="([^"]+)".*<input id="\1" type="range" min="0" max="1"', page, re.DOTALL)
    assert "<caption>Invented.</caption>" in page
    assert (page.count('scope="row"'), page.count('scope="col"')) == (2, 2)
    assert 'aria-valuetext="1"' in page


def test_without_scripts_it_shows_the_start():
    """The value and the cells of the start are there, the slider is not, and a sentence says why."""
    page = re.sub(r"<script.*?</script>", "", page_of(start=1), flags=re.DOTALL)
    assert re.findall(r"<span>(.*?)</span>", page) == ["20%", "40%"]
    assert re.search(r"<output[^>]*>2</output>", page)
    assert " hidden" in re.search(r"<input[^>]*>", page)[0]
    assert "<noscript>" in page


def test_positions_are_in_order_with_a_row_each():
    """The knob goes upwards whatever the order of the rows, which keep theirs."""
    points = data_of(page_of())["points"]
    assert [point["value"] for point in points] == ["1", "2"]
    assert [point["cells"] for point in points] == [[["10%"], ["30%"]], [["20%"], ["40%"]]]


def test_bars_have_one_scale():
    """The longest bar of all positions is the longest possible, and lengths are in proportion."""
    bars = [point["bars"] for point in data_of(page_of(bars=True))["points"]]
    assert bars == [pytest.approx([1.5, 4.5]), pytest.approx([3.0, 6.0])]
    assert page_of().count("<i ") == 0


def test_a_hole_in_the_grid_is_refused():
    """Every value of the knob needs every row, once."""
    with pytest.raises(ValueError, match="3 rows; speed x policy needs 2 x 2"):
        page_of(TABLE.iloc[:3])
    with pytest.raises(ValueError, match="8 rows"):
        page_of(pd.concat([TABLE, TABLE]))


def test_text_cannot_leave_its_place():
    """Names are escaped in the page and in the data."""
    page = page_of(TABLE.assign(policy=["</script>", "</script>", "b", "b"]), "<b>&", names={"b": "</table>"})
    assert "<b>" not in page
    assert page.count("</script>") == 2
    assert page.count("</table>") == 1
    HTMLParser().feed(page)


def test_keys_move_it(tmp_path):
    """In a browser the arrow keys change the value, the cells and the bars."""
    playwright = pytest.importorskip("playwright.sync_api")
    browser = find_browser()
    if browser is None:
        pytest.skip("no chromium on this machine")
    (tmp_path / "page.html").write_text(f"<!doctype html><title>t</title>{page_of(bars=True)}", encoding="utf-8")
    with playwright.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=str(browser), args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page()
        page.goto((tmp_path / "page.html").as_uri())
        page.keyboard.press("Tab")
        page.keyboard.press("ArrowRight")
        seen = (
            page.inner_text("output"),
            page.locator("td").all_inner_texts(),
            page.locator("i").last.evaluate("bar => bar.style.width"),
        )
        chromium.close()
    assert seen == ("2", ["20%", "40%"], "6rem")
