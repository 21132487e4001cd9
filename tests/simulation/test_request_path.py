"""The path of one request: what `benchmarks/request_path.py` counts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "request_path.py"


@pytest.fixture(scope="module")
def paths():
    """The paths of a request of 600 tokens, as the script prints them."""
    command = [sys.executable, SCRIPT, "--json", "--prompt", "600", "--answer", "3"]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def test_no_function_on_the_path_is_long(paths):
    """Each function that a request calls fits on a screen or two: 60 lines with its docstring."""
    for path in paths.values():
        assert {name: lines for name, lines in path["functions"].items() if lines > 60} == {}


def test_the_path_leads_through_the_shared_lifecycle(paths):
    """A request of a disaggregated cluster is decided on and followed by code that the live cluster runs."""
    found = paths["disaggregated"]["functions"]
    for name in (
        "cluster/coordinator.py:Coordinator.on",
        "conductor/decide.py:decide",
        "conductor/placement.py:KVCacheCentric.place",
        "cluster/workers.py:WorkerState.prefill_view",
    ):
        assert name in found
    assert not any("<lambda>" in name or "<genexpr>" in name for name in found)


def test_counts_are_those_of_the_names(paths):
    """Each file and class of the path has a function on it, and what is on either path is on one of them."""
    for path in paths.values():
        assert {name.partition(":")[0] for name in path["functions"]} == set(path["files"])
        assert {name.rpartition(".")[0] for name in path["functions"]} >= set(path["classes"])
    either = set(paths["disaggregated"]["functions"]) | set(paths["coupled"]["functions"])
    assert set(paths["either"]["functions"]) == either


def test_the_record_is_of_this_code(paths):
    """What the page calls *now* is what a run counts; after a change of the path, record it anew."""
    record = json.loads((SCRIPT.parents[1] / "data/measured/request_path.json").read_text("utf-8"))["now"]
    for cluster, path in paths.items():
        counted = {kind: len(path[kind]) for kind in ("functions", "classes", "files")}
        assert {kind: record[cluster][kind] for kind in counted} == counted


def test_the_page_shows_both_runtimes_as_they_were_counted():
    """Each row of the page's table is the record's; what is on both paths is on each; packages add up."""
    root = SCRIPT.parents[1]
    both = json.loads((root / "data/measured/request_path.json").read_text("utf-8"))["both"]
    sides = [both[cluster] for cluster in ("disaggregated", "coupled")]
    none = {"simulated": 0, "live": 0, "both": 0}
    page = (root / "book/design.md").read_text("utf-8").partition("### One request, two runtimes")[2]
    rows = re.findall(r"^\| `?(\w+)`? \| ((?:\d+ \| ){5}\d+) \|$", page, re.MULTILINE)
    assert {name for name, _ in rows} == {name for side in sides for name in side}
    for name, numbers in rows:
        counted = [side.get(name, none)[way] for side in sides for way in none]
        assert [int(number) for number in numbers.split(" | ")] == counted
    for side in sides:
        packages = [side[name] for name in side if name != "all"]
        assert {way: sum(row[way] for row in packages) for way in none} == side["all"]
        assert all(row["both"] <= min(row["simulated"], row["live"]) for row in packages)
