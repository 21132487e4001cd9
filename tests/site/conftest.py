"""The built book behind a web server on loopback, and a browser to read it with."""

import functools
import http.server
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path

import pytest
from axe import settled
from playwright.sync_api import Browser, ConsoleMessage, Request, Response, sync_playwright

from mooncake_lab.cli.doctor import find_browser

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("MOONCAKE_LAB_SITE", ROOT / "book" / "_build" / "html"))
REFERENCE = {"reference/index.html", "reference/core.html", "reference/engine.html"}
"""Pages of the reference that are visited: one generator writes them all, and `test_links` reads every file."""


def pytest_generate_tests(metafunc):
    """Visit every page once for all the tests that ask for a visit, or for a visit to a chapter."""
    if "visit" in metafunc.fixturenames:
        pages = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html") if "_static" not in p.parts)
        pages = [page for page in pages if not page.startswith("reference/") or page in REFERENCE]
        if "chapter" in metafunc.fixturenames:
            pages = [page for page in pages if page.startswith("chapters/")]
        skipped = pytest.param("", marks=pytest.mark.skip(reason="the book is not built; run `make book`"))
        metafunc.parametrize("visit", pages or [skipped], indirect=True, scope="session")


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the built book."""
    if not (SITE / "index.html").is_file():
        pytest.skip("the book is not built; run `make book`")
    return SITE


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[[Path], str]]:
    """A function that serves a folder; where it is served."""
    with ExitStack() as stack:

        def served(folder: Path) -> str:
            server = http.server.ThreadingHTTPServer(
                ("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder))
            )
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            stack.callback(server.server_close)
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield served


@pytest.fixture(scope="session")
def address(site, serve) -> str:
    """Where the book is served."""
    return serve(site)


@pytest.fixture(scope="session")
def pyodide() -> Path | None:
    """A folder of the playground's files with Python in it; None where `make playground` has fetched none."""
    kept = (ROOT / "book" / "_static" / "playground", SITE / "_static" / "playground")
    return next((place for place in kept if (place / "pyodide.mjs").is_file()), None)


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, driven by playwright."""
    chromium = find_browser()
    if chromium is None:
        pytest.skip("no Chromium on PATH; on Debian: apt-get install chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        browser.close()


class Visit:
    """An open page, and what the browser complained about while it opened."""

    def __init__(self, browser: Browser, address: str, path: str) -> None:
        self.path = path
        self.faults: list[str] = []
        self._address = address
        window = {"width": 1440, "height": 1000}
        self._context = browser.new_context(viewport=window, color_scheme="light", reduced_motion="reduce")
        self.page = self._context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.faults.append(f"page error: {error}"))
        self.page.on("response", self._on_response)
        self.page.on("request", self._on_request)
        if path == "index.html":  # sends on to another page
            self.page.goto(f"{address}/{path}", wait_until="networkidle")
        else:
            self.page.goto(f"{address}/{path}")
            settled(self.page)

    def close(self) -> None:
        """Close the page."""
        self._context.close()

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.faults.append(f"console: {message.text}")

    def _on_response(self, response: Response) -> None:
        if response.status >= HTTPStatus.BAD_REQUEST:
            self.faults.append(f"{response.status} {response.url}")

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self._address, "data:", "blob:", "about:")):
            self.faults.append(f"leaves this machine: {request.url}")


@pytest.fixture(scope="session")
def visit(browser, address, request) -> Iterator[Visit]:
    """A page of the book at the width of a desk; tests that change it put it back."""
    visit = Visit(browser, address, request.param)
    yield visit
    visit.close()


@pytest.fixture
def chapter(visit) -> Visit:
    """A visit to a page that is a chapter."""
    return visit


@pytest.fixture(scope="session")
def visit_to(browser, address):
    """A function that opens a page; who opens it closes it."""
    return functools.partial(Visit, browser, address)


@pytest.fixture
def open_page(visit_to):
    """A function that opens a page for one test alone."""
    visits: list[Visit] = []

    def opened(path: str) -> Visit:
        visits.append(visit_to(path))
        return visits[-1]

    yield opened
    for visit in visits:
        visit.close()
