"""Waiting for what other processes do, without a fixed time."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 120.0) -> bool:
    """Whether a condition came true in time."""
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.01)
    return False
