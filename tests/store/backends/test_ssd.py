"""The SSD medium: what survives, what is noticed, and who is kept out."""

import errno
import mmap
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_lab.store.backends import (
    BlockNotFoundError,
    DamagedBlockError,
    FolderInUseError,
    SsdBackend,
    SuspectBlockError,
)
from mooncake_lab.store.backends import ssd as ssd_module
from mooncake_lab.store.backends.ssd_slab import Slab

PAGE = 4096
CAPACITY = 100 * PAGE
MODEL = b"model"


def content(key, sizes):
    """The layers that a key stands for."""
    draw = np.random.default_rng(list(key))
    return [draw.integers(0, 256, size, np.uint8) for size in sizes]


def store(medium, key, sizes=(5000, 100)):
    """A committed block."""
    block = medium.reserve(key, sizes)
    write_and_commit(medium, block)
    return block


def write_and_commit(medium, block):
    """All layers of a reservation, and the commit."""
    medium.write(block, content(block.key, block.layer_bytes))
    medium.commit(block)


def is_right(medium, block):
    """Whether a block is served as it was written; false where the medium says that it is damaged."""
    buffers = [np.empty(size, np.uint8) for size in block.layer_bytes]
    try:
        medium.read_into(block, buffers)
    except DamagedBlockError:
        return False
    truth = content(block.key, block.layer_bytes)
    assert [buffer.tobytes() for buffer in buffers] == [layer.tobytes() for layer in truth]
    return True


def opened(folder, capacity=CAPACITY, model=MODEL, **more):
    """The medium in a folder."""
    return SsdBackend(folder, capacity, fingerprint=model, **more)


def abandon(medium):
    """Let go of a medium as a kill does: nothing is written any more, only the lock goes."""
    medium._slab.close()
    os.close(medium._folder_lock)
    medium._is_open = False


def filled(folder, blocks=8, model=MODEL):
    """A closed folder with some blocks of four pages each."""
    medium = opened(folder, model=model)
    for number in range(blocks):
        store(medium, b"%d" % number)
    medium.close()


def flip(path, offset, bit=0):
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


class Refusing:
    """Refuses one operation, once or for ever."""

    def __init__(self, operation):
        self.operation = operation
        self.on = False

    def __call__(self, operation):
        """Raise what a full device does."""
        if self.on and operation == self.operation:
            raise OSError(errno.ENOSPC, "injected")


KILLED = """
import sys, numpy as np
from pathlib import Path
from mooncake_lab.store.backends import SsdBackend
medium = SsdBackend(Path(sys.argv[1]), 100 * 4096, fingerprint=b"model")
number, held = 0, []
while True:
    key = b"%d" % number
    draw = np.random.default_rng(list(key))
    if len(held) == 12:
        oldest = held.pop(0)
        print("freeing", oldest.key.decode(), flush=True)
        medium.free(oldest)
    block = medium.reserve(key, (5000, 8192, 100))
    medium.write(block, [draw.integers(0, 256, size, np.uint8) for size in (5000, 8192, 100)])
    medium.commit(block)
    held.append(block)
    print("held", key.decode(), flush=True)
    number += 1
"""


@pytest.mark.parametrize("after", [3, 17, 40])
def test_a_killed_writer_loses_nothing(tmp_path, after):
    """Kill -9 amid writes and frees: all that was committed and not freed is bit-exact, and none is torn."""
    held = set()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        for _ in range(after):
            word, number = writer.stdout.readline().split()
            (held.add if word == "held" else held.discard)(number.encode())
        writer.kill()
        for line in writer.stdout.read().split("\n")[:-1]:  # the last one may be cut off
            word, number = line.split()
            (held.add if word == "held" else held.discard)(number.encode())
    medium = opened(tmp_path)
    blocks = list(medium.blocks())
    assert held <= {block.key for block in blocks}
    assert all(is_right(medium, block) for block in blocks)
    assert medium.used_bytes == sum(medium.footprint_bytes(block.key, block.layer_bytes) for block in blocks)
    medium.close()


def test_a_second_process_is_told_who_has_the_folder(tmp_path):
    """The folder of a live medium cannot be opened, here or elsewhere; closed, it can."""
    medium = opened(tmp_path)
    with pytest.raises(FolderInUseError, match=rf"is open in process {os.getpid()}"):
        opened(tmp_path)
    code = (
        "import sys; from pathlib import Path; from mooncake_lab.store.backends import SsdBackend\n"
        "SsdBackend(Path(sys.argv[1]), 409600, fingerprint=b'other')"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    other = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert f"FolderInUseError: {tmp_path} is open in process {os.getpid()}" in other.stderr
    medium.close()
    opened(tmp_path).close()


def test_models_do_not_see_each_other(tmp_path):
    """A block of one model is not found by another, not even when its folder is given the other's name."""
    filled(tmp_path, 3)
    other = opened(tmp_path, model=b"other")
    assert list(other.blocks()) == []
    other.close()
    (tmp_path / b"other".hex()).rename(tmp_path / "elsewhere")
    (tmp_path / MODEL.hex()).rename(tmp_path / b"other".hex())
    other = opened(tmp_path, model=b"other")
    assert list(other.blocks()) == []
    other.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4), bit=st.integers(0, 7))
def test_flips_cost_the_blocks_that_they_hit(tmp_path, places, bit):
    """Wherever a closed slab is hit, headers included, every other block is there and right, and none is wrong."""
    folder = tmp_path / f"{places}-{bit}"
    filled(folder)
    medium = opened(folder)
    blocks = list(medium.blocks())
    medium.close()
    used_bytes = 8 * 4 * PAGE
    offsets = {int(place * used_bytes) for place in places}
    for offset in offsets:
        flip(folder / MODEL.hex() / "slab", offset, bit)
    safe = {block.key for block in blocks if not any(0 <= at - block.offset_bytes < 4 * PAGE for at in offsets)}
    medium = opened(folder)
    assert safe <= {block.key for block in medium.blocks() if is_right(medium, block)}
    for block in list(medium.blocks()):
        medium.free(block)
    assert medium.used_bytes == 0
    assert all(is_right(medium, store(medium, block.key)) for block in blocks)
    medium.close()


def test_a_freed_block_does_not_come_back(tmp_path):
    """Closed or killed, and opened again: exactly the blocks are there that were committed and not freed."""
    draw = np.random.default_rng(1)
    held = {}
    for number in range(60):
        medium = opened(tmp_path, 80 * PAGE)
        assert {block.key: block for block in medium.blocks()} == held
        assert all(is_right(medium, block) for block in medium.blocks())
        while len(held) > draw.integers(0, 5):
            medium.free(held.pop(draw.choice(sorted(held))))
        block = store(medium, b"%d" % number, tuple(draw.integers(1, 9000, draw.integers(1, 4)).tolist()))
        held[block.key] = block
        medium.write(medium.reserve(b"open", [100]), [bytes(100)])
        medium.free(store(medium, b"short-lived"))
        if number % 2:
            medium.close()
        else:
            abandon(medium)


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_freed_block_whose_header_stays_is_freed_later(tmp_path, operation):
    """While the device refuses, its space is not used again; a commit that failed leaves no block behind."""
    refuse = Refusing(operation)
    medium = opened(tmp_path, 8 * PAGE, before=refuse)
    first = store(medium, b"first")
    failing = medium.reserve(b"failing", [5000, 100])
    medium.write(failing, content(b"failing", failing.layer_bytes))
    refuse.on = True
    with pytest.raises(OSError, match="injected"):
        medium.commit(failing)
    medium.free(failing, first)
    assert medium.used_bytes == 0
    refuse.on = False
    second = [store(medium, b"%d" % number) for number in range(2)]
    abandon(medium)
    medium = opened(tmp_path, 8 * PAGE)
    assert list(medium.blocks()) == second
    assert all(is_right(medium, block) for block in second)
    medium.close()


def test_a_bad_sector_costs_the_block_that_it_is_in(tmp_path, monkeypatch):
    """A slab with a page that cannot be read is opened, and every other block is served."""
    filled(tmp_path)
    plain = Slab.read

    def read(slab, offset_bytes, layers):
        if offset_bytes <= 8 * PAGE < offset_bytes + sum(layer.nbytes for layer in layers):
            raise OSError(errno.EIO, "injected: a bad sector")
        plain(slab, offset_bytes, layers)

    monkeypatch.setattr(Slab, "read", read)
    medium = opened(tmp_path)
    assert [block.key for block in medium.blocks()] == [b"0", b"1", b"3", b"4", b"5", b"6", b"7"]
    assert all(is_right(medium, block) for block in medium.blocks())
    medium.close()


def test_a_header_that_cannot_be_overwritten_costs_its_own_space_only(tmp_path, monkeypatch):
    """Other blocks are committed and freed as before, and the space is used again when the page works again."""
    medium = opened(tmp_path)
    stuck, other = store(medium, b"stuck"), store(medium, b"other")
    plain, broken = ssd_module.clear_header, True

    def clear_header(slab, block):
        if broken and block.offset_bytes == stuck.offset_bytes:
            raise OSError(errno.EIO, "injected: a page that cannot be written")
        plain(slab, block)

    monkeypatch.setattr(ssd_module, "clear_header", clear_header)
    medium.free(stuck)
    later = [store(medium, b"%d" % n) for n in range(4)]
    medium.free(other)
    later.append(store(medium, b"last"))
    assert all(is_right(medium, block) for block in later)
    assert stuck.offset_bytes not in {block.offset_bytes for block in later}
    broken = False
    store(medium, b"one more")
    again = [store(medium, b"again %d" % n) for n in range(19)]
    assert stuck.offset_bytes in {block.offset_bytes for block in again}
    medium.close()


def test_a_slab_only_grows(tmp_path):
    """It may be opened larger; smaller is refused, and so is one of less than a page."""
    with pytest.raises(ValueError, match="at least one aligned run must fit"):
        opened(tmp_path, PAGE - 1)
    filled(tmp_path)
    with pytest.raises(ValueError, match="can only grow"):
        opened(tmp_path, CAPACITY // 2)
    medium = opened(tmp_path, 2 * CAPACITY)
    assert medium.capacity_bytes == 2 * CAPACITY
    assert len(list(medium.blocks())) == 8
    medium.close()
    with pytest.raises(ValueError, match="allowed are 1 to 64"):
        opened(tmp_path, model=b"")


LARGE = (200_000, 4096, 131_072, 524_288, 100, 65_536, 65_536, 65_536)
"""Layers of a block that is written and read in parts, with a helper thread."""


def test_a_large_block_is_whole_after_a_reopening(tmp_path):
    """Written in two parts at once, it is read whole and by layers, and a flip in any layer is noticed."""
    medium = opened(tmp_path, 2**23)
    store(medium, b"large", LARGE)
    medium.close()
    medium = opened(tmp_path, 2**23)
    (block,) = medium.blocks()
    assert is_right(medium, block)
    truth = content(b"large", LARGE)
    before = PAGE
    for first, size in enumerate(LARGE):
        buffers = [np.empty(size, np.uint8) for size in LARGE[first:]]
        medium.read_into(block, buffers, first_layer=first)
        assert all(np.array_equal(*pair) for pair in zip(buffers, truth[first:], strict=True))
        offset = block.offset_bytes + before + size - 1
        flip(tmp_path / MODEL.hex() / "slab", offset)
        assert not is_right(medium, block)
        flip(tmp_path / MODEL.hex() / "slab", offset)
        before += -(-size // PAGE) * PAGE
    medium.close()


def test_a_file_system_that_refuses_direct_writes_is_told_once(tmp_path, monkeypatch, caplog):
    """O_DIRECT that opens but cannot be used: writes go through the page cache, and a warning says so, once."""
    medium = opened(tmp_path)
    if not medium._slab.writes_directly:
        medium.close()
        pytest.skip("this file system opens nothing with O_DIRECT")
    direct, pwritev = medium._slab._direct, os.pwritev

    def refuse(file, *more):
        if file == direct:
            raise OSError(errno.EINVAL, "injected")
        return pwritev(file, *more)

    monkeypatch.setattr(os, "pwritev", refuse)
    layers = [np.frombuffer(mmap.mmap(-1, PAGE), np.uint8)]
    for number in range(3):
        block = medium.reserve(b"%d" % number, [PAGE])
        layers[0][:] = number
        medium.write(block, layers)
        medium.commit(block)
        found = bytearray(PAGE)
        medium.read_into(block, [found])
        assert found == bytes([number]) * PAGE
    assert not medium._slab.writes_directly
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    medium.close()


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_failed_commit_commits_nothing(tmp_path, operation):
    """When the device refuses, the block is not held; freed, its room is used again, also after a reopening."""
    refuse = Refusing(operation)
    medium = opened(tmp_path, before=refuse)
    kept = store(medium, b"kept")
    refuse.on = True
    block = medium.reserve(b"key", [5000])
    with pytest.raises(OSError, match="injected"):
        write_and_commit(medium, block)
    with pytest.raises(BlockNotFoundError):
        medium.read_into(block, [bytearray(5000)])
    medium.free(block)
    refuse.on = False
    again = store(medium, b"key", [5000])
    assert is_right(medium, again)
    assert is_right(medium, kept)
    medium.close()
    medium = opened(tmp_path)
    assert [block.key for block in medium.blocks()] == [b"kept", b"key"]
    assert all(is_right(medium, block) for block in medium.blocks())
    medium.close()


def test_what_a_lost_sync_may_have_lost_is_never_committed(tmp_path):
    """A device says once that it lost pages: no block that was being written then is ever acknowledged."""
    refuse = Refusing("sync")
    medium = opened(tmp_path, before=refuse)
    whole, half, fresh, failing = (medium.reserve(key, [5000, 100]) for key in (b"a", b"b", b"c", b"d"))
    medium.write(whole, content(b"a", [5000, 100]))
    medium.write(half, content(b"b", [5000, 100])[:1])
    refuse.on = True
    with pytest.raises(OSError, match="injected"):
        write_and_commit(medium, failing)
    refuse.on = False
    for again in (
        lambda: medium.write(half, content(b"b", [5000, 100])[1:], first_layer=1),
        lambda: medium.commit(whole),
        lambda: medium.commit(failing),
    ):
        with pytest.raises(SuspectBlockError, match="free it and write it anew"):
            again()
    write_and_commit(medium, fresh)
    assert [block.key for block in medium.blocks()] == [b"c"]
    medium.free(whole, half, failing)
    assert all(is_right(medium, store(medium, key)) for key in (b"a", b"b", b"d"))
    medium.close()


def test_closing_waits_for_what_is_being_read_or_written(tmp_path):
    """No operation finds its file closed, or another file under the same number."""
    entered, leave = threading.Event(), threading.Event()

    def linger(operation):
        if operation == "read":
            entered.set()
            assert leave.wait(10)

    slab = Slab(tmp_path / "slab", CAPACITY, linger)
    page = np.arange(PAGE, dtype=np.uint8)
    slab.write(0, [page])
    found = np.empty(PAGE, np.uint8)
    reader = threading.Thread(target=slab.read, args=(0, [found]))
    reader.start()
    assert entered.wait(10)
    closer = threading.Thread(target=slab.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    leave.set()
    reader.join(10)
    closer.join(10)
    assert not closer.is_alive()
    assert np.array_equal(found, page)
    for operation in (lambda: slab.read(0, [found]), lambda: slab.write(0, [page]), slab.sync):
        with pytest.raises(OSError, match="closed"):
            operation()
    slab.close()


@pytest.mark.parametrize("step", ["SsdBackend._clear_freed", "Slab.close"])
def test_an_interrupt_while_closing_leaves_the_folder_to_others(tmp_path, monkeypatch, step):
    """Ctrl-C ends one step of closing, and leaves out none of the others."""

    def interrupt(_self):
        raise KeyboardInterrupt

    medium = opened(tmp_path)
    kept = store(medium, b"kept")
    owner, method = step.split(".")
    with monkeypatch.context() as patch:
        patch.setattr({"SsdBackend": SsdBackend, "Slab": Slab}[owner], method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            medium.close()
    again = opened(tmp_path)
    assert is_right(again, kept)
    again.close()
    medium.close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    """No room for the slab, or no folder to be had: an `OSError`, and the lock is free again."""
    with pytest.raises(OSError, match=r"No space|too large|Invalid"):
        opened(tmp_path, 2**60)
    opened(tmp_path / "other").close()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match=r"exists|directory"):
        opened(tmp_path / "file")
    medium = opened(tmp_path, model=b"second")
    medium.close()
