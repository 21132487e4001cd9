"""The life of one process of a crew: join the others, load the model, do jobs until told to stop."""

import os
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from mooncake_lab.engine.loading import DTYPES, load_model
from mooncake_lab.engine.model import LlamaModel
from mooncake_lab.engine.pipeline.jobs import CppJob, DieJob, Job, RunaheadJob, Share
from mooncake_lab.engine.pipeline.stages import run_cpp, run_runahead
from mooncake_lab.engine.pipeline.wire import Wire

ORPHANED = 75
"""Exit code of a process whose crew is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewSpec:
    """A crew of processes on this machine, each with the whole model, and a GPU of its own where there are enough.

    Raises:
        ValueError: when there is no process or no thread.
    """

    model: str = "random:lab-tiny"
    """As `engine.load_model` takes it."""
    processes: int = 2
    device: str = "cpu"
    """cpu or cuda."""
    dtype: str = "float32"
    backend: str = "auto"
    """Backend of the operators: auto, dense, cpu or cuda."""
    seed: int = 0
    positions: int | None = None
    """Longest context; None takes the model's window."""
    threads: int = 1
    """Threads of each process."""
    timeout_s: float = 120.0
    """After which a prefill is given up."""

    def __post_init__(self) -> None:
        if min(self.processes, self.threads) < 1 or self.dtype not in DTYPES or self.timeout_s <= 0:
            raise ValueError(
                f"{self} is no crew; processes, threads and seconds above 0 and a known dtype are needed"
            )

    @property
    def nccl(self) -> bool:
        """Whether every process has a GPU of its own: then they talk over NCCL, else over gloo."""
        return self.device == "cuda" and torch.cuda.device_count() >= self.processes


def live(rank: int, spec: CrewSpec, rendezvous: str, pipe: Connection) -> None:
    """The main function of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the crew's to handle
    _end_with_parent()
    torch.set_num_threads(spec.threads)
    try:
        model = _join(rank, spec, rendezvous)
        pipe.send(("ready", rank))
        while (job := pipe.recv()) is not None:
            pipe.send(("done", _share(model, job, rank, spec)))
    except EOFError:
        sys.exit(ORPHANED)
    except Exception as error:  # noqa: BLE001  # whatever it is, the crew must hear of it
        pipe.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        sys.exit(1)


def _join(rank: int, spec: CrewSpec, rendezvous: str) -> LlamaModel:
    if not spec.nccl:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    device = spec.device
    if device == "cuda":
        device = f"cuda:{rank if spec.nccl else 0}"
        torch.cuda.set_device(torch.device(device))
    dist.init_process_group(
        "nccl" if spec.nccl else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=spec.processes,
        timeout=timedelta(seconds=spec.timeout_s),
    )
    return load_model(
        spec.model,
        device=device,
        dtype=spec.dtype,
        backend=spec.backend,
        seed=spec.seed,
        positions=spec.positions,
    )


def _share(model: LlamaModel, job: Job, rank: int, spec: CrewSpec) -> Share:
    wire = Wire(rank, model.embedding.device, model.embedding.dtype, spec.timeout_s)
    if isinstance(job, DieJob):
        if rank == job.rank:
            _die(job.how)
        job = job.job
    token, layers, kv = _run(model, job, wire) if rank < job.processes else (None, range(0), [])
    return Share(
        rank=rank,
        first_token=token,
        first_layer=layers.start,
        kv=tuple(_raw(layer) for layer in kv),
        sent_bytes=wire.sent_bytes,
        received_bytes=wire.received_bytes,
        activities=tuple(wire.activities),
    )


def _run(model: LlamaModel, job: CppJob | RunaheadJob, wire: Wire) -> tuple[int | None, range, list[torch.Tensor]]:
    return run_cpp(model, job, wire) if isinstance(job, CppJob) else run_runahead(model, job, wire)


def _raw(tensor: torch.Tensor) -> Any:
    """Any type of numbers as bytes, since numpy knows no bfloat16: one more dimension at the end."""
    return tensor.cpu().contiguous().unsqueeze(-1).view(torch.uint8).numpy()


def _die(how: str) -> None:
    if how == "raise":
        raise RuntimeError("this process was told to fail")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        threading.Event().wait()
    os._exit(3)


def _end_with_parent() -> None:
    """End this process as soon as the one that started it is gone, whatever it is doing."""
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(ORPHANED)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()
