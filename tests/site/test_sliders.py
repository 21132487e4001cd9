"""A slider of a what-if in a browser."""

import pandas as pd
import pytest

from mooncake_lab.book.figures.what_if import what_if

TABLE = pd.DataFrame({"speed": [2.0, 1.0] * 2, "policy": [*"aabb"], "share": [0.2, 0.1, 0.4, 0.3]})

pytestmark = pytest.mark.site


def test_keys_and_a_pointer_move_it(browser, tmp_path):
    """In a browser the arrow keys and a pointer over a panel change the value, the texts and the circles."""
    slider = what_if(TABLE, "speed", "speed", {"rejected": ("share", ".0%")}, caption="Invented.")
    (tmp_path / "page.html").write_text(f"<!doctype html><title>t</title>{slider._repr_html_()}", encoding="utf-8")
    page = browser.new_page()

    def seen():
        circles = page.locator("circle").evaluate_all("found => found.map(each => +each.getAttribute('cy'))")
        return page.inner_text("output"), page.locator(".value").all_text_contents(), circles

    page.goto((tmp_path / "page.html").as_uri())
    before = seen()
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    after = seen()
    announced = page.locator("input").get_attribute("aria-valuetext")
    page.locator("svg").hover(position={"x": 40, "y": 60})
    back = seen()
    page.close()
    assert before[:2] == back[:2] == ("1", ["10%", "30%"])
    assert after[:2] == ("2", ["20%", "40%"])
    assert announced == "2. rejected: a 20%, b 40%"
    assert before[2] == back[2] != after[2]
