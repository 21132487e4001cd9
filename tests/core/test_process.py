"""Garbage is looked for seldom in a block, and as before after it, whatever happens inside."""

import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from mooncake_lab.core import rare_collections


def test_thresholds_come_back():
    """Inside, more objects may pass between two looks; after a failure the old numbers hold again."""
    before = gc.get_threshold()
    inside: list[int] = []

    def fails():
        with rare_collections():
            inside.append(gc.get_threshold()[0])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    assert inside[0] > before[0]
    assert gc.isenabled()
    assert gc.get_threshold() == before


def test_blocks_of_two_threads_that_overlap_leave_nothing():
    """The one that began first ends first: after both, the numbers are those from before both."""
    before = gc.get_threshold()
    first_is_in, both_are_in, first_is_out = (Barrier(2, timeout=10) for _ in range(3))

    def first():
        with rare_collections():
            first_is_in.wait()
            both_are_in.wait()
        first_is_out.wait()

    def second():
        first_is_in.wait()
        with rare_collections():
            both_are_in.wait()
            first_is_out.wait()

    with ThreadPoolExecutor() as threads:
        for each in [threads.submit(first), threads.submit(second)]:
            each.result()
    assert gc.get_threshold() == before
