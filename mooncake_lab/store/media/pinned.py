"""Pinned memory: an arena that CUDA copies to and from at full speed, and beside its computation."""

import sys
from typing import Any, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.store.media.medium import MediumError


@final
class Pinned:
    """An arena that is registered with CUDA until `release`."""

    __slots__ = ("_address", "_runtime")

    def __init__(self, runtime: Any, address: int) -> None:
        self._runtime = runtime
        self._address = address

    def release(self) -> None:
        """Unregister the arena; it stays ordinary memory."""
        self._runtime.cudaHostUnregister(self._address)


def pin(arena: npt.NDArray[np.uint8], *, required: bool | None) -> Pinned | None:
    """Register an arena with CUDA.

    Args:
        arena: shape (bytes,), page aligned.
        required: true insists, false leaves it alone; `None` pins where the program already uses torch and CUDA is
            there, so that a store alone never has to import torch.

    Raises:
        MediumError: when it is required and impossible, with CUDA's own reason.
    """
    if required is False or (required is None and "torch" not in sys.modules):
        return None
    import torch

    if not torch.cuda.is_available():
        if required:
            raise MediumError("pinned memory was asked for, and torch finds no CUDA device here")
        return None
    runtime: Any = torch.cuda.cudart()
    status = runtime.cudaHostRegister(arena.ctypes.data, arena.nbytes, 0)
    if int(status) == 0:
        return Pinned(runtime, arena.ctypes.data)
    if required:
        raise MediumError(f"CUDA refused to pin {arena.nbytes} bytes: error {int(status)}")
    return None
