"""Processes of this package that end with the process that started them."""

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends (Linux), even if it is stopped or its threads hang.

    The parent's end is that of the thread which started this process.

    Args:
        parent: its process id; this process exits at once where it has another parent by now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
