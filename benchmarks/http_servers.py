"""Our server and vLLM's, started on the same weights and on given cores, until they answer.

vLLM's server comes from the environment that `peer_environments.py vLLM` makes, compiled by `torch.compile` and
with the libraries preloaded that its log asks for. Neither server needs a tokenizer: prompts are token ids.
"""  # noqa: INP001  # scripts, not a package

import contextlib
import ctypes.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx
import torch

from mooncake_lab.bench.peers import hugging_face
from mooncake_lab.engine.config import config_from_shape
from mooncake_lab.engine.loading import DTYPES
from mooncake_lab.engine.weights import random_weights
from mooncake_lab.perf import model_shape

MODEL: Final = "lab"
"""The name that all servers give to the model."""
_START_S: Final = 600.0
_END_S: Final = 20.0


def cores() -> tuple[set[int], set[int]]:
    """One core for servers and another for clients where the machine has two; else all for both."""
    if not hasattr(os, "sched_getaffinity"):  # macOS pins no process
        return set(), set()
    here = sorted(os.sched_getaffinity(0))
    return ({here[0]}, {here[1]}) if len(here) > 1 else ({here[0]}, {here[0]})


@contextlib.contextmanager
def pinned(to: Collection[int]) -> Generator[None]:
    """Run on these cores for a while, as do processes started meanwhile; no cores change nothing."""
    if not to:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, to)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def save_model(shape: str, dtype: str, directory: Path) -> None:
    """Random weights of a shape in Hugging Face's format, for servers that load a folder."""
    config = config_from_shape(model_shape(shape), max_positions=8192)
    weights = random_weights(config, device=torch.device("cpu"), dtype=DTYPES[dtype])
    hugging_face(weights).save_pretrained(directory)


def our_words(directory: Path, dtype: str, port: int, *options: str) -> list[str]:
    """The command of our server; without a spare, which would compute beside the workers while it starts."""
    return [
        sys.executable, "-m", "mooncake_lab", "serve", "--model", str(directory), "--served-model-name", MODEL,
        "--dtype", dtype, "--device", "cpu", "--no-api-key", "--port", str(port), "--threads", "1",
        "--spares", "0", *options,
    ]  # fmt: skip


def vllm_words(python: Path, directory: Path, dtype: str, port: int, *options: str) -> list[str]:
    """The command of vLLM's server, by the interpreter of its environment."""
    return [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory),
        "--skip-tokenizer-init", "--served-model-name", MODEL, "--dtype", dtype, "--host", "127.0.0.1",
        "--port", str(port), "--disable-uvicorn-access-log", *options,
    ]  # fmt: skip


def vllm_environment(python: Path) -> dict[str, str]:
    """The variables that vLLM's server gets: one thread, no network, and its libraries."""
    libraries = [str(python.parents[1] / "lib" / "libiomp5.so"), ctypes.util.find_library("tcmalloc_minimal")]
    return {
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(filter(None, libraries)),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(
    words: Sequence[str], on: Collection[int], environment: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """A server that is starting, on these cores, until the end of the block; `wait_until_open` waits for it."""
    with pinned(on):
        process = subprocess.Popen(  # noqa: S603  # the commands above
            words, stdout=2, env=os.environ | dict(environment or {}), start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):  # what of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_open(process: subprocess.Popen[bytes], port: int, name: str) -> None:
    """Return when a server answers.

    Raises:
        ValueError: when it ends or does not answer for minutes.
    """
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                return
        if process.poll() is not None:
            raise ValueError(
                f"{name} ended with status {process.returncode} before it answered; what it printed stands above"
            )
        time.sleep(0.2)
    raise ValueError(f"{name} did not answer within {_START_S:.0f} s")
