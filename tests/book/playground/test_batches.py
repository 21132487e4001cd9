"""The widget of dragged requests shows what the package's batching policies do, and has none of their rules."""

import itertools
import json
import random
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from mooncake_lab.batching import CHUNKED_POLICIES, Limits, Progress, named_policy, trace_plans
from mooncake_lab.book.figures.embed import STATIC
from mooncake_lab.book.playground import batches
from mooncake_lab.book.playground.assets import package_zip
from mooncake_lab.book.playground.batches import POLICY_NAMES, DraggedRequest
from mooncake_lab.book.playground.drag_requests import DragRequests
from mooncake_lab.perf import HybridLatency

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(
    path
    for folder in (STATIC, ROOT / "book" / "_static")
    for path in folder.iterdir()
    if path.suffix in {".js", ".mjs"}
)
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
    """Requests and limits with and without queues, refusals, preemptions, and ties of arrival, in any order."""
    arrivals = [rng.choice((0.0, 0.3, round(rng.random() * 2, 3))) for _ in range(rng.randint(1, 7))]
    longest = rng.choice((90, 90, 1500))
    return widget(
        requests=tuple(DraggedRequest(at, rng.randint(1, longest), rng.randint(1, 40)) for at in arrivals),
        limits=limits_of(rng.choice((10, 14, 20, 100)), rng.choice((64, 1024)), rng.randint(2, 8)),
        chunk_tokens=rng.choice((8, 48, 512)),
        max_new_tokens=rng.choice((40, 80)),
    )


def data_of(drawn):
    """What the page's script reads."""
    page = drawn._repr_html_()
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def log_of(drawn, policy):
    """The iterations of the package, with requests in the order of arrival."""
    order = sorted(range(len(drawn.requests)), key=lambda i: (drawn.requests[i].arrives_s, i))
    return trace_plans(
        named_policy(policy, chunk_tokens=drawn.chunk_tokens if policy in CHUNKED_POLICIES else None),
        [
            Progress(
                request_id=i,
                arrival=rank,
                prompt_tokens=drawn.requests[i].prompt_tokens,
                max_new_tokens=drawn.max_new_tokens,
            )
            for rank, i in enumerate(order)
        ],
        drawn.limits,
        {i: each.output_tokens for i, each in enumerate(drawn.requests)},
        arrives_s={i: each.arrives_s for i, each in enumerate(drawn.requests)},
        seconds=lambda plan: drawn.latency.batch_s(*plan.work),
    )


@pytest.fixture(scope="module")
def cases():
    """Random widgets under every policy: the widget, the package's iterations, and what the page holds."""
    rng = random.Random(7)
    drawn = [random_widget(rng) for _ in range(30)]
    return [
        (each, log_of(each, policy), data["runs"][policy])
        for each in drawn
        for data in [data_of(each)]
        for policy in POLICY_NAMES
    ]


def test_the_first_picture_holds_each_iteration_of_the_package(cases):
    """Each piece of a prompt and each decode of a run stands in the page with its times, and no others do."""
    for drawn, log, shown in cases:
        for i in range(len(drawn.requests)):
            expected = [
                [segment.kind, step.start_s, step.end_s]
                for step in log
                for segment in step.plan.segments
                if segment.request_id == i
            ]
            computed = [bar for bar in shown["rows"][i]["bars"] if bar[0] in {"prefill", "decode"}]
            assert computed == expected
        assert shown["until_s"] == log[-1].end_s


def test_the_bars_of_a_request_have_no_holes(cases):
    """From arrival to last token, a request is computed, waits or stalls, one of them at a time."""
    for drawn, _, shown in cases:
        for request, row in zip(drawn.requests, shown["rows"], strict=True):
            at_s = request.arrives_s
            for _, start_s, end_s in row["bars"]:
                assert start_s == pytest.approx(at_s, abs=1e-12)
                assert end_s > start_s
                at_s = end_s
            assert row["end_s"] is None or at_s == row["end_s"]


def test_a_request_that_holds_blocks_and_is_not_computed_stalls(cases):
    """Bars of waiting are those of requests without blocks, preempted ones among them."""
    kinds = set()
    for _, log, shown in cases:
        for step in log:
            busy = {segment.request_id for segment in step.plan.segments}
            for request in step.running:
                if request.request_id in busy or step.start_s == step.end_s:
                    continue
                preempted = request.request_id in step.plan.preempted
                kind = "waiting" if preempted else "stalled"
                kinds.add(kind)
                row = shown["rows"][request.request_id]
                assert any(
                    bar[0] == kind and bar[1] <= step.start_s and step.end_s <= bar[2] for bar in row["bars"]
                )
                assert (step.start_s in row["preempted_s"]) == preempted
    assert kinds == {"waiting", "stalled"}


def test_a_client_measures_the_ends_of_the_iterations_that_emit(cases):
    """TTFT, gaps and the last token follow from when tokens are emitted; a refused request has none of them."""
    refused = 0
    for drawn, log, shown in cases:
        firsts = []
        for i, (request, row) in enumerate(zip(drawn.requests, shown["rows"], strict=True)):
            tokens_s = [
                step.end_s
                for step in log
                for segment in step.plan.segments
                if segment.emits and segment.request_id == i
            ]
            if not tokens_s:
                refused += 1
                assert row["ttft_s"] is row["mean_tbt_s"] is row["longest_tbt_s"] is row["end_s"] is None
                continue
            gaps_s = [after - before for before, after in itertools.pairwise(tokens_s)]
            firsts.append(tokens_s[0] - request.arrives_s)
            assert row["ttft_s"] == firsts[-1]
            assert row["end_s"] == tokens_s[-1]
            assert row["longest_tbt_s"] == max(gaps_s, default=None)
            if gaps_s:
                assert row["mean_tbt_s"] == pytest.approx((tokens_s[-1] - tokens_s[0]) / len(gaps_s))
        for name in ("longest_tbt_s", "end_s"):
            numbers = [row[name] for row in shown["rows"] if row[name] is not None]
            assert shown[name] == max(numbers, default=None)
        assert shown["mean_ttft_s"] == (pytest.approx(sum(firsts) / len(firsts)) if firsts else None)
    assert refused > 20


def test_the_browser_asks_for_what_the_first_picture_holds():
    """The function that the browser calls gives the runs of the page back for the page's own scenario."""
    data = data_of(widget())
    assert json.loads(batches.runs(json.dumps(data["scenario"]))) == data["runs"]
    assert set(data["runs"]) == set(POLICY_NAMES)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunk_tokens": 0}, "`int` >= 1 - at `$.chunk_tokens`"),
        ({"requests": [[0, 1, 1]]}, "`object`, got `array` - at `$.requests[0]`"),
        ({"request": []}, "unknown field `request`"),
    ],
)
def test_a_scenario_that_is_not_allowed_is_refused(change, said):
    """The message names the field and what is allowed."""
    scenario = data_of(widget())["scenario"] | change
    with pytest.raises(msgspec.ValidationError, match=re.escape(said)):
        batches.runs(json.dumps(scenario))


def test_the_start_is_there_without_scripts():
    """The first run is in the page in letters, one line a request."""
    shown = re.search(r"<noscript>.*<pre>(.*?)</pre>", widget()._repr_html_(), re.DOTALL)[1]
    lines = shown.splitlines()
    assert [line[0] for line in lines] == ["A", "B", "C"]
    assert lines[0][3:].startswith("P")
    assert [line.count("d") for line in lines] == [7, 5, 3]


WITHOUT_NUMPY = """
import sys
for name in ("numpy", "pandas", "torch", "simpy", "matplotlib", "typing_extensions"):
    sys.modules[name] = None  # importing it fails
sys.path.insert(0, sys.argv[1])
from mooncake_lab.book.playground import batches
assert batches.__file__.startswith(sys.argv[1]), batches.__file__
print(batches.runs(sys.argv[2]))
"""


def test_the_packed_package_suffices(tmp_path):
    """The archive that the browser loads gives the same runs, without numpy and outside of the checkout."""
    (tmp_path / "package.zip").write_bytes(package_zip())
    with zipfile.ZipFile(tmp_path / "package.zip") as archive:
        archive.extractall(tmp_path / "package")
    data = data_of(widget())
    command = [sys.executable, "-c", WITHOUT_NUMPY, tmp_path / "package", json.dumps(data["scenario"])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env={})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == data["runs"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_script_of_the_book_knows_a_rule_of_a_policy(script):
    """Scripts name no batching policy and none of the words that a scheduler needs."""
    text = script.read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    assert words.isdisjoint({name for name in POLICY_NAMES if "_" in name} | {"orca", "sarathi"})
    scheduler = r"preempt\w*\(|admit|watermark|victim|held|per_token_s|max_batch_tokens|batchTokens"
    assert re.findall(scheduler, text, re.IGNORECASE) == []
