"""How often Python looks for garbage in cycles while a cluster is simulated."""

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

_EVERY_OBJECTS: Final = 50_000


@contextmanager
def rare_collections() -> Generator[None]:
    """Look for garbage seldom in this block: a run makes records and requests that stay until its end.

    Looking through them again and again takes a quarter of a replay of 12,000 requests. What is garbage is still
    found, a few ten thousand objects later; thresholds are those of before afterwards.
    """
    before = gc.get_threshold()
    gc.set_threshold(_EVERY_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
