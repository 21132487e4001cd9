"""The functions of the package that one request calls in the two runtimes: what a reader follows to understand it.

One request goes through a simulated cluster, from its arrival to its last token, under `sys.setprofile`. The
counts are of the distinct functions of the package that are called meanwhile, of the files that hold them, and of
the classes whose methods they are. Lambdas and comprehensions belong to the function around them. The request is
computed from scratch: no prefix is reused, nothing fails, and the cluster has no other request. The length of a
function is that of its source, with docstring and decorators. Calls into C, such as the construction of a struct,
have no frame and are not counted. Functions outside `simulation` are in packages that the live cluster uses too.

`--live` follows the same request through live clusters as well. All their processes are under `sys.setprofile`, in
each of their threads; a signal begins and ends the counting. What else runs meanwhile, such as heartbeats, is
counted too.

`--record FILE` writes the counts into a JSON file under the name `now` and keeps its other entries. The numbers of
`book/design.md` are those of `data/measured/request_path.json`.
"""  # noqa: INP001  # scripts, not a package

import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import dedent
from types import CodeType, FrameType
from typing import Annotated, Any

import typer

import mooncake_lab
from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.core import Request, TracedRequest
from mooncake_lab.serving import LiveCluster, LiveOptions
from mooncake_lab.simulation import Cluster
from mooncake_lab.testbeds import paper_node_latency

ROOT = Path(mooncake_lab.__file__).parent
TRACER = dedent(
    """
    import os, signal, sys, threading
    found, is_on, folder = {}, False, os.environ["REQUEST_PATH_FOLDER"]
    def see(frame, event, _):
        if is_on and event == "call":
            found.setdefault(frame.f_code)
    def begin(*_):
        global is_on
        is_on = True
    def end(*_):
        global is_on
        is_on = False
        names = {f"{code.co_filename}:{code.co_qualname}": None for code in list(found)}
        with open(f"{folder}/{os.getpid()}.part", "w") as file:
            file.write("\\n".join(names))
        os.rename(f"{folder}/{os.getpid()}.part", f"{folder}/{os.getpid()}.txt")
    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)
    threading.setprofile(see)
    sys.setprofile(see)
    """
)
"""The `sitecustomize` of every process of a live cluster: it counts between two signals."""


@dataclass(frozen=True)
class PathOfRequest:
    """The functions of the package on the way of one request."""

    functions: dict[str, int]
    """Source lines of each function, by `file:qualified name`, in the order of the first call."""
    files: tuple[str, ...]
    classes: tuple[str, ...]

    @property
    def longest(self) -> tuple[str, int]:
        """The longest function and its lines."""
        return max(self.functions.items(), key=lambda item: item[1])


def called(run: Callable[[], Any]) -> dict[CodeType, None]:
    """The named functions of the package that `run` calls, in the order of their first call."""
    found: dict[CodeType, None] = {}

    def see(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            found.setdefault(frame.f_code)

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {
        code: None
        for code in found
        if not code.co_name.startswith("<") and Path(code.co_filename).is_relative_to(ROOT)
    }


def path_of(run: Callable[[], Any]) -> PathOfRequest:
    """What is on the way of the requests that `run` serves."""
    codes = called(run)
    functions, files, classes = dict[str, int](), dict[str, None](), dict[str, None]()
    for code in codes:
        file = Path(code.co_filename).relative_to(ROOT).as_posix()
        owner = code.co_qualname.rpartition(".")[0]
        functions[f"{file}:{code.co_qualname}"] = len(inspect.getsourcelines(code)[0])
        files[file] = None
        if owner and not owner.endswith("<locals>"):
            classes[f"{file}:{owner}"] = None
    return PathOfRequest(functions, tuple(files), tuple(classes))


def numbers_of(path: PathOfRequest) -> dict[str, int | str]:
    """The counts of a path."""
    longest, lines = path.longest
    return {
        "functions": len(path.functions),
        "only_simulated": sum(name.startswith("simulation/") for name in path.functions),
        "classes": len(path.classes),
        "files": len(path.files),
        "longest_lines": lines,
        "longest": longest,
    }


def joined(paths: Iterable[PathOfRequest]) -> PathOfRequest:
    """What is on at least one of the paths."""
    functions, files, classes = dict[str, int](), dict[str, None](), dict[str, None]()
    for path in paths:
        functions |= path.functions
        files |= dict.fromkeys(path.files)
        classes |= dict.fromkeys(path.classes)
    return PathOfRequest(functions, tuple(files), tuple(classes))


def live_functions(spec: ClusterSpec, warm: TracedRequest, traced: TracedRequest) -> list[str]:
    """The functions that a request calls in any process of a live cluster, which has served another one before."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(TRACER, "utf-8")
        os.environ |= {"REQUEST_PATH_FOLDER": folder, "PYTHONPATH": folder}
        exec(compile(TRACER, "tracer", "exec"), {})  # noqa: S102  # the same in this process
        with LiveCluster(spec, LiveOptions(spares=0), model=paper_node_latency()) as live:
            live.run([warm])
            time.sleep(1)  # what ends after the last token
            pids = [os.getpid(), *live.pids().values()]
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)
            live.run([traced])
            for pid in pids:
                os.kill(pid, signal.SIGUSR2)
            files = [Path(folder, f"{pid}.txt") for pid in pids]
            while not all(file.exists() for file in files):
                time.sleep(0.1)
            called = [line.rpartition(":") for file in files for line in file.read_text("utf-8").splitlines()]
        threading.setprofile(None)
        sys.setprofile(None)
    return list(
        {
            f"{Path(file).relative_to(ROOT).as_posix()}:{name}": None
            for file, _, name in called
            if not name.rpartition(".")[2].startswith("<") and Path(file).is_relative_to(ROOT)
        }
    )


def beside(simulated: Iterable[str], live: Iterable[str]) -> dict[str, dict[str, int]]:
    """The functions of both paths by package: how many on each, and how many on both."""
    sets = {"simulated": set(simulated), "live": set(live)}
    sets["both"] = sets["simulated"] & sets["live"]
    counts = {name: Counter(function.partition("/")[0] for function in each) for name, each in sets.items()}
    packages = sorted(counts["simulated"] | counts["live"])
    rows = {package: {name: counts[name][package] for name in sets} for package in packages}
    return rows | {"all": {name: len(each) for name, each in sets.items()}}


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print counts and names as JSON.")] = False,
    record: Annotated[Path | None, typer.Option(help="Write the counts into this JSON file as `now`.")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 2000,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of the answer.")] = 20,
    live: Annotated[bool, typer.Option("--live", help="Follow the request through live clusters, too.")] = False,
) -> None:
    """Print the functions that one request calls in a disaggregated, in a coupled and in either cluster."""
    keys = tuple(range(-(-prompt // 512)))
    traced = TracedRequest(Request(id=0, arrival_s=0.0, input_tokens=prompt, block_keys=keys), answer)
    model = paper_node_latency()
    clusters = {
        "disaggregated": Cluster(ClusterSpec.disaggregated(prefill_nodes=2, decode_nodes=2), model),
        "coupled": Cluster(ClusterSpec.coupled(nodes=4), model),
    }
    paths = {name: path_of(lambda cluster=cluster: cluster.run([traced])) for name, cluster in clusters.items()}
    paths["either"] = joined(paths.values())
    both = dict[str, dict[str, dict[str, int]]]()
    if live:
        warm = TracedRequest(replace(traced.request, block_keys=tuple(k + 9 for k in keys)), answer)
        specs = {
            "disaggregated": ClusterSpec.small(prefill_nodes=2, decode_nodes=2, block_size_tokens=512),
            "coupled": ClusterSpec.small_coupled(nodes=4, block_size_tokens=512),
        }
        for name, spec in specs.items():
            functions = live_functions(spec, warm, traced)
            both[name] = beside(paths[name].functions, functions)
    if record is not None:
        known = json.loads(record.read_text("utf-8")) if record.exists() else {}
        known["now"] = {name: numbers_of(path) for name, path in paths.items()}
        if live:
            known["both"] = both
        record.write_text(json.dumps(known, indent=2) + "\n", "utf-8")
    if as_json:
        typer.echo(
            json.dumps(
                {name: asdict(path) | {"counts": numbers_of(path)} for name, path in paths.items()}, indent=2
            )
        )
        return
    for name, rows in both.items():
        typer.echo(f"{name}: {json.dumps(rows, indent=1)}")
    for name, path in paths.items():
        found = numbers_of(path)
        typer.echo(
            f"{name}: {found['functions']} functions, {found['only_simulated']} of them in simulation,"
            f" {found['classes']} classes, {found['files']} files;"
            f" the longest function is {found['longest']} with {found['longest_lines']} lines"
        )
    for function, lines in paths["either"].functions.items():
        typer.echo(f"{lines:5d}  {function}")


if __name__ == "__main__":
    typer.run(main)
