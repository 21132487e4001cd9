"""Makes the environment of a peer: an engine of others that the benchmarks run beside ours.

Run: python benchmarks/peer_environments.py vLLM [--folder .peers]

A peer is a script of `benchmarks/peers`, and its head names what it needs (PEP 723). It gets a virtual environment
of its own, so that it is never a dependency of this project. Where a lock lies beside the script, exactly the
files in it are installed, each checked by its SHA-256.
"""  # noqa: INP001  # scripts, not a package

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
SCRIPTS: Final[Mapping[str, Path]] = MappingProxyType(
    {
        name: ROOT / "benchmarks" / "peers" / f"{stem}.py"
        for name, stem in (
            ("llama.cpp", "llama_cpp_peer"),
            ("OpenVINO", "openvino_peer"),
            ("vLLM", "vllm_peer"),
            ("vLLM eager", "vllm_eager_peer"),
            ("AIPerf", "aiperf_traces"),
            ("kvcache-simulator", "kvcache_simulator"),
        )
    }
)
"""Peers in processes of their own."""
_METADATA: Final = re.compile(r"(?m)^# /// script\n(?P<body>(?:#.*\n)+?)# ///$")
"""Requirements in the head of a script, as PEP 723 has them."""


def requirements(script: Path) -> dict[str, Any]:
    """What the head of a script says that it needs.

    Raises:
        ValueError: when the script names no requirements.
    """
    found = _METADATA.search(script.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{script}: its head names no requirements")
    return tomllib.loads(re.sub(r"(?m)^# ?", "", found["body"]))


def check_machine(script: Path, told: Mapping[str, Any]) -> None:
    """Refuse a peer that does not run on this machine, before anything is fetched.

    Raises:
        ValueError: saying where it runs.
    """
    here = {
        "machine": f"{platform.system()} {platform.machine()}",
        "python": "{}.{}".format(*sys.version_info),
    }
    needed: Mapping[str, list[str]] = told.get("tool", {}).get("peer", {})
    for what, allowed in needed.items():
        if here[what] not in allowed:
            raise ValueError(
                f"{script.name} needs {' or '.join(allowed)} ({what}); this is {here[what]}, so it is left out"
            )


def environment(script: Path, folder: Path) -> Path:
    """The interpreter of a peer's environment, which is made where it is missing or another one.

    Raises:
        ValueError: when the script names no requirements, the peer does not run here, or pip could not install it.
    """
    told = requirements(script)
    check_machine(script, told)
    needs: list[str] = told["dependencies"]
    tools: dict[str, Any] = told.get("tool", {})
    elsewhere: list[str] = tools.get("uv", {}).get("extra-index-url", [])
    if any(Path(os.environ.get("PIP_FIND_LINKS", "/nonexistent")).glob("torch-*.whl")):
        elsewhere = []  # as `make env` does: PyTorch lies on this machine
    options = [f"--extra-index-url={index}" for index in elsewhere]
    name: str = tools.get("environment", {}).get("name", script.stem)
    made, lock = folder / name, script.with_name(f"{name}.lock")
    wanted: object = needs
    words = needs
    if lock.is_file():
        wanted = [*needs, hashlib.sha256(lock.read_bytes()).hexdigest()]
        words = ["--no-deps", "--require-hashes", "-r", str(lock)]
    done, python = made / "requirements.json", made / "bin" / "python"
    if not done.is_file() or json.loads(done.read_text(encoding="utf-8")) != wanted:
        sys.stderr.write(f"making {made}: some minutes\n")
        venv.create(made, with_pip=True, clear=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *options, *words]
        if subprocess.run(command, check=False).returncode:  # noqa: S603  # pinned
            raise ValueError(f"pip could not install {script.name} into {made}; what it said stands above")
        done.write_text(json.dumps(wanted), encoding="utf-8")
    return python


def main() -> None:
    """Make an environment and print its interpreter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=tuple(SCRIPTS))
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="where the peers are installed")
    chosen = parser.parse_args()
    try:
        python = environment(SCRIPTS[chosen.peer], chosen.folder)
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    sys.stdout.write(f"{python}\n")


if __name__ == "__main__":
    main()
