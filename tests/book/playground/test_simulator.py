"""The playground computes what `mooncake-lab simulate` computes, without numpy, from the files of its page."""

import json
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from mooncake_lab.book.playground import assets
from mooncake_lab.book.playground.simulator import (
    ADMISSIONS,
    PLACEMENTS,
    SEPARATE,
    SYSTEMS,
    TWIN_REQUESTS,
    TWINS,
    Result,
    Simulator,
)
from mooncake_lab.cli import app
from mooncake_lab.perf import hardware
from mooncake_lab.workload import write_trace
from mooncake_lab.workload.twin import make_twin

ROOT = Path(__file__).parents[3]
FORM = (ROOT / "book" / "_static" / "playground.html").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def trace(tmp_path_factory):
    """The file of a small trace."""
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    write_trace(path, make_twin("conversation", seed=1, requests=120))
    return path


@pytest.fixture
def simulator(trace):
    """One that has read the trace."""
    made = Simulator(assets.nodes().decode())
    assert made.read("small", str(trace)) == 120
    return made


def run(simulator, **settings):
    """The result of a run of all requests."""
    told = json.dumps({"node": "a800-node", "requests": 120} | settings)
    return msgspec.json.decode(simulator.run("small", told), type=Result)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"prefill": 2, "decode": 1}, ["--prefill-nodes", "2", "--decode-nodes", "1"]),
        (
            {"prefill": 1, "decode": 2, "placement": "cache_aware", "admission": "early", "speed": 2,
             "ttft_slo_s": 5},
            ["--prefill-nodes", "1", "--decode-nodes", "2", "--placement", "cache_aware", "--admission", "early",
             "--speed", "2", "--ttft-slo", "5"],
        ),
        (
            {"prefill": 1, "decode": 1, "admission": "predictive", "placement": "random", "tbt_slo_s": 0.05},
            ["--prefill-nodes", "1", "--decode-nodes", "1", "--admission", "predictive", "--placement", "random",
             "--tbt-slo", "0.05"],
        ),
        (
            {"prefill": 3, "system": "vllm_prefix", "node": "h200-node"},
            ["--coupled-nodes", "3", "--batching", "vllm_prefix", "--node", "h200-node"],
        ),
    ],
)  # fmt: skip
def test_the_page_computes_what_the_command_computes(simulator, trace, settings, options):
    """The same trace, cluster and limits give the same numbers, to the last bit."""
    told = CliRunner().invoke(app, ["simulate", str(trace), *options, "--json"])
    assert told.exit_code == 0, told.output
    command, page = json.loads(told.stdout), run(simulator, **settings)
    assert page.numbers == {name: command[name] for name in page.numbers}
    assert page.ttft_s == sorted(page.ttft_s)
    assert len(page.ttft_s) + page.numbers["rejected"] >= 120
    assert page.ttft_s[len(page.ttft_s) // 2] == pytest.approx(page.numbers["ttft_p50_s"], rel=0.1)


@pytest.mark.parametrize(
    "settings",
    [
        *(msgspec.to_builtins(each) for each in assets.STORED),
        {"requests": 77, "prefill": 2, "decode": 5, "placement": "random", "admission": "predictive", "speed": 1.7,
         "ttft_slo_s": 2.5, "tbt_slo_s": 0.03, "node": "h200-node"},
        {"requests": 5000, "prefill": 3, "system": "sarathi_serve", "admission": "slo", "speed": 4e-5,
         "node": "h800-node"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["conversation", "-it's mine.jsonl"])
def test_the_command_of_a_run_computes_its_numbers(monkeypatch, tmp_path, settings, name):
    """The lines that the page copies, run in an empty folder, print the row's numbers; so does a reader's file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    twin = make_twin("conversation", seed=0, requests=TWIN_REQUESTS)
    path = tmp_path / "site" / "conversation.jsonl" if name in TWINS else tmp_path / name
    write_trace(path, twin if name in TWINS else twin.head(90))
    simulator = Simulator(assets.nodes().decode())
    simulator.read(name, str(path), None if name in TWINS else name)
    page = msgspec.json.decode(simulator.run(name, json.dumps({"node": "a800-node"} | settings)), type=Result)
    told = ""
    for line in page.command.splitlines():
        program, *options = shlex.split(line)
        assert program == "mooncake-lab"
        done = CliRunner().invoke(app, [*options, "--json"])
        assert done.exit_code == 0, done.output
        told = done.stdout
    command = json.loads(told)
    assert page.numbers == {number: command[number] for number in page.numbers}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_says_its_hardware(simulator, system):
    """The nodes of a run are all of its nodes, each with the GPUs of its data sheet."""
    for node in assets.NODES:
        made = run(simulator, system=system, prefill=3, decode=2, node=node, requests=5)
        assert made.nodes == (5 if system == SEPARATE else 3)
        assert made.gpus == made.nodes * hardware(node).devices


def test_the_stored_results_are_those_of_the_simulator(tmp_path):
    """What stands in the page before the first run is computed at build time, on equal hardware."""
    write_trace(tmp_path / "twin.jsonl", make_twin(TWINS[0], seed=0, requests=TWIN_REQUESTS))
    script = assets.stored(tmp_path / "twin.jsonl")
    assert script == assets.stored(tmp_path / "twin.jsonl")
    runs = json.loads(script.partition(b"playgroundStored = ")[2].removesuffix(b";\n"))
    simulator = Simulator(assets.nodes().decode())
    simulator.read(TWINS[0], str(tmp_path / "twin.jsonl"))
    for told in runs:
        assert told.pop("trace") == TWINS[0]
        assert json.loads(simulator.run(TWINS[0], json.dumps(told.pop("settings")))) == told
    assert len({(told["nodes"], told["gpus"]) for told in runs}) == 1


def test_the_form_begins_with_the_first_stored_run():
    """The fields that a reader finds are the settings of run 1."""
    shown = re.findall(r'type="number" required name="(\w+)" value="([^"]+)"', FORM)
    first = msgspec.to_builtins(assets.STORED[0])
    assert {name: float(value) for name, value in shown} == {name: first[name] for name, _ in shown}
    for name in ("system", "node", "placement", "admission"):
        options = FORM.partition(f'<select name="{name}">')[2].partition("</select>")[0]
        assert re.findall(r'value="([^"]+)"', options)[0] == first[name]


def test_a_trace_in_other_blocks(simulator, tmp_path):
    """The block size of a file that does not say it is given when it is read, as to the command."""
    path = tmp_path / "b16.jsonl"
    line = {"input_length": 1000, "output_length": 5, "hash_ids": list(range(63))}
    path.write_text("".join(json.dumps({"timestamp": 1000 * i, **line}) + "\n" for i in range(3)))
    with pytest.raises(ValueError, match=r"block size of 16 it would be right"):
        simulator.read("b16", str(path))
    assert simulator.read("b16", str(path), block_size_tokens=16) == 3
    told = json.dumps({"node": "a800-node", "requests": 3})
    found = msgspec.json.decode(simulator.run("b16", told), type=Result).numbers
    command = [
        "simulate",
        str(path),
        "--block-size",
        "16",
        "--prefill-nodes",
        "4",
        "--decode-nodes",
        "4",
        "--json",
    ]
    printed = json.loads(CliRunner().invoke(app, command).stdout)
    assert found == {name: printed[name] for name in found}
    assert found["token_hit_rate"] > 0.6
    told = msgspec.json.decode(simulator.run("b16", told), type=Result).command
    assert shlex.split(told)[-2:] == ["--block-size", "16"]


def test_what_no_request_decides_is_null(simulator, tmp_path):
    """Answers of one token leave the page without a TBT, which it shows as a dash."""
    path = tmp_path / "one.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}\n')
    simulator.read("one", str(path))
    result = json.loads(simulator.run("one", json.dumps({"node": "a800-node", "requests": 1})))
    assert (result["numbers"]["tbt_mean_s"], result["numbers"]["tbt_p90_s"]) == (None, None)
    script = (ROOT / "book" / "_static" / "playground.js").read_text(encoding="utf-8")
    assert re.search(r'percent = \(share\) => \(share === null \? "–"', script)


def test_a_trace_without_ids_has_no_hit_rate(simulator, tmp_path):
    """The page reads the formats of others, and gives no hit rate where the trace has no block ids."""
    path = tmp_path / "lengths.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-05-11 07:00:00,1800,60\n" * 3)
    assert simulator.read("lengths", str(path)) == 3
    numbers = json.loads(simulator.run("lengths", json.dumps({"node": "a800-node"})))["numbers"]
    assert (numbers["finished"], numbers["token_hit_rate"]) == (3, None)


def test_the_best_split_depends_on_the_limit(simulator, tmp_path):
    """What the page asks its readers to find: a tighter limit of TBT needs a second decode node."""
    write_trace(tmp_path / "hour.jsonl", make_twin("conversation", seed=0, requests=TWIN_REQUESTS))
    simulator.read("small", str(tmp_path / "hour.jsonl"))
    within = {
        (prefill, limit_s): run(
            simulator, requests=1000, prefill=prefill, decode=8 - prefill, tbt_slo_s=limit_s
        ).numbers["effective_request_capacity"]
        for prefill in (6, 7)
        for limit_s in (0.1, 0.05)
    }
    assert within[7, 0.1] == within[6, 0.1] == within[6, 0.05] == 1
    assert within[7, 0.05] < 0.5


def test_each_wheel_that_a_page_downloads_is_used(simulator):
    """A run calls functions of the modules in Python (simpy keeps its time) and of those that are compiled."""
    called = set()

    def note(frame, event, argument):
        named = [frame.f_globals.get("__name__")]
        if event == "c_call":
            named = [argument.__module__, type(argument.__self__).__module__]
        called.update(str(name).partition(".")[0] for name in named)

    sys.setprofile(note)
    try:
        run(simulator, placement="random")
    finally:
        sys.setprofile(None)
    assert {wheel.partition("==")[0].replace("-", "_") for wheel in assets.WHEELS} <= called


def test_progress_is_told(simulator):
    """A page that simulates for long can say how far it is."""
    seen = []
    simulator.run("small", json.dumps({"node": "a800-node", "requests": 120}), seen.append)
    assert seen == [50, 100]


def test_a_run_takes_the_first_requests(simulator):
    """Fewer where the trace has fewer."""
    assert [run(simulator, requests=count).numbers["requests"] for count in (7, 1000)] == [7, 120]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prefill": 0}, ">= 1"),
        ({"speed": 0}, "> 0"),
        ({"system": "nobody"}, "allowed are mooncake, vllm,"),
        ({"placement": "nobody"}, "allowed are kvcache_centric,"),
        ({"admission": "nobody"}, "allowed are none,"),
        ({"node": "nobody"}, "allowed are a800-node,"),
        ({"more": 1}, "`more`"),
    ],
)
def test_what_is_not_allowed_is_said(simulator, settings, said):
    """A setting that cannot be is refused with what is allowed."""
    with pytest.raises(ValueError, match=re.escape(said)):
        run(simulator, **settings)


def test_a_broken_trace_is_refused(simulator, tmp_path):
    """The message names the line."""
    path = tmp_path / "broken.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 3, "output_length": 0, "hash_ids": [1]}\n')
    with pytest.raises(ValueError, match=r"broken.jsonl:1: field .output_length. is 0"):
        simulator.read("broken", str(path))


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("system", SYSTEMS), ("placement", PLACEMENTS), ("admission", ADMISSIONS), ("node", assets.NODES)],
)
def test_the_form_offers_what_is_allowed(name, allowed):
    """Each choice of the page, in the simulator's order, and no other."""
    select = FORM.partition(f'<select name="{name}">')[2].partition("</select>")[0]
    offered = re.findall(r'value="([^"]+)"', select)
    assert sorted(offered) == sorted(allowed)
    assert offered[0] == allowed[0]


def test_the_form_offers_the_traces_that_are_there():
    """The twins, and a file of the reader's own."""
    select = FORM.partition('<select name="trace">')[2].partition("</select>")[0]
    assert re.findall(r'value="([^"]+)"', select) == [*TWINS, "own"]


WITHOUT_NUMPY = """
import sys
for name in ("numpy", "pandas", "torch", "scipy", "platformdirs", "typing_extensions"):
    sys.modules[name] = None  # importing it fails
sys.path.insert(0, sys.argv[1])
from mooncake_lab.book.playground import simulator
assert simulator.__file__.startswith(sys.argv[1]), simulator.__file__
made = simulator.Simulator(open(sys.argv[2]).read())
made.read("small", sys.argv[3])
print(made.run("small", '{"node": "a800-node", "requests": 120, "prefill": 2, "decode": 1}'))
"""


def test_the_packed_package_suffices(simulator, trace, tmp_path):
    """Outside of the checkout and without numpy, the archive of the page gives the same result."""
    (tmp_path / "package.zip").write_bytes(assets.package_zip())
    with zipfile.ZipFile(tmp_path / "package.zip") as archive:
        archive.extractall(tmp_path / "package")
    (tmp_path / "nodes.json").write_bytes(assets.nodes())
    command = [sys.executable, "-c", WITHOUT_NUMPY, tmp_path / "package", tmp_path / "nodes.json", trace]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env={})
    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout, type=Result) == run(simulator, prefill=2, decode=1)


def test_the_same_source_gives_the_same_bytes():
    """Else the book would be rendered again each time."""
    assert assets.package_zip() == assets.package_zip()
    assert assets.nodes() == assets.nodes()


def test_the_browser_runs_the_locked_versions():
    """Every wheel of the page is at the version that this environment has."""
    locked = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    assert set(assets.WHEELS) <= set(locked)


def test_a_wheel_with_another_digest_is_not_published(monkeypatch, tmp_path):
    """What lies in the cache is checked each time, and fetched again."""
    (tmp_path / "wheels").mkdir()
    asked = []

    def fetched(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(assets.subprocess, "run", fetched)
    for name in assets.WHEELS:
        (tmp_path / "wheels" / f"{name.replace('==', '-')}-py3-none-any.whl").write_bytes(b"garbage")
    with pytest.raises(ConnectionError, match="pip could not fetch"):
        assets.fetch_wheels(tmp_path)
    assert len(asked) == 1
    assert list((tmp_path / "wheels").iterdir()) == []


def test_what_cannot_be_fetched_is_said(monkeypatch, tmp_path, capsys):
    """The build goes on without the simulator, and names the address."""
    monkeypatch.setattr(assets, "PYODIDE_URL", "http://127.0.0.1:9/pyodide.tgz")
    assert assets.main([str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]) == 0
    told = capsys.readouterr()
    assert "http://127.0.0.1:9/pyodide.tgz" in told.out + told.err
