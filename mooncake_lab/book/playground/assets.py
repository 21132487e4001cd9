"""The files that the playground's page loads: Python as WebAssembly, wheels, this package, nodes, traces, results.

    python -m mooncake_lab.book.playground.assets book/_static/playground --cache build/pyodide [--offline]

Pyodide and the wheels are fetched once and checked by digest. Where they cannot be fetched, the page shows its
stored results and says that it has no simulator; that is no error. The traces are twins, because the released ones
are not ours to publish. The same source gives the same bytes, so that the book is rendered again only when one of
them has changed.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

import mooncake_lab
from mooncake_lab.book.playground.simulator import TWIN_REQUESTS, TWINS, Node, Settings, Simulator
from mooncake_lab.book.testbeds.nodes import device_tokens, node_latency
from mooncake_lab.core import carried_folder, complete_file
from mooncake_lab.core.download import WrongContentError, download
from mooncake_lab.perf import hardware
from mooncake_lab.workload import file_sha256, write_trace
from mooncake_lab.workload.twin import make_twin

PYODIDE_URL: Final = "https://registry.npmjs.org/pyodide/-/pyodide-314.0.7.tgz"
PYODIDE_SHA256: Final = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
PYODIDE_FILES: Final = (
    "pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json",
)  # fmt: skip
WHEELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "msgspec==0.22.0": "a66b1766311e42371e509c996c3933b161c7ae0eabdf361af5316dec197e1022",
        "simpy==4.1.2": "43071f84b6512c9b4fcb33ef057f240ccb1d1f3b263f9b4f9229d072e310b372",
        "xxhash==4.1.0": "eb2a048fad81ab55ef3e835b8440a73bb7b8b709140a1e9fe77091863b2172c5",
    }
)
"""What the simulator imports, as in `requirements.lock`, with the SHA-256 of each wheel for WebAssembly."""
PACKAGES: Final = (
    "core", "perf", "net", "workload", "store", "batching", "conductor", "cluster", "simulation", "metrics",
    "book/paper", "book/playground",
)  # fmt: skip
DATA: Final = ("model_shapes.csv", "hardware.csv")
"""The tables of `data/paper` that these packages read."""
NODES: Final = ("a800-node", "h800-node", "h200-node")
STORED: Final = tuple(
    Settings(node=NODES[0], system=system, prefill=prefill)
    for system, prefill in (("mooncake", 4), ("vllm", 8), ("vllm_chunked", 8))
)
"""What the page shows before its first run, over the first of the twins: the form as it stands, and two others."""
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


def write_assets(folder: Path, cache: Path, *, offline: bool = False) -> str:
    """Write all files into a folder; those that would not change stay as they are.

    Args:
        folder: where the page finds them.
        cache: where what was fetched is kept.
        offline: fetch nothing.

    Returns:
        Why Pyodide or a wheel is not there, so that the page cannot simulate; empty where all are.

    Raises:
        ValueError: when what was fetched has another digest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    missing = ""
    try:
        fetched = dict(_runtime(cache, offline=offline))
    except ConnectionError as error:
        fetched, missing = {}, str(error)
    files = fetched | dict(_made(cache, [name for name in fetched if name.endswith(".whl")], missing))
    for path in folder.glob("*.whl"):  # the only names that change
        if path.name not in files:
            path.unlink(missing_ok=True)
    for name, content in files.items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != content:
            with complete_file(folder / name) as file:
                file.write(content)
    return missing


def _runtime(cache: Path, *, offline: bool) -> Iterator[tuple[str, bytes]]:
    """Pyodide and the wheels.

    Raises:
        ConnectionError: when one is not in the cache and cannot be fetched.
    """
    with tarfile.open(fetch_pyodide(cache, offline=offline)) as archive:
        for name in PYODIDE_FILES:
            member = archive.extractfile(f"package/{name}")
            assert member is not None  # noqa: S101  # the digest is right
            yield name, member.read()
    for wheel in fetch_wheels(cache, offline=offline):
        yield wheel.name, wheel.read_bytes()


def _made(cache: Path, wheels: Sequence[str], missing: str) -> Iterator[tuple[str, bytes]]:
    """What is made of the source: the package, the nodes, the traces and the stored results."""
    yield "mooncake_lab.zip", package_zip()
    yield "nodes.json", nodes()
    traces = {name: f"{name}.jsonl" for name in TWINS}
    for name, file_name in traces.items():
        path = cache / file_name
        write_trace(path, make_twin(name, seed=0, requests=TWIN_REQUESTS))
        yield file_name, path.read_bytes()
    yield "stored.js", stored(cache / traces[TWINS[0]], missing)
    yield "manifest.json", json.dumps({"wheels": wheels, "traces": traces}).encode()


def nodes() -> bytes:
    """JSON of the nodes that the page offers, each with LLaMA3-70B, the model of the papers' experiments."""
    latencies = {name: node_latency(name) for name in NODES}
    return msgspec.json.encode(
        {
            name: Node(
                latency=latency,
                device_tokens=device_tokens(hardware(name), latency.shape),
                gpus=hardware(name).devices,
            )
            for name, latency in latencies.items()
        }
    )


def stored(twin: Path, missing: str = "") -> bytes:
    """A script with the results that the page shows before its first run; a page from a disk can load no JSON.

    Args:
        twin: the trace that they are of.
        missing: whether Pyodide or a wheel is, and why; the page shows only that something is.
    """
    simulator = Simulator(nodes().decode())
    simulator.read(TWINS[0], str(twin))
    runs = [
        {"trace": TWINS[0], "settings": msgspec.to_builtins(settings)}
        | msgspec.json.decode(simulator.run(TWINS[0], msgspec.json.encode(settings).decode()))
        for settings in STORED
    ]
    complete = b"false" if missing else b"true"
    return (
        b"window.playgroundComplete = "
        + complete
        + b";\nwindow.playgroundStored = %b;\n" % msgspec.json.encode(runs)
    )


def package_zip() -> bytes:
    """The packages that the simulator needs, without a time: the same source gives the same bytes."""
    root, packed = Path(mooncake_lab.__file__).parent, BytesIO()
    packed_from = [path for name in PACKAGES for path in sorted((root / name).rglob("*.py"))]
    paths = [root / "__init__.py", root / "book" / "__init__.py", *packed_from]
    entries = {path.relative_to(root.parent).as_posix(): path for path in paths}
    entries |= {f"mooncake_lab/data/paper/{name}": carried_folder("paper") / name for name in DATA}
    with zipfile.ZipFile(packed, "w") as archive:
        for name, path in entries.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


_OFFLINE: Final = "OFFLINE is set"


def fetch_pyodide(cache: Path, *, offline: bool = False) -> Path:
    """The archive of Pyodide.

    Raises:
        ConnectionError: when it is not in the cache and cannot be fetched.
        ValueError: when what was sent is another file.
    """
    kept = cache / PYODIDE_URL.rpartition("/")[2]
    if kept.is_file() and file_sha256(kept) == PYODIDE_SHA256:
        return kept
    if offline:
        raise ConnectionError(_OFFLINE)
    try:
        download(PYODIDE_URL, kept, PYODIDE_SHA256)
    except WrongContentError as error:
        raise ValueError(f"what {PYODIDE_URL} sent is not that release of Pyodide ({error})") from error
    except ConnectionError as error:
        raise ConnectionError(
            f"could not fetch {PYODIDE_URL} ({error}); connect to the internet, or put that file into {cache}"
        ) from error
    return kept


def fetch_wheels(cache: Path, *, offline: bool = False) -> list[Path]:
    """The wheels, from the package index that pip is configured for.

    Raises:
        ConnectionError: when one is not in the cache and cannot be fetched.
    """
    wanted = cache / "requirements.txt"
    wanted.write_text("".join(f"{name} --hash=sha256:{digest}\n" for name, digest in WHEELS.items()))
    folder = cache / "wheels"
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:",
        "--implementation", "cp", "--python-version", "3.14", "--abi", "cp314", "--abi", "none",
        "--platform", "pyemscripten_2026_0_wasm32", "--platform", "any",
        "--dest", str(folder), "--requirement", str(wanted),
    ]  # fmt: skip
    if len(_wanted_wheels(folder)) < len(WHEELS):
        if offline:
            raise ConnectionError(_OFFLINE)
        for path in folder.glob("*.whl"):
            path.unlink(missing_ok=True)
        if subprocess.run(command, check=False).returncode:  # noqa: S603 - our own interpreter and arguments
            raise ConnectionError(
                "pip could not fetch the wheels of the playground; its message is above"
                " (where pip is missing: python -m ensurepip)"
            )
    return _wanted_wheels(folder)


def _wanted_wheels(folder: Path) -> list[Path]:
    """Those in a folder that are wanted; an older build may have left others."""
    return sorted(path for path in folder.glob("*.whl") if file_sha256(path) in WHEELS.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mooncake_lab.book.playground.assets", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the page finds its files")
    parser.add_argument("--cache", type=Path, required=True, help="where what is fetched is kept")
    parser.add_argument("--offline", action="store_true", help="fetch nothing")
    options = parser.parse_args(arguments)
    try:
        missing = write_assets(options.folder, options.cache, offline=options.offline)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"The playground's files could not be made: {error}\n")
        return 1
    if missing:
        said = f"its simulator is not here ({missing}), so the page shows stored results; make book fetches it"
        sys.stderr.write(f"{'playground':<16} {said}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
