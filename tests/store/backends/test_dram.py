"""The DRAM arena: filled in place, and pinned where asked."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from mooncake_lab.store.backends import DramBackend, StorageError


def test_pinning_without_a_device_is_refused(monkeypatch):
    """Where pinned memory is required and CUDA is not there, the arena is not made."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    with pytest.raises(StorageError, match="no CUDA device"):
        DramBackend(2**16, pinned=True)
    DramBackend(2**16).close()


def test_the_store_does_not_import_torch():
    """Media and tiers, DRAM included, are had without torch."""
    code = (
        "import sys, mooncake_lab.store.tiered_store; from mooncake_lab.store.backends import DramBackend;"
        " DramBackend(65536); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_layers_are_filled_in_place():
    """What was put into the write buffers is there without a copy; other memory of the arena is copied."""
    medium = DramBackend(2**16)
    first, second = (medium.reserve(key, [4096, 100]) for key in (b"first", b"second"))
    buffers = medium.write_buffers(first, 0, 2)
    for number, buffer in enumerate(buffers):
        buffer[:] = number + 1
    medium.write(first, buffers)
    medium.write(second, buffers)
    buffers[0][:] = 7
    medium.commit(first, second)
    assert [set(layer.tolist()) for layer in medium.read(first, 0, 2)] == [{7}, {2}]
    assert [set(layer.tolist()) for layer in medium.read(second, 0, 2)] == [{1}, {2}]
    medium.close()
