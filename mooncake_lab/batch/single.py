"""The rendered book on paper: all pages in reading order as one document, printed by a browser, offline.

    python -m mooncake_lab.batch.single book/_build

writes `book.html`, which shows the pages' own pictures and styles, and `mooncake.pdf` from it. The API reference
stays on the site.
"""

import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

_FRONT: Final = "intro.html"
_LEFT_OUT: Final = ("reference/",)
_LISTED: Final = re.compile(r'<li class="toctree-l\d[^"]*"><a class="reference internal" href="([^"#]+)"')
_ARTICLE: Final = re.compile(r"<article\b.*?</article>", re.DOTALL)
_HEAD: Final = re.compile(r"<head>.*?</head>", re.DOTALL)
_LINK: Final = re.compile(r'\b(?P<name>href|src)="(?P<url>[^"]*)"')
_ID: Final = re.compile(r'(\bid="|\burl\(#)')
_THEME_SWITCH: Final = re.compile(r"<script[^>]*>\s*document\.documentElement\.dataset.*?</script>", re.DOTALL)
_STYLE: Final = "<style>.page { break-before: page; max-width: 56rem; margin: auto; padding: 1rem; }</style>"
_PATIENCE_MS: Final = 60_000


def one_document(build: Path) -> str:
    """All pages below `build/html` in reading order, their links leading to each other within the document.

    Raises:
        ValueError: when the book is not rendered.
    """
    html = build / "html"
    if not (html / _FRONT).is_file():
        raise ValueError(f"{html} holds no rendered book; run `make book` first")
    front = (html / _FRONT).read_text(encoding="utf-8")
    listed = [path for path in _LISTED.findall(front) if not path.startswith(_LEFT_OUT)]
    pages = list(dict.fromkeys([_FRONT, *listed]))
    head = _HEAD.search(front)
    styles = _THEME_SWITCH.sub("", _rewritten(head[0], _FRONT, ())) if head else ""  # paper is light
    body = "\n".join(_section(html, page, pages) for page in pages)
    start = f'<!doctype html>\n<html lang="en" data-theme="light">\n{styles}{_STYLE}'
    return f"{start}\n<body>\n{body}\n</body>\n</html>\n"


def print_to_pdf(document: Path, pdf: Path, *, browser: str) -> None:
    """Print an HTML file with a Chromium.

    Raises:
        RuntimeError: when the browser leaves no file; with its words.
    """
    pdf.unlink(missing_ok=True)
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer",
        "--run-all-compositor-stages-before-draw", f"--virtual-time-budget={_PATIENCE_MS}",
        f"--print-to-pdf={pdf}", document.resolve().as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - the browser, our file
    if not pdf.is_file():
        raise RuntimeError(f"{browser} printed nothing: {done.stderr.strip()}")


def _section(html: Path, page: str, pages: Sequence[str]) -> str:
    article = _ARTICLE.search((html / page).read_text(encoding="utf-8"))
    if article is None:
        raise ValueError(f"{html / page} has no article")
    text = article[0].replace('loading="lazy"', "")
    text = _ID.sub(lambda match: f"{match[1]}{_slug(page)}--", text)
    return f'<section class="page" id="{_slug(page)}">\n{_rewritten(text, page, pages)}\n</section>'


def _rewritten(text: str, page: str, pages: Sequence[str]) -> str:
    def target(match: re.Match[str]) -> str:
        return f'{match["name"]}="{_target(match["url"], page, pages)}"'

    return _LINK.sub(target, text)


def _target(url: str, page: str, pages: Sequence[str]) -> str:
    parts = urlsplit(url)
    if parts.scheme or parts.netloc:
        return url
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), parts.path)) if parts.path else page
    if path in pages:
        return f"#{_slug(path)}--{parts.fragment}" if parts.fragment else f"#{_slug(path)}"
    return f"html/{path}"


def _slug(page: str) -> str:
    return re.sub(r"\W", "-", page.removesuffix(".html"))


def main(arguments: Sequence[str]) -> int:
    """The command line: the folder in which the book was built."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m mooncake_lab.batch.single BUILD_FOLDER\n")
        return 2
    build = Path(arguments[0])
    browser = find_browser()
    if browser is None:
        sys.stderr.write(f"There is no browser to print with; install one of {', '.join(BROWSERS)}.\n")
        return 1
    document, pdf = build / "book.html", build / "mooncake.pdf"
    try:
        document.write_text(one_document(build), encoding="utf-8")
        print_to_pdf(document, pdf, browser=browser)
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"The book on paper: {pdf.resolve()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
"""The commands it may have; the first that is found."""


def find_browser() -> str | None:
    """The path of a browser on this machine, or None."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)
