"""Garbage is looked for seldom in a block, and as before after it, whatever happens inside."""

import gc

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
