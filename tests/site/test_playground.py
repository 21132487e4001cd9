"""The playground in a browser: it computes what Python computes here, and says what went wrong."""

import json

import pytest
from axe import ALL_BUT_CONTRAST, grave_faults, response

from mooncake_lab.playground.simulator import Simulator

pytestmark = pytest.mark.site

PAGE = "playground.html"
STATUS = ".playground-status"
LOADS_MS = 120_000


@pytest.fixture(scope="module")
def simulator(site):
    """The simulator of this process, over the files of the page."""
    folder = site / "_static" / "playground"
    made = Simulator((folder / "nodes.json").read_text(encoding="utf-8"))
    made.read("toolagent", str(folder / "toolagent.jsonl"))
    return made


@pytest.fixture(scope="module")
def playground(visit_to):
    """The page, with the simulator loaded by a first run."""
    opened = visit_to(PAGE)
    opened.page.select_option("[name=trace]", "toolagent")
    opened.page.fill("[name=requests]", "200")
    run(opened.page)
    yield opened
    opened.close()


def run(page, button="button[type=submit]"):
    """Press a button and wait for the end; what the page says then."""
    page.click(button)
    page.wait_for_function(
        "() => !document.getElementById('playground').hasAttribute('data-busy')", timeout=LOADS_MS
    )
    return page.inner_text(STATUS)


def rows(page):
    """The numbers of the table."""
    return page.eval_on_selector_all(
        ".playground-table tbody tr:first-child",
        "rows => rows.map(row => [...row.cells].slice(1).map(c => c.textContent))",
    )


def expected(simulator, **settings):
    """The row that a run should have."""
    told = {"node": "a800-node", "requests": 200, "prefill": 4, "decode": 4} | settings
    numbers = json.loads(simulator.run("toolagent", json.dumps(told)))["numbers"]
    return [
        f"{100 * numbers['effective_request_capacity']:.1f}", f"{numbers['ttft_p90_s']:.2f}",
        f"{numbers['tbt_p90_s']:.3f}", f"{100 * numbers['token_hit_rate']:.1f}", str(numbers["rejected"]),
    ]  # fmt: skip


def test_a_run_has_the_numbers_of_python_here(playground, simulator):
    """The first run, and one of a coupled system."""
    page = playground.page
    assert rows(page)[0] == expected(simulator)
    page.select_option("[name=system]", "vllm_prefix")
    page.fill("[name=speed]", "3")
    said = run(page)
    row = expected(simulator, system="vllm_prefix", speed=3)
    assert rows(page)[-1] == row
    assert f"{row[0]} % of 200 requests" in said
    assert not page.locator("[name=decode]").is_visible()
    page.select_option("[name=system]", "mooncake")
    page.fill("[name=speed]", "1")
    assert playground.faults == []


def test_every_split_is_tried(playground, simulator):
    """All splits of four nodes, and the best is named."""
    page = playground.page
    page.click("[name=clear]")
    for name in ("prefill", "decode"):
        page.fill(f"[name={name}]", "2")
    said = run(page, "[name=splits]")
    splits = [expected(simulator, prefill=count, decode=4 - count) for count in (1, 2, 3)]
    assert rows(page) == splits
    best = max(range(3), key=lambda i: (float(splits[i][0]), -float(splits[i][1])))
    assert said.startswith(
        f"Best of 3 splits of 4 nodes: {best + 1} prefill and {3 - best} decode (run {best + 1});"
    )
    assert page.locator(".playground-figure polyline").count() == 3
    assert grave_faults(response(page, ALL_BUT_CONTRAST)["violations"]) == []


def test_a_file_of_the_reader_is_simulated(playground, simulator, site, tmp_path):
    """The same requests from a file give the same row; a broken file is refused with its line."""
    page = playground.page
    page.click("[name=clear]")
    page.select_option("[name=trace]", "own")
    assert run(page) == "This run failed: choose a file first"
    page.set_input_files("[name=file]", site / "_static" / "playground" / "toolagent.jsonl")
    run(page)
    assert rows(page) == [expected(simulator, prefill=2, decode=2)]
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"timestamp": 0, "input_length": 3, "output_length": 0, "hash_ids": [1]}\n')
    page.set_input_files("[name=file]", broken)
    assert "field 'output_length' is 0" in run(page)
    page.select_option("[name=trace]", "toolagent")
    assert playground.faults == []


def test_a_long_run_can_be_stopped(playground):
    """The page answers meanwhile, and simulates again afterwards."""
    page = playground.page
    page.click("[name=clear]")
    page.fill("[name=requests]", "3000")
    page.click("[name=splits]")
    page.wait_for_function(
        "() => document.querySelector('.playground-status').textContent.includes('have ended')", timeout=LOADS_MS
    )
    page.click("[name=stop]")
    page.wait_for_function("() => document.querySelector('.playground-status').textContent === 'Stopped.'")
    page.fill("[name=requests]", "50")
    assert "of 50 requests" in run(page)


def test_a_page_from_the_disk_says_what_to_do(site, browser):
    """Browsers keep workers and WebAssembly from a page without a server."""
    page = browser.new_page()
    page.goto((site / PAGE).as_uri())
    page.click("button[type=submit]")
    assert "make serve-book" in page.inner_text(STATUS)
    page.close()
