"""The slider of a what-if: self-contained, to be used by keyboard and by ear, and readable without scripts."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pandas as pd
import pytest

from mooncake_lab.book.figures.embed import embedded
from mooncake_lab.book.figures.what_if import what_if

TABLE = pd.DataFrame({"speed": [2.0, 1.0] * 2, "policy": [*"aabb"], "share": [0.2, 0.1, 0.4, 0.3]})
SHARE = {"rejected": ("share", ".0%")}


def page_of(table=TABLE, label="speed", quantities=SHARE, **settings):
    """The HTML of a slider over the speed."""
    return what_if(table, "speed", label, quantities, caption="Invented.", **settings)._repr_html_()


def data_of(page):
    """What the page's script reads."""
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def test_it_is_self_contained():
    """No address of anything else."""
    assert not re.search(r"https?:|src=|href=|@import", page_of())


def test_it_can_be_used_by_ear():
    """The slider has a label and announces its value, and each panel describes its lines."""
    page = page_of()
    assert re.search(r'<label for="([^"]+)".*<input id="\1" type="range" min="0" max="1"', page, re.DOTALL)
    assert 'aria-valuetext="1"' in page
    assert 'aria-label="rejected by speed, from 1 to 2: a from 10% to 20%, b from 30% to 40%."' in page


def test_without_scripts_it_shows_the_start():
    """The lines and the values of the start are there, the slider is not, and a sentence says why."""
    page = re.sub(r"<script.*?</script>", "", page_of(start=1), flags=re.DOTALL)
    assert re.findall(r'class="value"[^>]*>(.*?)<', page) == ["20%", "40%"]
    assert page.count('class="line"') == 2
    assert re.search(r"<output[^>]*>2</output>", page)
    assert " hidden" in re.search(r"<input[^>]*>", page)[0]
    assert "<noscript>" in page


def test_positions_are_in_order_and_higher_values_are_higher():
    """The knob goes upwards whatever the order of the rows, and a line's height is in proportion to its value."""
    data = data_of(page_of())
    assert data["values"] == ["1", "2"]
    first, second = data["panels"][0]["sides"]
    assert (first["texts"], second["texts"]) == (["10%", "20%"], ["30%", "40%"])
    heights = [*first["ys"], *second["ys"]]
    steps = [lower - higher for lower, higher in pairwise(heights)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.11)
    assert steps[0] > 10


def test_a_reference_makes_the_panel_logarithmic():
    """Around a ratio of one, twice is as far above the line as half is below it."""
    table = TABLE.assign(share=[0.5, 2.0, 1.0, 1.0])
    page = page_of(table, quantities={"ratio": ("share", "g")}, reference=1.0)
    up, down = data_of(page)["panels"][0]["sides"][0]["ys"]
    rule = float(re.search(r'class="rule" d="M\d+ ([\d.]+)H', page)[1])
    assert down - rule == pytest.approx(rule - up, abs=0.11)


def test_names_of_equal_values_do_not_cover_each_other():
    """Labels beside the lines keep their distance, also where all lines meet."""
    table = pd.concat([TABLE.assign(policy=name, share=0.3).iloc[:2] for name in "abcde"])
    labels = [side["labels"][0] for side in data_of(page_of(table))["panels"][0]["sides"]]
    assert all(below - above >= 26 for above, below in pairwise(sorted(labels)))


def test_a_hole_in_the_grid_is_refused():
    """Every value of the knob needs every line, once."""
    with pytest.raises(ValueError, match="3 rows; speed x policy needs 2 x 2"):
        page_of(TABLE.iloc[:3])
    with pytest.raises(ValueError, match="8 rows"):
        page_of(pd.concat([TABLE, TABLE]))


def test_a_name_that_does_not_fit_is_refused():
    """Beside a line there is room for some letters only."""
    with pytest.raises(ValueError, match="counting the requests to come"):
        page_of(names={"a": "counting the requests to come"})


def test_text_cannot_leave_its_place():
    """Names are escaped in the page and in the data."""
    page = page_of(TABLE.assign(policy=["</script>", "</script>", "b", "b"]), "<b>&", names={"b": "</svg>"})
    assert "<b>" not in page
    assert page.count("</script>") == 2
    assert page.count("</svg>") == 1
    HTMLParser().feed(page)


def test_only_scripts_and_styles_are_embedded():
    """A file that a page cannot run or apply is refused."""
    with pytest.raises(ValueError, match=r"widgets\.svg"):
        embedded("widgets.svg")
