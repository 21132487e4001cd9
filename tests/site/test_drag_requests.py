"""Requests to drag: the policies in the browser are those of the package."""

import json
import random
import re
from dataclasses import replace

import pytest

from mooncake_lab.batching import Limits
from mooncake_lab.book.figures.drag_requests import POLICY_NAMES, DraggedRequest, DragRequests
from mooncake_lab.book.figures.embed import STATIC
from mooncake_lab.perf import HybridLatency

pytestmark = pytest.mark.site

LATENCY = HybridLatency(
    floor_s=0.025,
    per_token_s=1.1e-4,
    per_token_squared_s=7.4e-10,
    per_request_s=2.1e-4,
    per_context_token_s=3.5e-8,
    constant_s=0.001,
    host_s=1e-4,
    host_free=2.0,
    tile_tokens=16,
)
RUNS = """cases => cases.map(c => [c.policy, c.requests, c.limits, c.latency, c.chunk]).map(
arguments => MooncakeBatching.replay(...arguments).map(step => ({
  start: step.startS, end: step.endS, waiting: step.waiting, running: step.running, finished: step.finished,
  preempted: step.preempted, rejected: step.rejected,
  segments: step.segments.map(s => [s.id, s.kind, s.tokens, s.cached, s.emits]),
})))"""


def widget(**changes):
    """Two short requests and a long one."""
    requests = (DraggedRequest(0.0, 400, 8), DraggedRequest(0.1, 304, 6), DraggedRequest(0.2, 3008, 4))
    limits = limits_of(2000)
    start = DragRequests(name="drag", requests=requests, limits=limits, latency=LATENCY, machine="a node")
    return replace(start, **changes)


def limits_of(blocks, batch_tokens=8192, most=8):
    """Limits of an instance with that many blocks of 16 tokens."""
    return Limits(
        max_batch_tokens=batch_tokens,
        max_requests=most,
        block_size_tokens=16,
        capacity_blocks=blocks,
        free_blocks=blocks,
    )


def random_widget(rng):
    """Requests and limits with and without queues, refusals, preemptions, and ties of arrival."""
    count = rng.randint(1, 7)
    arrivals = sorted(rng.choice((0.0, 0.3, round(rng.random() * 2, 3))) for _ in range(count))
    longest = rng.choice((90, 90, 1500))
    sizes = [(rng.randint(1, longest), rng.randint(1, 40)) for _ in range(count)]
    return widget(
        requests=tuple(DraggedRequest(at, *size) for at, size in zip(arrivals, sizes, strict=True)),
        limits=limits_of(rng.choice((10, 14, 20, 100)), rng.choice((64, 1024)), rng.randint(2, 8)),
        chunk_tokens=rng.choice((8, 48, 512)),
        max_new_tokens=rng.choice((40, 80)),
    )


def by_python(drawn, policy):
    """What the package says, as the page says it."""
    return [
        {
            "start": pytest.approx(timed.start_s, abs=1e-9),
            "end": pytest.approx(timed.end_s, abs=1e-9),
            "waiting": [request.request_id for request in timed.waiting],
            "running": [request.request_id for request in timed.running],
            "finished": [*timed.finished],
            "preempted": [*timed.plan.preempted],
            "rejected": [refusal.request_id for refusal in timed.plan.rejected],
            "segments": [
                [s.request_id, s.kind, s.new_tokens, s.cached_tokens, s.emits] for s in timed.plan.segments
            ],
        }
        for timed in drawn.run(policy)
    ]


def case_of(drawn, policy):
    """The arguments of the page's own replay."""
    data = data_of(drawn)
    requests = [{"id": i, "maxNewTokens": data["maxNewTokens"], **r} for i, r in enumerate(data["requests"])]
    return {
        "policy": policy,
        "requests": requests,
        **{name: data[name] for name in ("limits", "latency", "chunk")},
    }


def data_of(drawn):
    """What the page's scripts read."""
    return json.loads(
        re.search(r'<script type="application/json">(.*?)</script>', drawn._repr_html_(), re.DOTALL)[1]
    )


@pytest.fixture
def shown(page, tmp_path):
    """A function that opens the widget in the page, at an address with this ending."""

    def opened(ending=""):
        path = tmp_path / "page.html"
        path.write_text(f"<!doctype html><title>t</title>{widget()._repr_html_()}", encoding="utf-8")
        page.goto("about:blank")
        page.goto(path.as_uri() + ending)
        return page

    return opened


def told(page):
    """What each lane of the chart says."""
    return page.locator("svg .said").all_text_contents()


@pytest.fixture(scope="module")
def page(browser):
    """An empty page in Chromium."""
    opened = browser.new_page()
    yield opened
    opened.close()


def test_the_browser_steps_the_policies_as_the_package_does(page):
    """Every iteration of random requests is the same: times, queues, tokens, preemptions, refusals."""
    rng = random.Random(7)
    pairs = [(random_widget(rng), policy) for _ in range(30) for policy in POLICY_NAMES]
    page.set_content("<!doctype html><title>t</title>")
    page.add_script_tag(path=STATIC / "batching.js")
    seen = page.evaluate(RUNS, [case_of(*pair) for pair in pairs])
    expected = [by_python(*pair) for pair in pairs]
    steps = [step for log in expected for step in log]
    assert sum(bool(step["preempted"]) for step in steps) > 20
    assert sum(bool(step["rejected"]) for step in steps) > 20
    for (drawn, policy), ours, theirs in zip(pairs, expected, seen, strict=True):
        assert theirs == ours, (policy, drawn.requests, drawn.limits)


def test_the_start_is_there_without_scripts():
    """The first run is in the page in letters, one line a request."""
    shown = re.search(r"<noscript>.*<pre>(.*?)</pre>", widget()._repr_html_(), re.DOTALL)[1]
    lines = shown.splitlines()
    assert [line[0] for line in lines] == ["A", "B", "C"]
    assert lines[0][3:].startswith("P")
    assert [line.count("d") for line in lines] == [7, 5, 3]


def test_a_request_is_dragged_by_keys_and_by_pointer(shown):
    """Both move the arrival of a request, and what clients see follows at once."""
    page = shown()
    flag = page.get_by_role("slider", name="Arrival of C")
    assert flag.get_attribute("aria-valuenow") == "0.2"
    before = told(page)
    flag.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert flag.get_attribute("aria-valuenow") == "0.3"
    assert told(page) != before
    box = flag.bounding_box()
    page.mouse.move(box["x"] + 14, box["y"] + 14)
    page.mouse.down()
    page.mouse.move(box["x"] + 114, box["y"] + 14)
    page.mouse.up()
    assert float(flag.get_attribute("aria-valuenow")) > 0.34


def test_every_policy_can_be_chosen_and_is_listed(shown):
    """The table has the numbers of all policies, and the chart those of the chosen one."""
    page = shown()
    rows = page.locator(".policies tbody tr")
    assert rows.count() == len(POLICY_NAMES)
    lanes = set()
    for name in POLICY_NAMES.values():
        page.get_by_role("radio", name=name, exact=True).check()
        lanes.add(tuple(told(page)))
    assert len(lanes) >= 4
    assert all("ms" in text for text in rows.all_inner_texts())


def test_an_address_brings_back_what_was_set(shown):
    """Policy and requests are in the address, and a page opened with it shows them; a wrong one does nothing."""
    start = told(shown())
    assert told(shown("#drag=nobody;1;2;3")) == start
    page = shown()
    page.get_by_role("radio", name="Orca").check()
    page.get_by_role("button", name="Remove the last").click()
    page.wait_for_function("location.hash.startsWith('#drag=orca')")
    lanes, ending = told(page), page.evaluate("location.hash")
    page = shown(ending)
    assert told(page) == lanes
    assert page.get_by_role("radio", name="Orca").is_checked()
