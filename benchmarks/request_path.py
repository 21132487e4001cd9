"""What a reader has to read to follow one request: the package's functions that one request calls in the simulator.

One request goes through a simulated cluster, from its arrival to its last token, under `sys.setprofile`. Counted are
the distinct functions of the package that are called in the meantime, the files that hold them, and the classes whose
methods they are; lambdas and comprehensions belong to the function around them. The request is computed from scratch:
no prefix is reused, nothing fails, and no other request is there. The length of a function is that of its source
lines, docstring and decorators included. Calls into C, such as the construction of a struct, leave no frame and are
not counted.
"""  # noqa: INP001  # scripts, not a package

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import typer

import mooncake_lab
from mooncake_lab.core import Request, TracedRequest
from mooncake_lab.experiments.paper_node import paper_node_latency
from mooncake_lab.simulation import Cluster, ClusterSpec, CoupledCluster, CoupledSpec

ROOT = Path(mooncake_lab.__file__).parent


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


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    counts: Annotated[bool, typer.Option("--counts", help="Leave out the names of functions and files.")] = False,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 2000,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of the answer.")] = 20,
) -> None:
    """Print the functions on the way of one request, for a disaggregated and a coupled cluster of four nodes."""
    keys = tuple(range(-(-prompt // 512)))
    traced = TracedRequest(Request(id=0, arrival_s=0.0, input_tokens=prompt, block_keys=keys), answer)
    model = paper_node_latency()
    clusters = {
        "disaggregated": Cluster(ClusterSpec(prefill_nodes=2, decode_nodes=2), model),
        "coupled": CoupledCluster(CoupledSpec(nodes=4), model),
    }
    paths = {name: path_of(lambda cluster=cluster: cluster.run([traced])) for name, cluster in clusters.items()}
    numbers = {
        name: {
            "functions": len(path.functions),
            "files": len(path.files),
            "classes": len(path.classes),
            "longest": path.longest[0],
            "longest_lines": path.longest[1],
        }
        for name, path in paths.items()
    }
    if as_json:
        full = {name: numbers[name] | ({} if counts else {"path": asdict(paths[name])}) for name in paths}
        typer.echo(json.dumps(full, indent=2))
        return
    for name, path in paths.items():
        typer.echo(
            f"{name}: {len(path.functions)} functions, {len(path.classes)} classes, {len(path.files)} files;"
            f" the longest function is {path.longest[0]}, {path.longest[1]} lines"
        )
        for function, lines in {} if counts else path.functions.items():
            typer.echo(f"{lines:5d}  {function}")


if __name__ == "__main__":
    typer.run(main)
