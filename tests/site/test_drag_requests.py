"""Requests to drag, in a browser: the package runs what a reader changes; the first picture needs no Python."""

import json
import re
import shutil
from pathlib import Path

import pytest

from mooncake_lab.batching import Limits
from mooncake_lab.book.figures.embed import STATIC
from mooncake_lab.book.playground import batches
from mooncake_lab.book.playground.assets import package_zip
from mooncake_lab.book.playground.batches import POLICY_NAMES, DraggedRequest
from mooncake_lab.book.playground.drag_requests import DragRequests
from mooncake_lab.book.testbeds.nodes import paper_node_latency

pytestmark = pytest.mark.site

BOOK_STATIC = Path(__file__).parents[2] / "book" / "_static"
LOADS_MS = 120_000
MOST_SCRIPT_BYTES = 1_000_000
WIDGET = DragRequests(
    name="drag",
    requests=(DraggedRequest(0.0, 400, 8), DraggedRequest(0.1, 304, 6), DraggedRequest(0.2, 3008, 4)),
    limits=Limits(
        max_batch_tokens=8192, max_requests=8, block_size_tokens=16, capacity_blocks=4096, free_blocks=4096
    ),
    latency=paper_node_latency().hybrid,
    machine="a node",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pyodide):
    """A page with the widget as the book has it: scripts and styles beside it, and Python where it is here."""
    folder = tmp_path_factory.mktemp("site")
    static = folder / "_static"
    shutil.copytree(STATIC, static)
    for name in ("drag-worker.mjs", "pyodide-package.mjs"):
        shutil.copy(BOOK_STATIC / name, static / name)
    if pyodide:
        shutil.copytree(pyodide, static / "playground")
        (static / "playground" / "mooncake_lab.zip").write_bytes(package_zip())
    else:
        (static / "playground").mkdir()
        (static / "playground" / "manifest.json").write_text('{"wheels": [], "traces": {}}')
    body = re.sub(
        r'<script data-shared="([\w.]+)">.*?</script>',
        r'<script defer src="_static/\1"></script>',
        WIDGET._repr_html_(),
        flags=re.DOTALL,
    )
    (folder / "page.html").write_text(f"<!doctype html><title>t</title>{body}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def served(folder, serve):
    """Where the page is served."""
    return f"{serve(folder)}/page.html"


@pytest.fixture(scope="module")
def page(browser):
    """A page in Chromium."""
    opened = browser.new_page()
    yield opened
    opened.close()


@pytest.fixture
def shown(page, served):
    """A function that opens the widget, at an address with this ending."""

    def opened(ending=""):
        page.goto("about:blank")
        page.goto(served + ending)
        return page

    return opened


@pytest.fixture
def python_here(pyodide):
    """Leave a test out where Pyodide is not."""
    if not pyodide:
        pytest.skip("Pyodide is not here; `make playground` fetches it")


def told(page):
    """What each row of the chart says."""
    return page.locator("svg .said").all_text_contents()


def current(page):
    """Wait until what is drawn is a run of what is set."""
    page.wait_for_function(
        "() => !document.querySelector('.batching-widget').hasAttribute('data-stale')", timeout=LOADS_MS
    )


def bars(page):
    """The kinds of the bars of each request, in order."""
    return page.locator("svg > g:not(.axis) > g:not(.flag)").evaluate_all(
        "rows => rows.map(row => [...row.querySelectorAll('rect')].map(bar => bar.getAttribute('class')))"
    )


def expected(run):
    """What rows and cells should say of a `PolicyRun`."""
    rows = [
        f"{chr(65 + i)}: "
        + (
            "refused, too large"
            if row["ttft_s"] is None
            else f"TTFT {row['ttft_s']:.2f} s, longest gap {_ms(row['longest_tbt_s'])}"
        )
        for i, row in enumerate(run["rows"])
    ]
    return rows, [[bar[0] for bar in row["bars"]] for row in run["rows"]]


def _ms(seconds):
    return "–" if seconds is None else f"{int(1000 * seconds + 0.5)} ms"


def at_start():
    """The runs of the start, by policy."""
    scenario = json.loads(re.search(r'"scenario":(\{.*\}),"runs"', WIDGET._data())[1])
    return json.loads(batches.runs(json.dumps(scenario)))


def test_the_first_picture_is_the_package_s_run_of_every_policy(shown):
    """Without Python in the browser, each policy can be chosen, and rows and bars are those of the package."""
    page = shown()
    requested = []
    page.on("request", lambda request: requested.append(request.url))
    assert page.locator(".policies tbody tr").count() == len(POLICY_NAMES)
    for policy, name in POLICY_NAMES.items():
        page.get_by_role("radio", name=name, exact=True).check()
        assert (told(page), bars(page)) == expected(at_start()[policy])
    assert requested == []


def test_a_reader_loads_little_before_the_first_change(browser, served):
    """Opening the page, at any address, loads at most 1 MB of scripts and WebAssembly, and nothing of Python."""
    for ending in ("", "#drag=orca;512;4096;0,1328,64;0.2,1328,64"):
        page, responses = browser.new_page(), []
        page.on("response", lambda response, responses=responses: responses.append(response))
        page.goto(served + ending, wait_until="networkidle")
        files = [each for each in responses if re.search(r"\.(m?js|wasm|zip|whl)$", each.url.partition("?")[0])]
        loaded = sum(len(each.body()) for each in files)
        page.close()
        assert 0 < loaded <= MOST_SCRIPT_BYTES
        assert [each.url for each in responses if "playground" in each.url] == []


@pytest.mark.usefixtures("python_here")
def test_what_a_reader_changes_is_run_by_the_package(shown):
    """After a drag by keys, the page shows the runs of the package for the new arrival under every policy."""
    page = shown()
    flag = page.get_by_role("slider", name="Arrival of C")
    assert flag.get_attribute("aria-valuenow") == "0.2"
    flag.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert flag.get_attribute("aria-valuenow") == "0.3"
    assert "15 MB" in page.locator(".status").inner_text()
    current(page)
    scenario = json.loads(re.search(r'"scenario":(\{.*\}),"runs"', WIDGET._data())[1])
    scenario["requests"][2]["arrives_s"] = 0.3
    runs = json.loads(batches.runs(json.dumps(scenario)))
    for policy, name in POLICY_NAMES.items():
        page.get_by_role("radio", name=name, exact=True).check()
        assert (told(page), bars(page)) == expected(runs[policy])
    assert runs != at_start()
    box = flag.bounding_box()
    page.mouse.move(box["x"] + 14, box["y"] + 14)
    page.mouse.down()
    page.mouse.move(box["x"] + 114, box["y"] + 14)
    page.mouse.up()
    assert float(flag.get_attribute("aria-valuenow")) > 0.34
    current(page)


@pytest.mark.usefixtures("python_here")
def test_memory_that_runs_out_shows_preemptions(shown):
    """An example with a small cache marks the requests that lost their blocks."""
    page = shown()
    page.get_by_label("Example").select_option("Memory runs out")
    current(page)
    assert page.locator("svg .preempted").count() > 0
    page.get_by_role("button", name="Start again").click()
    current(page)
    assert (told(page), bars(page)) == expected(at_start()["vllm"])


@pytest.mark.usefixtures("python_here")
def test_an_address_brings_back_what_was_set(shown):
    """An address has policy and requests; a page opened with it runs them when asked; a wrong one does nothing."""
    start = told(shown())
    assert told(shown("#drag=nobody;1;2;3")) == start
    page = shown()
    page.get_by_role("radio", name="Orca").check()
    page.get_by_role("button", name="Remove the last").click()
    current(page)
    page.wait_for_function("location.hash.startsWith('#drag=orca')")
    rows, ending = told(page), page.evaluate("location.hash")
    page = shown(ending)
    assert told(page) == ["A: not run yet", "B: not run yet"]
    page.get_by_role("button", name="Run", exact=True).click()
    current(page)
    assert told(page) == rows
    assert page.get_by_role("radio", name="Orca").is_checked()
    assert not page.get_by_role("button", name="Run", exact=True).is_visible()


def test_a_page_without_python_says_so_and_keeps_its_start(browser, folder):
    """A page from a disk says what to do after a change, and goes back to the first picture."""
    page = browser.new_page()
    page.goto((folder / "page.html").as_uri())
    before = told(page)
    page.get_by_role("button", name="Remove the last").click()
    assert "make serve-book" in page.locator(".status").inner_text()
    assert told(page) == ["A: not run yet", "B: not run yet"]
    page.get_by_role("button", name="Start again").click()
    assert told(page) == before
    page.close()


def test_a_book_built_without_a_network_says_so(page, served, folder):
    """Where Pyodide was not fetched, the first change is answered with one sentence."""
    manifest = folder / "_static" / "playground" / "manifest.json"
    kept = manifest.read_text()
    manifest.write_text('{"wheels": [], "traces": {}}')
    page.goto("about:blank")
    page.goto(served)
    page.get_by_role("button", name="Remove the last").click()
    page.wait_for_function("() => document.querySelector('.status').textContent.includes('without a network')")
    manifest.write_text(kept)
