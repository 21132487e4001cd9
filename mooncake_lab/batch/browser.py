"""The browser that prints the book and that its tests drive."""

import shutil
from typing import Final

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
"""The commands it may have; the first that is found."""


def find_browser() -> str | None:
    """The path of a browser on this machine, or None."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)
