"""The DRAM arena: shared with other processes, pinned where asked."""

import subprocess
import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from mooncake_lab.store.media import DramMedium, MediumError, SharedArena

CHILD = """
import sys, msgspec
from mooncake_lab.store.media import Reservation, SharedArena
block = msgspec.json.decode(sys.argv[2], type=Reservation)
with SharedArena(sys.argv[1]) as arena:
    sys.stdout.buffer.write(b"".join(layer.tobytes() for layer in arena.layers(block)))
"""


def stored(medium):
    """A block of two layers, and its bytes."""
    layers = [np.arange(5000, dtype=np.uint16), np.arange(7, dtype=np.uint8)]
    block = medium.reserve(b"key", [layer.nbytes for layer in layers])
    medium.write(block, layers)
    medium.commit(block)
    return block, b"".join(layer.tobytes() for layer in layers)


def test_another_process_reads_a_shared_block():
    """A process that is sent a reservation reads its bytes from the same memory."""
    medium = DramMedium(2**16, shared=True)
    block, data = stored(medium)
    told = msgspec.json.encode(block).decode()
    command = [sys.executable, "-c", CHILD, medium.shared_path, told]
    assert subprocess.run(command, check=True, capture_output=True, timeout=60).stdout == data
    medium.close()


def test_a_shared_block_cannot_be_written_by_readers():
    """What a reader maps is read-only."""
    medium = DramMedium(2**16, shared=True)
    block, _ = stored(medium)
    with SharedArena(medium.shared_path) as arena, pytest.raises(ValueError, match="read-only"):
        arena.layers(block)[0][:] = 0
    medium.close()


def test_a_private_arena_cannot_be_attached():
    """It has no path, and says so."""
    with pytest.raises(MediumError, match="shared=True"):
        _ = DramMedium(2**16).shared_path


def test_pinning_without_a_device_is_refused(monkeypatch):
    """Where pinned memory is required and CUDA is not there, the arena is not made."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    with pytest.raises(MediumError, match="no CUDA device"):
        DramMedium(2**16, pinned=True)
    assert not DramMedium(2**16).is_pinned


@pytest.mark.gpu
def test_a_pinned_arena_copies_to_the_device():
    """Where CUDA is, an arena is pinned, holds the same bytes, and is released."""
    import torch

    medium = DramMedium(2**16, pinned=True)
    assert medium.is_pinned
    block, data = stored(medium)
    first = torch.from_numpy(medium.layers(block)[0]).to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert first.cpu().numpy().tobytes() == data[:10000]
    medium.close()
    assert not medium.is_pinned


def test_the_store_does_not_import_torch():
    """Media and tiers, DRAM included, are had without torch."""
    code = (
        "import sys, mooncake_lab.store.tiers; from mooncake_lab.store.media import DramMedium;"
        " DramMedium(65536); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
