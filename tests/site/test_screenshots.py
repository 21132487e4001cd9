"""Pictures of the book for a person to look at: light, dark, and a phone (`make screenshots`)."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.site

FOLDER = Path(__file__).parent / "screenshots"
LOOKS = {"light": (1440, "light"), "dark": (1440, "dark"), "phone": (390, "light")}


@pytest.mark.parametrize("look", LOOKS)
def test_page_can_be_pictured(visit, look):
    """Every page is drawn in full in each look; the picture is left in tests/site/screenshots."""
    width, scheme = LOOKS[look]
    visit.page.set_viewport_size({"width": width, "height": 1000})
    visit.page.emulate_media(color_scheme=scheme)
    FOLDER.mkdir(exist_ok=True)
    picture = FOLDER / f"{visit.path.removesuffix('.html').replace('/', '-')}-{look}.png"
    visit.page.screenshot(path=picture, full_page=True, animations="disabled")
    visit.page.set_viewport_size({"width": 1440, "height": 1000})
    visit.page.emulate_media(color_scheme="light")
    assert picture.stat().st_size > 0
