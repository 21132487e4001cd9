"""Rooms of an SSD folder that a kill, a bad sector or a stranger left in a state: looked at, and repaired."""

import errno

import numpy as np
import pytest

from mooncake_lab.cli.store import _verified
from mooncake_lab.store.backends import FolderInUseError, SsdBackend, ssd_folder, verify_folder
from mooncake_lab.store.backends.ssd_folder import FolderLock, index_path, model_folder
from mooncake_lab.store.backends.ssd_slab import Slab

PAGE = 4096
SIZES = (5000, 100)
"""Four pages a block, with its header."""


def filled(folder, model, blocks=4):
    """A closed folder with blocks of a model in it; its room."""
    medium = SsdBackend(folder, 100 * PAGE, fingerprint=model)
    for number in range(blocks):
        block = medium.reserve(b"%d" % number, SIZES)
        medium.write(block, [np.full(size, number, np.uint8) for size in SIZES])
        medium.commit(block)
    medium.close()
    return model_folder(folder, model)


def unborn(folder, model):
    """A room as a kill leaves it that comes between the making of the slab and its size."""
    room = model_folder(folder, model)
    room.mkdir(parents=True)
    (room / "slab").touch()
    return room


def flip(path, offset):
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_an_empty_slab_is_an_empty_sound_room(tmp_path):
    """There is nothing to repair in it; rooms after it are repaired, and it can be opened as ever."""
    unborn(tmp_path, b"a")
    room = filled(tmp_path, b"b")
    flip(room / "slab", PAGE + 9)
    empty, damaged = verify_folder(tmp_path, repair=True)
    assert empty.is_sound
    assert (empty.blocks, empty.repaired, damaged.damaged, damaged.repaired) == (0, False, (b"0".hex(),), True)
    assert all(report.is_sound for report in verify_folder(tmp_path))
    assert len(filled(tmp_path, b"a").name) == 2


def test_a_slab_that_lost_its_bytes_is_repaired(tmp_path):
    """An index of blocks over a slab of 0 bytes is damage; after a repair the room is empty and sound."""
    room = filled(tmp_path, b"a")
    (room / "slab").write_bytes(b"")
    (report,) = verify_folder(tmp_path, repair=True)
    assert (report.blocks, len(report.damaged), report.repaired) == (4, 4, True)
    (report,) = verify_folder(tmp_path)
    assert report.is_sound
    assert report.blocks == 0


def test_a_room_that_cannot_be_read_does_not_stop_the_others(tmp_path, monkeypatch):
    """What is wrong with it is said in its report; the next room is repaired all the same."""
    filled(tmp_path, b"a")
    flip(filled(tmp_path, b"b") / "slab", PAGE + 9)
    plain = Slab.__init__

    def refuse(slab, path, *given):
        if path.parent.name == b"a".hex():
            raise PermissionError(errno.EACCES, "Permission denied")
        plain(slab, path, *given)

    monkeypatch.setattr(Slab, "__init__", refuse)
    denied, damaged = verify_folder(tmp_path, repair=True)
    assert "Permission denied" in denied.trouble
    assert "the blocks of this model could not be read, or not repaired: " in _verified(denied)
    assert not denied.is_sound
    assert damaged.repaired


def test_nobody_opens_the_folder_between_verify_and_repair(tmp_path, monkeypatch):
    """One lock is held from the first look to the last repair."""
    flip(filled(tmp_path, b"a") / "slab", PAGE + 9)
    plain, tried = ssd_folder._repair, []

    def repair(*given):
        with pytest.raises(FolderInUseError):
            FolderLock(tmp_path)
        tried.append(given)
        plain(*given)

    monkeypatch.setattr(ssd_folder, "_repair", repair)
    verify_folder(tmp_path, repair=True)
    assert len(tried) == 1
    FolderLock(tmp_path).release()


def test_a_repair_finds_what_only_the_slab_knows(tmp_path):
    """With its index gone, a room has all its blocks again, without those that are damaged."""
    room = filled(tmp_path, b"a")
    flip(room / "slab", PAGE + 9)
    index_path(room).unlink()
    assert verify_folder(tmp_path, repair=True)[0].repaired
    (report,) = verify_folder(tmp_path)
    assert report.is_sound
    assert report.blocks == 3
    medium = SsdBackend(tmp_path, None, fingerprint=b"a")
    assert medium.index_was_whole
    for block in medium.blocks():
        found = np.empty(5000, np.uint8)
        medium.read_into(block, [found])
        assert set(found) == {int(block.key)}
    medium.close()


def test_a_bad_sector_does_not_lock_the_folder(tmp_path, monkeypatch):
    """A slab with a page that cannot be read is opened without its index; blocks far from that page are served."""
    room = filled(tmp_path, b"a", blocks=5)
    index_path(room).unlink()
    plain = Slab.read

    def read(slab, offset_bytes, layers):
        if offset_bytes <= 7 * PAGE < offset_bytes + sum(layer.nbytes for layer in layers):
            raise OSError(errno.EIO, "injected: a bad sector")
        plain(slab, offset_bytes, layers)

    monkeypatch.setattr(Slab, "read", read)
    monkeypatch.setattr(ssd_folder, "_CHUNK_BYTES", 6 * PAGE)
    medium = SsdBackend(tmp_path, None, fingerprint=b"a")
    assert [block.key for block in medium.blocks()] == [b"0", b"3", b"4"]
    medium.close()
