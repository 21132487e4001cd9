"""Mooncake's own store: it is quiet, ends with its process, and reports what others evict, remove or damage."""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mooncake_lab.store.backends import (
    BlockExistsError,
    BlockNotFoundError,
    DamagedBlockError,
    MooncakeBackend,
    MooncakeMaster,
    StorageError,
    StorageFullError,
    mooncake,
    mooncake_client,
)
from mooncake_lab.store.backends.mooncake_client import load_wheel
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

MIB = 2**20
SIZES = [MIB, 1000]


@pytest.fixture(scope="module")
def client():
    """The client of this process, with a segment of 32 MiB; skipped where the wheel cannot be loaded."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mooncake_client, "_LEASE_MS", 50)
            master = MooncakeMaster()
    except StorageError as error:
        pytest.skip(str(error))
    with master:
        yield master.client(32 * MIB)


@pytest.fixture
def medium(client):
    """A medium of 64 MiB: more than the store has."""
    made = MooncakeBackend(client, 64 * MIB, fingerprint=b"model")
    yield made
    made.close()


def content(number):
    """The layers of a block."""
    draw = np.random.default_rng(number)
    return [draw.integers(0, 256, size, np.uint8) for size in SIZES]


def store(medium, number):
    """A committed block."""
    block = medium.reserve(b"%d" % number, SIZES)
    medium.write(block, content(number))
    medium.commit(block)
    return block


def read(medium, block):
    """Its layers."""
    buffers = [np.empty(size, np.uint8) for size in SIZES]
    medium.read_into(block, buffers)
    return b"".join(buffer.tobytes() for buffer in buffers)


def expected(number):
    """What `read` has to give."""
    return b"".join(layer.tobytes() for layer in content(number))


def wait_until(holds, seconds=20):
    """Whether something comes true in time."""
    ends_s = time.monotonic() + seconds
    while not holds() and time.monotonic() < ends_s:
        time.sleep(0.05)
    return holds()


def is_open(port):
    """Whether somebody listens."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_a_block_is_an_object_of_the_store(medium, client):
    """Mooncake's own interface reads it: its layers one behind the other, under model and key."""
    block = store(medium, 1)
    assert client.api.get(f"{b'model'.hex()}/{block.key.hex()}") == expected(1)


def test_another_model_has_other_objects(medium, client):
    """The same key of two models is two objects; closing one medium leaves the other's."""
    other = MooncakeBackend(client, MIB * 4, fingerprint=b"other")
    mine, theirs = store(medium, 1), other.reserve(b"1", [3])
    other.write(theirs, [b"abc"])
    other.commit(theirs)
    other.close()
    assert read(medium, mine) == expected(1)
    assert client.api.is_exist(f"{b'other'.hex()}/{b'1'.hex()}") == 0


def test_a_full_store_evicts_nothing_of_ours(medium):
    """When the store is full it says so; leases ran out long ago, and every block is still right."""
    held = []

    def fill():
        while True:
            held.append(medium.reserve(b"%d" % len(held), SIZES))
            medium.write(held[-1], content(len(held) - 1))
            medium.commit(held[-1])

    with pytest.raises(StorageFullError, match="no space"):
        fill()
    medium.free(held.pop())  # the one that found no room
    time.sleep(0.2)
    assert len(held) > 10
    assert all(read(medium, block) == expected(number) for number, block in enumerate(held))
    medium.free(held.pop())
    held.append(store(medium, len(held)))


def test_what_another_client_removed_is_not_held(medium, client):
    """Reading it says so, freeing it is fine, and a tier counts a miss."""
    with TieredStore([TierSettings(medium=medium)]) as tiers:
        assert tiers.put(b"key", content(5))
        client.api.remove(f"{b'model'.hex()}/{b'key'.hex()}", True)
        assert tiers.read_into(b"key", [np.empty(size, np.uint8) for size in SIZES]) is None
        assert b"key" not in tiers
        assert tiers.leaked_bytes() == 0
    block = store(medium, 6)
    client.api.remove(f"{b'model'.hex()}/{block.key.hex()}", True)
    with pytest.raises(BlockNotFoundError, match="no more"):
        read(medium, block)
    medium.free(block)
    assert medium.used_bytes == 0


def test_other_bytes_under_a_name_are_damage(medium, client):
    """An object that another client replaced has another checksum, whole and by layer."""
    block = store(medium, 7)
    name = f"{b'model'.hex()}/{block.key.hex()}"
    client.api.remove(name, True)
    assert client.api.put(name, bytes(sum(SIZES))) == 0
    for first, size in enumerate(SIZES):
        with pytest.raises(DamagedBlockError, match="not what was written"):
            medium.read_into(block, [np.empty(size, np.uint8)], first_layer=first)
    with pytest.raises(DamagedBlockError):
        read(medium, block)


def test_what_is_not_checked_is_served_as_it_is(client):
    """Without checksums nobody looks: another object under the name is read as if it were ours."""
    medium = MooncakeBackend(client, 64 * MIB, fingerprint=b"model", checksums=False)
    block = store(medium, 7)
    assert read(medium, block) == expected(7)
    name = f"{b'model'.hex()}/{block.key.hex()}"
    client.api.remove(name, True)
    assert client.api.put(name, bytes(sum(SIZES))) == 0
    assert read(medium, block) == bytes(sum(SIZES))
    medium.close()


class Refusing:
    """The interface of a store that takes blocks, and refuses to remove them a number of times."""

    def __init__(self):
        self.refusals = 0

    def is_exist(self, _name):
        """No client has it."""
        return 0

    def batch_put_from_multi_buffers(self, *_arguments):
        """It is put."""
        return [0]

    def batch_put_session_start(self, *_arguments):
        """A session is open."""
        return [0]

    def batch_put_from_multi_buffer_ranges(self, *_arguments):
        """Bytes were moved."""
        return [1]

    def batch_put_session_revoke(self, _names):
        """It cannot be given up."""
        return [-600]

    def remove(self, _name, _force):
        """It is removed, or not."""
        self.refusals -= 1
        return 0 if self.refusals < 0 else -1


@pytest.mark.parametrize("whole", [True, False], ids=["object", "session"])
def test_what_the_store_does_not_remove_stays_counted(whole, monkeypatch):
    """Removing is tried again; where the store refuses for good it is an error, and freeing can be repeated."""
    monkeypatch.setattr(mooncake, "_RETRY_S", 0)
    api = Refusing()
    medium = MooncakeBackend(SimpleNamespace(api=api, pinned=None), 64 * MIB, fingerprint=b"model")
    block = medium.reserve(b"key", SIZES)
    medium.write(block, content(1)[: 2 if whole else 1])
    api.refusals = 3
    with pytest.raises(StorageError, match="cannot remove block"):
        medium.free(block)
    assert medium.used_bytes == sum(SIZES)
    api.refusals = 2
    medium.free(block)
    assert medium.used_bytes == 0
    medium.close()


def test_closing_says_what_it_leaves_behind(monkeypatch, caplog):
    """A store that refuses to remove is told of in a warning, once, and closing ends."""
    monkeypatch.setattr(mooncake, "_RETRY_S", 0)
    api = Refusing()
    medium = MooncakeBackend(SimpleNamespace(api=api, pinned=None), 64 * MIB, fingerprint=b"model")
    for key in (b"one", b"two"):
        medium.write(medium.reserve(key, SIZES), content(1))
    api.refusals = 100
    medium.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "leaves 2 blocks behind" in caplog.text


def test_a_name_that_another_client_holds_is_refused(medium, client):
    """One key names one content, across clients too; nothing is counted as used."""
    name = f"{b'model'.hex()}/{b'8'.hex()}"
    assert client.api.put(name, b"theirs") == 0
    block = medium.reserve(b"8", SIZES)
    with pytest.raises(BlockExistsError, match="another client"):
        medium.write(block, content(8))
    with pytest.raises(BlockExistsError, match="another client"):
        medium.write(block, content(8)[1:], first_layer=1)
    medium.free(block)
    assert medium.used_bytes == 0
    assert client.api.get(name) == b"theirs"
    client.api.remove(name, True)


CHILD = """
import sys, time
import numpy as np
from mooncake_lab.store.backends import MooncakeClient, MooncakeMaster, MooncakeBackend
"""


def child(script, *arguments):
    """A process that runs a script and prints lines."""
    command = [sys.executable, "-c", CHILD + script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("client")
def test_a_master_ends_with_a_killed_process():
    """SIGKILL leaves no master behind."""
    with child("m = MooncakeMaster(); print(m.address.rpartition(':')[2], flush=True); time.sleep(60)") as process:
        port = int(process.stdout.readline())
        assert is_open(port)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert wait_until(lambda: not is_open(port))


DEAD_MASTER = """
import os, signal, subprocess
master = MooncakeMaster()
client = master.client(16 * 2**20)
medium = MooncakeBackend(client, 2**20, fingerprint=b"m")
block = medium.reserve(b"k", [3]); medium.write(block, [b"abc"]); medium.commit(block)
[inner] = subprocess.run(["pgrep", "-P", str(master._process.pid)], capture_output=True, text=True).stdout.split()
os.kill(int(inner), signal.SIGKILL)
try:
    medium.read_into(block, [bytearray(3)])
except OSError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.usefixtures("client")
def test_a_killed_master_is_an_error_and_logs_nothing():
    """Reading without a master raises OSError, and the wheel writes nothing to stderr all the while."""
    with child(DEAD_MASTER) as process:
        told, noise = process.communicate(timeout=60)
    assert "Mooncake's code" in told
    assert noise == ""


PROVIDER = """
with MooncakeClient(sys.argv[1], 16 * 2**20) as client:
    medium = MooncakeBackend(client, 2**20, fingerprint=b"model")
    block = medium.reserve(b"theirs", [2**19]); medium.write(block, [np.full(2**19, 7, np.uint8)])
    medium.commit(block)
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_provider_is_an_error_at_once():
    """The process whose memory held a block is killed: reading its object fails soon, and gives no bytes."""
    script = """
with MooncakeMaster() as master, master.client(0) as client:
    print(master.address, flush=True)
    name = f"{b'model'.hex()}/{b'theirs'.hex()}"
    sys.stdin.readline()
    print(len(client.api.get(name)), flush=True)
    sys.stdin.readline()
    started_s = time.perf_counter()
    code = client.api.get_into(name, np.zeros(2**19, np.uint8).ctypes.data, 2**19)
    print(code, time.perf_counter() - started_s, flush=True)
"""
    command = [sys.executable, "-c", CHILD + script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as reader:
        address = reader.stdout.readline().strip()
        if not address:
            pytest.skip(reader.stderr.read().strip().splitlines()[-1])
        with child(PROVIDER, address) as provider:
            assert provider.stdout.readline() == "ready\n"
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == f"{2**19}\n"
            provider.kill()
            provider.wait()
        reader.stdin.write("\n")
        reader.stdin.flush()
        code, seconds = reader.stdout.readline().split()
        reader.wait(60)
    assert int(code) < 0
    assert float(seconds) < 15


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ImportError("libibverbs.so.1: cannot open shared object file"),
            "libibverbs.so.1.*apt-get install -y libibv",
        ),
        (ModuleNotFoundError("No module named 'mooncake'"), r"pip install '\.\[mooncake\]'"),
    ],
)
def test_what_is_missing_is_said_with_how_to_install_it(monkeypatch, error, said):
    """A system library and the wheel itself: the sentence names what to install."""

    def refuse(_name):
        raise error

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setitem(os.environ, "MC_LOG_LEVEL", "ERROR")
    with pytest.raises(StorageError, match=said):
        load_wheel()
