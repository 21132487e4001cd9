"""The playground in a browser: it computes what Python computes here, and says what went wrong."""

import json

import pytest
from axe import ALL_BUT_CONTRAST, grave_faults, response

from mooncake_lab.book.playground.simulator import Simulator

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
def playground(site, visit_to):
    """The page, with the simulator loaded by a first run."""
    if not (site / "_static" / "playground" / "pyodide.mjs").is_file():
        pytest.skip("the simulator of the playground is not here; `make playground` fetches it")
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
    assert rows(page)[-1] == expected(simulator)
    page.select_option("[name=system]", "vllm_prefix")
    page.fill("[name=speed]", "3")
    said = run(page)
    row = expected(simulator, system="vllm_prefix", speed=3, prefill=8)
    assert rows(page)[-1] == row
    assert f"{row[0]} % of 200 requests" in said
    assert not page.locator("[name=decode]").is_visible()
    page.select_option("[name=system]", "mooncake")
    page.fill("[name=speed]", "1")
    assert playground.faults == []


def nodes(page):
    """The numbers of nodes that the form would simulate."""
    return [
        page.input_value(f"[name={name}]") for name in ("prefill", "decode") if page.is_visible(f"[name={name}]")
    ]


def hardware(page):
    """What each row says of its GPUs."""
    return page.locator(".playground-table tbody strong").all_inner_texts()


@pytest.mark.parametrize(
    ("split", "then", "back"),
    [
        (("4", "4"), None, ["4", "4"]),
        (("7", "1"), None, ["7", "1"]),
        (("256", "256"), None, ["256", "256"]),
        (("3", "1"), "8", ["6", "2"]),
        (("5", "1"), "2", ["1", "1"]),
        (("256", "1"), "500", ["256", "244"]),
        (("2", "1"), "1", ["1", "1"]),
    ],
)
def test_another_system_keeps_the_nodes(open_page, split, then, back):
    """Coupled systems get the nodes of both pools, one after the other, and both pools share theirs."""
    page = open_page(PAGE).page
    for name, count in zip(("prefill", "decode"), split, strict=True):
        page.fill(f"[name={name}]", count)
    for system in ("vllm", "orca", "vllm"):
        page.select_option("[name=system]", system)
        assert nodes(page) == [str(sum(map(int, split)))]
        assert page.locator("[name=prefill]").evaluate("field => field.checkValidity()")
    if then:
        page.fill("[name=prefill]", then)
    page.select_option("[name=system]", "mooncake")
    assert nodes(page) == back
    said = page.inner_text(STATUS)
    assert ("need two nodes" in said) == (then == "1")


@pytest.mark.parametrize("wrong", ["", "0", "-3", "2.5", "999"])
def test_an_entry_that_cannot_be_simulated_changes_no_hardware(open_page, wrong):
    """The next system has the nodes of the last valid entry."""
    page = open_page(PAGE).page
    page.fill("[name=prefill]", "5")
    page.fill("[name=decode]", wrong)
    page.select_option("[name=system]", "vllm")
    assert nodes(page) == ["9"]
    page.fill("[name=prefill]", wrong)
    page.select_option("[name=system]", "mooncake")
    assert nodes(page) == ["5", "4"]


def test_results_stand_there_before_the_first_run(open_page, simulator, site):
    """They are what the simulator computes, on equal hardware, also where the page is opened from a disk."""
    simulator.read("conversation", str(site / "_static" / "playground" / "conversation.jsonl"))
    for address in (None, (site / PAGE).as_uri()):
        visit = open_page(PAGE)
        page = visit.page
        assert visit.faults == []
        if address:
            page.goto(address)
        assert hardware(page) == ["64 A800 GPUs"] * 3
        assert page.locator(".playground-figure polyline").count() == 3
        assert not page.locator(".playground-unequal").inner_text()
        told = page.evaluate("window.playgroundStored.map(run => run.settings)")
        computed = [json.loads(simulator.run("conversation", json.dumps(settings))) for settings in told]
        shown = [f"{100 * one['numbers']['effective_request_capacity']:.1f}" for one in computed]
        assert [row[0] for row in rows(page)] == shown
        assert "computed when this book was built" in page.inner_text(STATUS)


def test_unequal_hardware_is_said(playground):
    """Rows print their GPUs; another number or kind of them is said below the table until it is cleared."""
    page = playground.page
    page.click("[name=clear]")
    page.fill("[name=requests]", "20")
    run(page)
    page.select_option("[name=system]", "vllm")
    run(page)
    said = page.locator(".playground-unequal")
    assert hardware(page) == ["64 A800 GPUs"] * 2
    assert said.inner_text() == ""
    page.select_option("[name=node]", "h200-node")
    run(page)
    page.fill("[name=prefill]", "3")
    page.select_option("[name=node]", "a800-node")
    run(page)
    assert hardware(page)[2:] == ["64 H200 GPUs", "24 A800 GPUs"]
    assert said.inner_text() == (
        "These runs are not on equal hardware: runs 1 and 2 on 64 A800 GPUs; run 3 on 64 H200 GPUs;"
        " run 4 on 24 A800 GPUs."
    )
    page.click("[name=clear]")
    assert said.inner_text() == ""
    page.select_option("[name=system]", "mooncake")
    page.fill("[name=prefill]", "4")
    page.fill("[name=decode]", "4")
    page.fill("[name=requests]", "200")


def test_a_run_is_copied_as_a_command(playground, simulator):
    """The command of a row is on the clipboard, and stands below its row."""
    page = playground.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.fill("[name=speed]", "2")
    run(page)
    page.locator(".playground-table td button").last.click()
    page.wait_for_selector(".playground-command")
    told = {"node": "a800-node", "requests": 200, "prefill": 4, "decode": 4, "speed": 2}
    command = json.loads(simulator.run("toolagent", json.dumps(told)))["command"]
    assert page.inner_text(".playground-command") == page.evaluate("navigator.clipboard.readText()") == command
    page.fill("[name=speed]", "1")


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
    assert hardware(page) == ["32 A800 GPUs"] * 3
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
