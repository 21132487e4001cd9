"""The path of one request as `book/design.md` tells it: places exist, lie on the path, and come in its order."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest
from request_path import path_of, simulated_paths

from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.cluster import ClusterSpec, events
from mooncake_lab.conductor import PLACEMENT_POLICIES
from mooncake_lab.core import DecodeStretch, Placed, Request, TracedRequest
from mooncake_lab.simulation import Cluster, Failure, SimulationOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "book/design.md").read_text(encoding="utf-8")
RECORD = json.loads((ROOT / "data/measured/request_path.json").read_text(encoding="utf-8"))
DRAWING = (ROOT / "book/_static/request-path.svg").read_text(encoding="utf-8")
PLACE = re.compile(r"`([\w/]+\.py):([\w.]+)`")
SIDES = ("both", "simulated", "live")


def section(title):
    """The text below a heading, up to the next heading."""
    (found,) = re.findall(rf"^##+ {re.escape(title)}\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    return found


def places(text):
    """Every `file:function` in a text, in order."""
    return [f"{file}:{name}" for file, name in PLACE.findall(text)]


def sides(text):
    """The places of each side in a list of them: both, simulated and live."""
    lists = re.findall(r"^ *\* (both|simulated|live): ((?:(?!^ *[*\d\n]).*\n)+)", text, re.MULTILINE)
    assert len({side for side, _ in lists}) == len(lists)
    return {side: places(listed) for side, listed in lists}


def steps(title):
    """The steps below a heading: the number, the title, and the places of each side."""
    text = re.split(r"\n\n(?=\S)(?!\d)", section(title)[section(title).index("\n1. ") :])[0]
    found = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", text + "\n", re.MULTILINE | re.DOTALL)
    return [(int(number), re.search(r"(?:\*\*)?([^.*]+)", body)[1], sides(body)) for number, body in found]


PATH = "The path of one request, in twelve steps"
STEPS = steps(PATH)
COUPLED = sides(section(PATH)[section(PATH).index("In a coupled cluster") :])
DEATH = steps("What happens when a decode worker dies?")


@cache
def simulated(cluster):
    """The functions that a request calls in a simulated cluster."""
    return list(simulated_paths(prompt_tokens=600, answer_tokens=3)[cluster].functions)


@cache
def defined():
    """Every function, method and class of the package, as `file:qualified name`, with its node."""
    found = {}

    def visit(node, file, owner):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{owner}{child.name}"
                found[f"{file}:{name}"] = child
                if isinstance(child, ast.ClassDef):
                    visit(child, file, f"{name}.")

    for path in (ROOT / "mooncake_lab").rglob("*.py"):
        visit(ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT / "mooncake_lab").as_posix(), "")
    return found


def test_the_path_has_twelve_steps_with_places_in_both_runtimes():
    """Each step has a number and a title, and says where it is in the simulator and in the live cluster."""
    assert [number for number, *_ in STEPS] == list(range(1, 13))
    assert all(title for _, title, _ in STEPS)
    for _, title, found in STEPS:
        assert found.keys() <= set(SIDES)
        assert "both" in found or {"simulated", "live"} <= found.keys(), title
    listed = [
        place for found in (*(found for *_, found in STEPS), COUPLED) for each in found.values() for place in each
    ]
    assert sorted(listed) == sorted(places(section(PATH)))


def test_every_place_on_the_page_exists():
    """Each `file:function` of the page, on and off the path, is defined there."""
    named = places(PAGE)
    assert len(named) > 60
    assert [place for place in named if place not in defined()] == []


@pytest.mark.parametrize("step", STEPS, ids=lambda step: str(step[0]))
def test_a_step_lies_on_the_path(step):
    """A request calls its functions: in the simulator now, and in the live cluster in the record."""
    _, _, found = step
    on_live = RECORD["disaggregated"]["live"]
    both = found.get("both", [])
    assert {*both, *found.get("simulated", [])} - {*simulated("disaggregated")} == set()
    assert {*both, *found.get("live", [])} - {*on_live} == set()


@pytest.mark.parametrize("runtime", ["simulated", "live"])
def test_steps_are_in_the_order_in_which_a_request_meets_them(runtime):
    """The first place of each step is called for the first time after that of the step before."""
    path = simulated("disaggregated") if runtime == "simulated" else RECORD["disaggregated"]["live"]
    first = [(found.get(runtime) or found["both"])[0] for _, _, found in STEPS]
    assert sorted(first, key=path.index) == first


def test_a_coupled_request_calls_what_the_page_says():
    """The places of the coupled cluster lie on its two paths."""
    assert set(SIDES) == COUPLED.keys()
    assert {*COUPLED["both"], *COUPLED["simulated"]} <= set(simulated("coupled"))
    assert {*COUPLED["both"], *COUPLED["live"]} <= set(RECORD["coupled"]["live"])


def test_no_function_on_the_path_is_long():
    """Each function that a request calls fits on a screen or two: 60 lines with its docstring."""
    for path in simulated_paths(prompt_tokens=600, answer_tokens=3).values():
        assert {name: lines for name, lines in path.functions.items() if lines > 60} == {}


def test_a_path_is_of_named_functions_with_their_classes_and_files():
    """Lambdas and comprehensions are not on it; its counts are those of its names."""
    for path in simulated_paths(prompt_tokens=600, answer_tokens=3).values():
        assert path.functions.keys() <= defined().keys()
        assert path.classes <= defined().keys()
        assert path.counts["functions"] == len(path.functions) > path.counts["files"] == len(path.files) > 10
        assert path.counts["functions"] <= path.counts["changes_of_file"] + len(path.functions)


def test_a_dead_decode_instance_costs_what_the_page_says():
    """A simulated decode instance that fails while it decodes leads through each place that the page names."""
    request = Request(id=0, arrival_s=0.0, input_tokens=600, block_keys=(1, 2))
    failing = SimulationOptions(failures=(Failure("decode-0", 2.0),))
    spec = ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=2)
    cluster = Cluster(spec, paper_node_latency(), failing)
    path = path_of(lambda: cluster.run([TracedRequest(request, 400)])).functions
    assert sum(isinstance(record, Placed) for record in cluster.log) == 2
    named = [place for *_, found in DEATH for side in ("both", "simulated") for place in found.get(side, ())]
    assert len(named) >= 5
    assert [place for place in named if place not in path] == []


def rejecting():
    """The functions of `cluster` and `conductor` that reject: they make a `Rejection`, or call `_reject`."""
    for place, node in defined().items():
        if place.startswith(("cluster/", "conductor/")) and not isinstance(node, ast.ClassDef):
            called = {ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
            if any(name == "Rejection" or name.endswith("._reject") for name in called):
                yield place


def test_the_page_names_every_place_where_a_request_is_rejected():
    """Its table has each function that rejects, and no other, and each stage of the log."""
    text = section("Where is a request rejected?")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)[2:]
    named = [place for _, where in rows for place in places(where) if not place.startswith("serving/")]
    assert sorted(named) == sorted(rejecting())
    stages = {stage for first, _ in rows for stage in re.findall(r"`(\w+)`", first)}
    log = (ROOT / "mooncake_lab/core/log.py").read_text(encoding="utf-8")
    (listed,) = re.findall(r'^class Rejected\(.*?^    stage: str\n    """(.*?)"""', log, re.MULTILINE | re.DOTALL)
    assert stages == set(re.findall(r"`(\w+)`", listed))


def test_policies_to_copy_are_those_of_the_registries():
    """Each class that the page proposes to begin with is there, and the placement policy has a name of its own."""
    named = places(section("Which file do I copy to write a policy?"))
    assert len(named) == 4
    assert named[0].rpartition(":")[2] in {getattr(make, "__name__", "") for make in PLACEMENT_POLICIES.values()}


def test_the_drawing_has_the_steps_and_names_of_the_page():
    """It shows steps 1 to 12, classes of the path, and events and commands of a cluster."""
    numbers = [int(number) for number in re.findall(r'<tspan class="bold">(\d+)</tspan>', DRAWING)]
    assert set(numbers) == {number for number, *_ in STEPS}
    assert numbers[-1] == 12
    owners = {
        place.partition(":")[2].partition(".")[0]
        for _, _, found in STEPS
        for each in found.values()
        for place in each
    }
    drawn = set(re.findall(r'class="place"[^>]*>(\w+)<', DRAWING))
    assert len(drawn) == 9
    assert drawn <= owners
    said = [
        word for line in re.findall(r'class="event middle"[^>]*>([^<]+)<', DRAWING) for word in line.split(" · ")
    ]
    assert said
    assert all(word == DecodeStretch.__name__ or hasattr(events, word) for word in said)
