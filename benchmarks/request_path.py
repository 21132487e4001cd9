"""The functions of the package that one request calls in the two runtimes: what a reader follows to understand it.

One request goes through a simulated cluster, from its arrival to its last token, under `sys.setprofile`. It is
computed from scratch: no prefix is reused, nothing fails, and the cluster has no other request. Lambdas and
comprehensions belong to the function around them. Calls into C, such as the construction of a struct, have no
frame and are left out. The length of a function is that of its source, with docstring and decorators. A change of
file is a call of a function whose file is another one than that of the function called before.

`--live` follows a request through a live server as well, from the client's connection and back to it. All
processes of `mooncake-lab serve` are under `sys.setprofile`, in each of their threads; a signal begins and ends
the recording. What else runs meanwhile, such as heartbeats, is recorded too. The shapes of the request are counted
as well. They are the classes of the package whose instances stand for one request: a field has its id, its tokens
or another such instance. Events, commands and records of the log are left out, as they say what happened to it.

`--record FILE` writes the names of both paths into a JSON file, in the order of the first call. A test compares
the steps in `book/design.md` with the simulated path of the code as it is, and with the live path in
`data/measured/request_path.json`.
"""  # noqa: INP001  # scripts, not a package

import inspect
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import CodeType, FrameType
from typing import Annotated, Any
from urllib.request import Request as Post
from urllib.request import urlopen

import typer

import mooncake_lab
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import Request, TracedRequest
from mooncake_lab.simulation import Cluster

ROOT = Path(mooncake_lab.__file__).parent
MODEL = "random:lab-tiny"
WORKERS = {
    "disaggregated": ("--prefill-nodes", "2", "--decode-nodes", "2"),
    "coupled": ("--coupled-nodes", "4"),
}
"""The live clusters, as options of `mooncake-lab serve`; the simulated ones have as many nodes."""
PATIENCE_S = 60.0
FIELDS_OF_A_REQUEST = frozenset(
    {"request_id", "attempt", "job", "request", "traced", "order", "prompt", "block_keys", "first_token"}
)
"""The names of fields with a request's id, its tokens, or an instance that has these."""
WHAT_HAPPENED = ("mooncake_lab.cluster.events", "mooncake_lab.core.log")
"""The modules of events, commands and records."""
TRACER = dedent(
    """
    import os, signal, sys, threading, time
    found, is_on, place = {}, False, os.path.join(os.environ["REQUEST_PATH_FOLDER"], str(os.getpid()))
    held = {}
    def see(frame, event, _):
        if not is_on:
            return
        if event == "call" and frame.f_code not in found:
            found[frame.f_code] = time.monotonic_ns()
        elif event == "return" and "mooncake_lab" in frame.f_code.co_filename:
            for value in list(frame.f_locals.values()):
                kind = type(value)
                if kind not in held and kind.__module__.startswith("mooncake_lab"):
                    held[kind] = fields_of(kind, value)
    def fields_of(kind, value):
        named = [name for base in kind.__mro__ for name in base.__dict__.get("__annotations__", ())]
        return sorted({*named, *getattr(kind, "__struct_fields__", ()), *getattr(value, "__dict__", ())})
    def write(kind, text=""):
        with open(f"{place}.part", "w") as file:
            file.write(text)
        os.rename(f"{place}.part", f"{place}.{kind}")
    def begin(*_):
        global is_on
        is_on = True
        write("begun")
    def end(*_):
        global is_on
        is_on = False
        calls = [f"{at} {code.co_filename}:{code.co_qualname}" for code, at in found.items()]
        kinds = [f"- {kind.__module__}:{kind.__qualname__}:{','.join(fields)}" for kind, fields in held.items()]
        write("ended", "\\n".join(calls + kinds))
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    threading.setprofile(see)
    sys.setprofile(see)
    write("traced")
    """
)
"""The `sitecustomize` of every process of a live server: it records between two signals."""


@dataclass(frozen=True)
class PathOfRequest:
    """The functions of the package on the way of one request."""

    functions: dict[str, int]
    """Source lines of each function, by `file:qualified name`, in the order of the first call."""
    changes_of_file: int

    @property
    def files(self) -> set[str]:
        """The files of the functions."""
        return {name.partition(":")[0] for name in self.functions}

    @property
    def classes(self) -> set[str]:
        """The classes whose methods are called."""
        owners = {name.rpartition(".")[0] for name in self.functions if "." in name.partition(":")[2]}
        return {owner for owner in owners if not owner.endswith("<locals>")}

    @property
    def longest(self) -> str:
        """The longest function."""
        return max(self.functions, key=self.functions.__getitem__)

    @property
    def counts(self) -> dict[str, float]:
        """How many functions, classes, files and changes of file there are, and how long functions are."""
        lines = sorted(self.functions.values())
        return {
            "functions": len(lines),
            "classes": len(self.classes),
            "files": len(self.files),
            "changes_of_file": self.changes_of_file,
            "median_lines": statistics.median(lines),
            "p90_lines": statistics.quantiles(lines, n=10)[-1],
            "longest_lines": lines[-1],
        }


def path_of(run: Callable[[], Any]) -> PathOfRequest:
    """The functions on the way of the requests that `run` serves."""
    calls: list[CodeType] = []

    def see(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    calls = [code for code in calls if _is_ours(code.co_filename, code.co_name)]
    functions = {
        _place(code.co_filename, code.co_qualname): len(inspect.getsourcelines(code)[0])
        for code in dict.fromkeys(calls)
    }
    files = [code.co_filename for code in calls]
    return PathOfRequest(functions, sum(one != other for one, other in pairwise(files)))


def _is_ours(file: str, name: str) -> bool:
    return not name.rpartition(".")[2].startswith("<") and Path(file).is_relative_to(ROOT)


def _place(file: str, name: str) -> str:
    return f"{Path(file).relative_to(ROOT).as_posix()}:{name}"


def simulated_paths(prompt_tokens: int = 2000, answer_tokens: int = 20) -> dict[str, PathOfRequest]:
    """The path of one request in a simulated disaggregated cluster, and in a coupled one."""
    keys = tuple(range(-(-prompt_tokens // 512)))
    request = Request(id=0, arrival_s=0.0, input_tokens=prompt_tokens, block_keys=keys)
    model = paper_node_latency()
    clusters = {
        "disaggregated": Cluster(ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=2), model),
        "coupled": Cluster(ClusterSpec.coupled(nodes=4), model),
    }
    traced = [TracedRequest(request, answer_tokens)]
    return {name: path_of(lambda cluster=cluster: cluster.run(traced)) for name, cluster in clusters.items()}


def live_functions(workers: Sequence[str], prompt_tokens: int, answer_tokens: int) -> tuple[list[str], list[str]]:
    """The functions that a request calls in any process of a live server, which has served another one before.

    Returns:
        The functions, in the order of the first call, and the shapes of the request.

    Raises:
        RuntimeError: when the server does not start, or a process of it does not answer a signal.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(TRACER, "utf-8")
        command = [sys.executable, "-m", "mooncake_lab", "serve", "--model", MODEL, *workers]
        command += ["--spares", "0", "--port", "0", "--no-api-key", "--json"]
        paths = os.pathsep.join([name, str(ROOT.parent)])
        environment = os.environ | {"REQUEST_PATH_FOLDER": name, "PYTHONPATH": paths}
        options: dict[str, Any] = {"cwd": ROOT.parent, "env": environment, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **options) as server:  # noqa: S603  # our own command
            try:
                assert server.stdout is not None  # noqa: S101  # it is a pipe
                opened = server.stdout.readline()
                if not opened:
                    raise RuntimeError(f"{' '.join(command)} did not start")
                url = json.loads(opened)["url"]
                _ask(url, [3 + 5 * i % 199 for i in range(prompt_tokens)], answer_tokens)
                time.sleep(1)  # what ends after the last token
                _signal(folder, signal.SIGUSR1, "begun")
                _ask(url, [3 + 7 * i % 197 for i in range(prompt_tokens)], answer_tokens)
                time.sleep(1)
                records = _signal(folder, signal.SIGUSR2, "ended")
            finally:
                server.terminate()
        lines = [line.partition(" ") for record in records for line in record.read_text("utf-8").splitlines()]
    calls = sorted([line for line in lines if line[0] != "-"], key=lambda line: int(line[0]))
    found = [place.rpartition(":") for _, _, place in calls]
    functions = list(dict.fromkeys(_place(file, name) for file, _, name in found if _is_ours(file, name)))
    return functions, sorted({shape for mark, _, kind in lines if mark == "-" and (shape := _shape(kind))})


def _shape(kind: str) -> str:
    """The name of a class, with its module, whose instances stand for a request; empty where they do not."""
    module, name, fields = kind.split(":")
    says_what_happened = module in WHAT_HAPPENED and name != "Attempt"
    if says_what_happened or FIELDS_OF_A_REQUEST.isdisjoint(fields.split(",")):
        return ""
    return f"{module.partition('.')[2]}:{name}"


def _ask(url: str, prompt: list[int], answer_tokens: int) -> None:
    """Send one request and read its whole stream."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": answer_tokens, "ignore_eos": True, "stream": True}
    post = Post(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urlopen(post, timeout=PATIENCE_S) as answer:  # noqa: S310  # our own server
        answer.read()


def _signal(folder: Path, number: signal.Signals, kind: str) -> list[Path]:
    """Send a signal to every traced process; the files that they write in answer."""
    pids = [path.stem for path in folder.glob("*.*") if path.stem.isdigit() and Path("/proc", path.stem).exists()]
    for pid in dict.fromkeys(pids):
        os.kill(int(pid), number)
    answers = [folder / f"{pid}.{kind}" for pid in dict.fromkeys(pids)]
    deadline_s = time.monotonic() + PATIENCE_S
    while silent := [path.stem for path in answers if not path.exists()]:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"processes {', '.join(silent)} did not answer {number.name}")
        time.sleep(0.05)
    return answers


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print counts and names as JSON.")] = False,
    record: Annotated[Path | None, typer.Option(help="Write the names of both paths into this JSON file.")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 2000,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of the answer.")] = 20,
    live: Annotated[bool, typer.Option("--live", help="Follow the request through live servers, too.")] = False,
) -> None:
    """Print the functions that one request calls in a disaggregated and in a coupled cluster."""
    if record is not None and not live:
        raise typer.BadParameter("--record writes both paths; say --live, too")
    paths = simulated_paths(prompt, answer)
    shapes = dict[str, list[str]]()
    names: dict[str, dict[str, list[str]]] = {
        name: {"simulated": [*path.functions]} for name, path in paths.items()
    }
    if live:
        for name, workers in WORKERS.items():
            names[name]["live"], shapes[name] = live_functions(workers, prompt, answer)
    if record is not None:
        record.write_text(json.dumps(names, indent=1) + "\n", "utf-8")
    if as_json:
        shown = {
            name: names[name] | {"counts": path.counts, "shapes": shapes.get(name)} for name, path in paths.items()
        }
        typer.echo(json.dumps(shown, indent=1))
        return
    for name, path in paths.items():
        typer.echo(f"{name}, simulated: {json.dumps(path.counts)}; the longest function is {path.longest}")
        for function, lines in path.functions.items():
            typer.echo(f"{lines:5d}  {function}")
        if live:
            both = len(set(path.functions) & set(names[name]["live"]))
            typer.echo(f"{name}, live: {len(names[name]['live'])} functions, {both} of them simulated, too")
            typer.echo(f"{name}, live: {len(shapes[name])} shapes of the request: {', '.join(shapes[name])}")
            typer.echo("\n".join(f"       {function}" for function in names[name]["live"]))


if __name__ == "__main__":
    typer.run(main)
