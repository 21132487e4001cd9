"""Where workers are born: a process that has loaded torch and the model once, and forks.

A worker is then there in milliseconds instead of the seconds that torch takes to load, also when it replaces one
that was killed, and CPU workers share the memory of the weights. Run by `birth.Nursery`, never by hand.
"""

import gc
import logging
import os
import signal
import socket
import sys

import msgspec
import torch

from mooncake_lab.engine import LlamaModel, load_model, warm_up
from mooncake_lab.serving.birth import MOST_BYTES, Cradle
from mooncake_lab.serving.spec import WorkerSpec
from mooncake_lab.serving.worker import die_with_parent, live_and_die


def main() -> None:
    """Prepare, say so, and fork a worker for each message until the cluster is gone."""
    logging.basicConfig(format="%(message)s")
    home = socket.socket(fileno=int(sys.argv[1]))
    cradle = msgspec.json.decode(home.recv(MOST_BYTES), type=Cradle)
    torch.set_num_threads(cradle.threads)
    try:
        model = _load(cradle)
    except (OSError, ValueError) as error:
        home.send(str(error).encode()[:MOST_BYTES])
        return
    gc.freeze()  # what is here is the workers' too: counting references must not copy its pages
    home.send(b"ready")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    while True:
        told, handed, _, _ = socket.recv_fds(home, MOST_BYTES, 1)
        if not told:
            os._exit(0)  # tidying torch up takes seconds, and nobody would see it
        if os.fork() == 0:
            die_with_parent()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            home.close()
            spec = msgspec.msgpack.decode(told, type=WorkerSpec)
            own = model or load_model(
                spec.model,
                device=_place(spec),
                dtype=spec.dtype,
                backend=spec.backend,
                seed=spec.seed,
                positions=spec.max_request_tokens,
            )
            live_and_die(socket.socket(fileno=handed[0]), spec, own)
        for descriptor in handed:
            os.close(descriptor)


def _load(cradle: Cradle) -> LlamaModel | None:
    """The model, warm, if it runs on the CPU; CUDA does not survive a fork, so each worker loads its own."""
    wants_cuda = cradle.device.startswith("cuda") or (cradle.device == "auto" and torch.cuda.is_available())
    if wants_cuda:
        return None
    model = load_model(
        cradle.model,
        device=cradle.device,
        dtype=cradle.dtype,
        backend=cradle.backend,
        seed=cradle.seed,
        positions=cradle.positions,
    )
    warm_up(model)
    return model


def _place(spec: WorkerSpec) -> str:
    """The GPU of a worker: in turns, so that several may share one."""
    return f"cuda:{spec.index % torch.cuda.device_count()}" if spec.device == "auto" else spec.device


if __name__ == "__main__":
    main()
