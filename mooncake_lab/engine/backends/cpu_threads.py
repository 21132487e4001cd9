"""How many threads a compiled kernel uses: as many as torch, or one."""

import numba
import torch
from numba.core import config as numba_config

_ELEMENTS_ALONE = 1 << 17
"""A kernel over fewer numbers runs in one thread: some 20 microseconds."""


def reserve_threads() -> None:
    """Let numba start its threads, which resets how many torch uses, and set that back."""
    threads = torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(threads)


def share_out(elements: int) -> int:
    """Let the next kernel use as many threads as torch does, or one where waiting for the others costs more.

    Returns their number, for kernels that cut their work by it.

    Both take them from one pool. On a busy machine each kernel that waits for a thread may wait for a time slice.
    """
    most: int = numba_config.NUMBA_NUM_THREADS  # pyright: ignore[reportAttributeAccessIssue]  # numba sets it at import
    threads = min(torch.get_num_threads(), most) if elements > _ELEMENTS_ALONE else 1
    numba.set_num_threads(threads)
    return threads
