"""One backend per kind of device.

All have the same operations of a layer; a backend may also run a whole decode step.
"""

import importlib.util

import torch

from mooncake_lab.engine.backends.dense import DenseBackend
from mooncake_lab.engine.backends.protocol import Backend, Linear

__all__ = ["Backend", "DenseBackend", "Linear", "choose_backend"]


def choose_backend(device: torch.device, dtype: torch.dtype, name: str = "auto") -> Backend:
    """The backend of a name, or (auto) the fastest one this machine has for a device and a type of numbers.

    Results name the backend that ran: on a CPU without numba, or in float16, auto is the dense one.

    Raises:
        ValueError: when the name is not auto, dense, cpu or cuda, or does not run on this device.
    """
    if name == "dense":
        return DenseBackend()
    if name in {"auto", "cuda"} and device.type == "cuda":
        from mooncake_lab.engine.backends.cuda import CudaBackend  # needs triton, which only GPU machines have

        return CudaBackend()
    compiled = dtype in {torch.float32, torch.bfloat16} and importlib.util.find_spec("numba") is not None
    if name in {"auto", "cpu"} and device.type == "cpu" and compiled:
        from mooncake_lab.engine.backends.cpu import CpuBackend  # needs numba, which GPU machines may lack

        return CpuBackend()
    if name == "auto" and device.type == "cpu":
        return DenseBackend()
    raise ValueError(f"no backend {name!r} for {dtype} on {device}; allowed are auto, dense, cpu, cuda")
