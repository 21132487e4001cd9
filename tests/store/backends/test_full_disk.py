"""The SSD medium on a file system that is really full: a small one in memory, in a mount namespace of its own."""

import subprocess
import sys

import pytest

LIFE = """
import errno, sys
from pathlib import Path
import numpy as np
from mooncake_lab.store.backends import SsdBackend

room = Path(sys.argv[1])
folder, filler = room / "kv", room / "filler"

def content(key):
    return np.frombuffer(key * 40, np.uint8)

def store(medium, key):
    block = medium.reserve(key, [len(content(key))])
    try:
        medium.write(block, [content(key)])
        medium.commit(block)
    except OSError:
        medium.free(block)
        raise
    return block

def are_right(medium, blocks):
    for block in blocks:
        found = np.empty(block.size_bytes, np.uint8)
        medium.read_into(block, [found])
        assert found.tobytes() == content(block.key).tobytes()

medium = SsdBackend(folder, 2**20, fingerprint=b"model")
kept = [store(medium, b"kept %03d" % number) for number in range(20)]
with filler.open("wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError as error:
        assert error.errno == errno.ENOSPC
refused = 0
for number in range(80):
    key = b"%03d" % number + bytes(100)
    try:
        kept.append(store(medium, key))
    except OSError as error:
        refused += 1
        assert "pace" in str(error), error
assert refused, "the index never had to grow"
are_right(medium, kept)
filler.unlink()
kept += [store(medium, b"after %03d" % number) for number in range(20)]
are_right(medium, kept)
medium.close()
medium = SsdBackend(folder, None, fingerprint=b"model")
assert medium.index_was_whole
assert {block.key for block in medium.blocks()} == {block.key for block in kept}
are_right(medium, medium.blocks())
medium.close()
print("refused", refused)
"""


def test_a_full_file_system_refuses_and_loses_nothing(tmp_path):
    """What does not fit is an `OSError`; what was committed before is served, also after a reopening."""
    (tmp_path / "life.py").write_text(LIFE, encoding="ascii")
    mounted = 'mount -t tmpfs -o size=1536k none "$1" || exit 77; exec "$2" "$3" "$1"'
    inside = ["sh", "-c", mounted, "sh", tmp_path / "small", sys.executable, tmp_path / "life.py"]
    (tmp_path / "small").mkdir()
    try:
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", *inside],  # wherever it is
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode == 77 or (done.returncode and "unshare" in done.stderr):
        pytest.skip(f"no mount namespace to be had: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused ")
