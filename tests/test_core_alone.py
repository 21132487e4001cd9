"""Plain `pip install mooncake-lab` simulates, replays caches and reads traces; all else names its extra."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from bare_site import link_distributions
from packaging.requirements import Requirement
from typer.testing import CliRunner

from mooncake_lab.cli import COMMANDS, NEEDS, app
from mooncake_lab.core.extras import EXTRAS, MissingExtraError, missing_extra, naming_extra

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = [Requirement(line).name for line in PROJECT["dependencies"]]
SPENT = {"wall_s", "cpu_s", "peak_memory_mib"}
ROWS = [([0, 1, 2], 1536, 30), ([0, 3], 1000, 5), ([0, 1, 2, 4], 2048, 1), ([5, 6], 700, 200), ([0, 8], 1024, 9)]
TRACE = "".join(
    json.dumps({"timestamp": 700 * i, "input_length": tokens, "output_length": answer, "hash_ids": ids}) + "\n"
    for i, (ids, tokens, answer) in enumerate(ROWS)
).encode()
INSIDE = """
import importlib, json, sys
from dataclasses import replace
from typer.testing import CliRunner
from mooncake_lab.cli import app
from mooncake_lab.workload import releases

asked = json.load(sys.stdin)
released = releases.RELEASES["synthetic"]
releases.RELEASES = {**releases.RELEASES, "synthetic": replace(released, sha256=asked["sha256"])}
answers = {}
for name, arguments in asked["commands"].items():
    done = CliRunner().invoke(app, arguments)
    failed = done.exception and not isinstance(done.exception, SystemExit)
    answers[name] = [done.exit_code, done.stdout, repr(done.exception) if failed else done.stderr]
for code in asked["codes"]:
    try:
        exec(code, {})
        answers[code] = "nothing was missing"
    except Exception as error:
        answers[code] = f"{type(error).__name__}: {error}"
answers["loaded"] = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps(answers))
"""
WORK = {
    "fetch": ["trace", "fetch", "synthetic", "--to", "{folder}", "--url", "{url}", "--json"],
    "stats": ["trace", "stats", "{file}", "--json"],
    "stats of a fetched trace": ["trace", "stats", "{folder}/synthetic_trace.jsonl", "--json"],
    "convert": ["trace", "convert", "{file}", "{folder}/converted.jsonl.gz", "--force", "--json"],
    "cache": ["cache", "{file}", "--capacity", "3", "--json"],
    "cache in tokens": ["cache", "{file}", "--capacity", "2000", "--unit=tokens", "--policy=belady", "--json"],
    "model": ["model", "describe", "llama3-70b", "--json"],
    "cache of a fetched trace": ["cache", "{folder}/synthetic_trace.jsonl", "--capacity", "inf", "--json"],
    "simulate": ["simulate", "{file}", "--prefill-nodes", "1", "--decode-nodes", "1", "--json"],
    "simulate coupled": ["simulate", "{file}", "--coupled-nodes=2", "--speed=3", "--batching=sarathi", "--json"],
    "simulate other nodes": [
        "simulate", "{file}", "--prefill-nodes", "1", "--decode-nodes", "2", "--node", "h800-node",
        "--model", "llama3-8b", "--admission", "predictive", "--num-prompts", "3", "--json",
    ],
    "simulate the arXiv testbed": [
        "simulate", "{file}", "--prefill-nodes", "2", "--decode-nodes", "1", "--testbed", "arxiv",
        "--admission", "priority", "--urgent-share", "0.5", "--ssd-tokens", "100000", "--ssd-gb-per-s", "5",
        "--prefill-group", "2", "--perfetto", "{folder}/timeline.json", "--log", "{folder}/log.jsonl", "--json",
    ],
    "simulate a fetched trace": [
        "simulate", "{folder}/synthetic_trace.jsonl", "--prefill-nodes", "1", "--decode-nodes", "1", "--fail",
        "decode-0@1000", "--json",
    ],
}  # fmt: skip
HELP = {f"help of {name}": [name, "--help"] for name in ("trace", "cache", "simulate")}
REFUSED = {
    "trace synth": (["trace", "synth", "--like", "conversation", "-o", "{folder}/twin.jsonl"], "stats"),
    "trace describe": (["trace", "describe", "{file}"], "stats"),
    "trace servegen": (["trace", "servegen", "{folder}", "-o", "{folder}/drawn.jsonl"], "stats"),
    "generate": (["generate", "--prompt-ids", "{folder}/ids.json", "--model", "random:lab-tiny"], "engine"),
    "serve": (["serve", "--model", "random:lab-tiny"], "serve"),
    "calibrate": (["calibrate", "{file}", "--url", "http://127.0.0.1:9"], "stats"),
    "replay": (["replay", "{file}"], "engine"),
    "batch": (["batch"], "book"),
    "verdicts": (["verdicts", "--from", "{folder}/records"], "stats"),
    "store": (["store", "soak", "--dir", "{folder}/soak"], "stats"),
    "classroom": (["classroom", "build", "--sources", "{assignments}", "--out", "{folder}/class"], "classroom"),
}
"""A command that needs more, and the extra that it names."""
MISSING = {
    "from mooncake_lab.workload import load; load('conversation')": "stats",
    "from mooncake_lab.workload.twin import make_twin": "stats",
    "from mooncake_lab.workload import use_counts": "stats",
    "from mooncake_lab.workload import SharedPrefix": "stats",
    "from mooncake_lab.workload import read_trace; read_trace({file!r}).block_ids": "stats",
    "from mooncake_lab.metrics import swing": "stats",
    "from mooncake_lab.metrics import token_hit_rate": "stats",
    "from mooncake_lab.metrics import request_table; request_table([])": "stats",
    "from mooncake_lab.perf import fit_link": "stats",
    "from mooncake_lab.store.backends import DramBackend": "stats",
    "from mooncake_lab.book.paper import curve; curve('fast_fig14_latency_breakdown')": "stats",
    "import mooncake_lab.calibrate": "stats",
    "from mooncake_lab.book.figures import style": "figures",
    "from mooncake_lab.book.figures import drawn": "figures",
    "from mooncake_lab.book.figures import what_if": "figures",
    "from mooncake_lab.calibrate import scatter": "stats",
    "from mooncake_lab.book.chapters.store import figures": "stats",
    "from mooncake_lab.book.experiments import run": "book",
    "import mooncake_lab.book.rendering": "book",
    "import mooncake_lab.engine": "engine",
    "import mooncake_lab.compression": "engine",
    "import mooncake_lab.serving": "engine",
    "from mooncake_lab.serving.openai_api import app": "engine",
}
"""Python that needs more, and the extra that it names."""
PLAIN = [
    f"import mooncake_lab.{name}"
    for name in ("core", "workload", "perf", "batching", "store", "conductor", "cluster", "simulation", "metrics")
]
PLAIN += [
    "from mooncake_lab.metrics import run_summary, write_perfetto, check_log",
    "from mooncake_lab.store.replay import replay; assert replay([[1, 2], [1, 2]], 'lru', None).hits == 2",
    "from mooncake_lab.book.paper import claims, fact; assert claims()",
    "from mooncake_lab.workload import read_trace, statistics; statistics(read_trace({file!r}))",
    "from mooncake_lab.workload import read_trace, write_trace; write_trace('t.gz', read_trace({file!r}))",
]
"""Python that plain `pip install mooncake-lab` runs."""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(TRACE)))
        self.end_headers()
        self.wfile.write(TRACE)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    """The address of a double of the authors' repository."""
    with HTTPServer(("127.0.0.1", 0), _Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}/synthetic_trace.jsonl"
        httpd.shutdown()
        thread.join()


def answers(url, folder, *packages):
    """What all commands and codes answer where only these folders of packages are."""
    for name in ("data", "records"):
        (folder / name).mkdir()
    (folder / "records" / "traces.json").write_text(
        '{"topic": "traces", "twin": false, "sources": [], "numbers": {}}'
    )
    (folder / "ids.json").write_text("[[1, 2]]")
    file = folder / "small.jsonl"
    file.write_bytes(TRACE)
    assignments = str(ROOT / "notebooks" / "assignments")
    places = {"folder": str(folder), "file": str(file), "url": url, "assignments": assignments}
    commands = {
        **WORK,
        **HELP,
        "doctor": ["doctor", "--json"],
        **{name: arguments for name, (arguments, _) in REFUSED.items()},
    }
    asked = {
        "sha256": hashlib.sha256(TRACE).hexdigest(),
        "commands": {name: [word.format(**places) for word in words] for name, words in commands.items()},
        "codes": [code.format(**places) for code in (*MISSING, *PLAIN)],
    }
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *packages))),
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "MOONCAKE_LAB_DATA": str(folder / "data"),
        "NO_PROXY": "127.0.0.1",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-S", "-c", INSIDE]
    told = json.dumps(asked)
    done = subprocess.run(
        command, input=told, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {code.replace(str(file), "FILE"): answer for code, answer in json.loads(done.stdout).items()}
    return found, places


@pytest.fixture(scope="module")
def alone(tmp_path_factory, url):
    """What the package answers beside nothing but its plain dependencies, and where its files lie."""
    site = tmp_path_factory.mktemp("site")
    link_distributions(site, CORE)
    return answers(url, tmp_path_factory.mktemp("alone"), site)


def numbers(stdout):
    """The JSON that a command printed, without what it cost."""
    return {name: value for name, value in json.loads(stdout).items() if name not in SPENT}


@pytest.mark.parametrize("name", WORK)
def test_the_numbers_are_those_with_numpy(alone, name):
    """Each command works on files and on fetched traces, and prints the JSON that it prints where numpy is."""
    found, places = alone
    exit_code, stdout, stderr = found[name]
    assert (exit_code, stderr) == (0, "")
    if name != "fetch":  # its file is there already
        here = CliRunner().invoke(app, [word.format(**places) for word in WORK[name]])
        assert here.exit_code == 0, here.output
        assert numbers(stdout) == numbers(here.stdout)


@pytest.mark.parametrize("name", HELP)
def test_help_needs_nothing_more(alone, name):
    """The commands explain themselves."""
    assert (alone[0][name][0], alone[0][name][2]) == (0, "")


@pytest.mark.parametrize("name", REFUSED)
def test_a_command_that_needs_more_names_its_extra(alone, name):
    """One sentence on stderr says what to install; the exit code is 1, and there is no traceback."""
    exit_code, stdout, stderr = alone[0][name]
    assert (exit_code, stdout) == (1, ""), stderr
    (line,) = stderr.splitlines()
    assert line.startswith(f"mooncake-lab {name.partition(' ')[0]}: ")
    assert line.endswith(f"pip install 'mooncake-lab[{REFUSED[name][1]}]'")


@pytest.mark.parametrize("code", MISSING)
def test_python_that_needs_more_names_its_extra(alone, code):
    """The error is one sentence with the library and the extra."""
    said = alone[0][code.replace("{file!r}", "'FILE'")]
    assert said.startswith("MissingExtraError: "), said
    assert said.endswith(f"is not installed; this needs it: pip install 'mooncake-lab[{MISSING[code]}]'")


@pytest.mark.parametrize("code", PLAIN)
def test_the_core_runs_without_extras(alone, code):
    """Simulator, policies, stores of keys, summaries, traces and the papers' facts need no extra."""
    assert alone[0][code.replace("{file!r}", "'FILE'")] == "nothing was missing"


def test_nothing_else_was_loaded(alone):
    """The check is one: of the libraries of the extras, none could be imported there."""
    assert not {module for modules in EXTRAS.values() for module in modules} & set(alone[0]["loaded"])


def test_doctor_says_what_is_missing(alone):
    """Each extra that is not installed is optional and has its command, and nothing that all need is missing."""
    exit_code, stdout, stderr = alone[0]["doctor"]
    assert (exit_code, stderr) == (0, "")
    told = {each["what"]: each for each in json.loads(stdout)["findings"]}
    for extra in EXTRAS:
        assert told[f"extra: {extra}"]["standing"] == "optional"
        assert told[f"extra: {extra}"]["remedy"] == f"pip install 'mooncake-lab[{extra}]'"
    assert told["PyTorch"]["standing"] == "optional"


def test_every_command_is_sorted():
    """A command is checked here to work or to name its extra; `doctor` says itself what is missing."""
    assert set(COMMANDS) == {"trace", "cache", "simulate", "model", "doctor", *NEEDS}
    assert {name.partition(" ")[0] for name in REFUSED} == {"trace", *NEEDS}


@pytest.mark.parametrize(
    ("asked", "module", "named"),
    [
        ("serve", "numpy", "serve"),
        ("engine", "numba.core", "engine"),
        ("stats", "matplotlib", "figures"),
        (None, "starlette", "serve"),
    ],
)
def test_the_extra_that_is_asked_for_is_named_if_it_brings_the_module(asked, module, named):
    """One `pip install` suffices for a command; what is beyond its extra, such as a figure, names its own."""
    missing = missing_extra(ModuleNotFoundError(name=module), asked)
    assert str(missing).endswith(f"pip install 'mooncake-lab[{named}]'")
    assert str(missing_extra(missing)) == str(missing)


def test_what_is_around_may_name_a_larger_extra():
    """Statistics that a chapter needs are named as the book's."""
    missing = missing_extra(ModuleNotFoundError(name="numpy"))
    assert str(missing_extra(missing, "book")).endswith("[book]'")


def test_other_missing_modules_are_not_blamed_on_an_extra():
    """A module that no extra brings, such as one of a user's policy, stays the error that it is."""
    assert missing_extra(ModuleNotFoundError("No module named 'own'", name="own")) is None
    with pytest.raises(ModuleNotFoundError) as found, naming_extra("engine"):
        import own_policy_helpers  # noqa: F401
    assert not isinstance(found.value, MissingExtraError)
