"""A file appears complete or not at all, and nothing else is replaced by it."""

import os
import threading

import pytest

from mooncake_lab.core import complete_file


def test_it_has_its_name_when_all_is_written(tmp_path):
    """Until then what was there can be read."""
    path = tmp_path / "log"
    path.write_bytes(b"old")
    with complete_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_failure_leaves_what_was_there(tmp_path):
    """And nothing of what was written."""
    path = tmp_path / "log"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), complete_file(path) as file:
        file.writelines([b"new", None])
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_it_is_never_readable_by_more_than_its_mode_allows(tmp_path):
    """Neither while it is written nor afterwards, also in place of a file that all may read."""
    path = tmp_path / "secret"
    path.write_bytes(b"old")
    path.chmod(0o644)
    with complete_file(path, mode=0o600):
        (partial,) = set(tmp_path.iterdir()) - {path}
        assert partial.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_stays_one(tmp_path):
    """Its target is written."""
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    with complete_file(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_pipe_is_written_to(tmp_path):
    """Who reads it gets the bytes, and it is still a pipe."""
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with complete_file(pipe) as file:
        file.write(b"bytes")
    reader.join(10)
    assert read == [b"bytes"]
    assert pipe.is_fifo()
