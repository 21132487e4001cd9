"""One backend a kind of device, all with the same six operations."""

import torch

from mooncake_lab.engine.backends.cpu_linear import cpu_linear, plain_linear, prepacked_linear
from mooncake_lab.engine.backends.dense import DenseBackend
from mooncake_lab.engine.backends.protocol import Backend, Linear

__all__ = ["Backend", "DenseBackend", "Linear", "choose_backend", "cpu_linear", "plain_linear", "prepacked_linear"]


def choose_backend(device: torch.device, dtype: torch.dtype, name: str = "auto") -> Backend:
    """The backend of a name, or the fastest one for a device and a type of numbers.

    Raises:
        ValueError: when the name is none of auto, dense, cpu, cuda, or does not run on this device.
    """
    if name == "dense":
        return DenseBackend()
    if name in {"auto", "cuda"} and device.type == "cuda":
        from mooncake_lab.engine.backends.cuda import CudaBackend  # needs triton, which only GPU machines have

        return CudaBackend()
    if name in {"auto", "cpu"} and device.type == "cpu" and dtype in {torch.float32, torch.bfloat16}:
        from mooncake_lab.engine.backends.cpu import CpuBackend  # needs numba, which GPU machines may lack

        return CpuBackend()
    raise ValueError(f"no backend {name!r} for {dtype} on {device}; allowed are auto, dense, cpu, cuda")
