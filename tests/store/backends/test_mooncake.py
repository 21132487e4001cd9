"""Mooncake Store as a pool: what one client puts every client finds, and nobody gets wrong bytes."""

import contextlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from mooncake_lab.net.mooncake_wheel import MooncakeMaster
from mooncake_lab.store.backends import (
    BlockExistsError,
    BlockNotFoundError,
    DamagedBlockError,
    DramBackend,
    MooncakeClient,
    MooncakeStore,
)
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

LAYERS = (300, 500)


pytestmark = pytest.mark.wheel


@pytest.fixture(scope="module")
def client():
    """A process may have one client; both pools of a test share it."""
    with MooncakeMaster() as master, MooncakeClient(master.address, 16 * 2**20) as client:
        yield client


def pool_of(client, fingerprint=b"model"):
    return MooncakeStore(client, 2**20, LAYERS, fingerprint=fingerprint)


def block_of(seed):
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 256, size, dtype=np.uint8) for size in LAYERS]


def put(pool, key, layers):
    space = pool.reserve(key, LAYERS)
    for layer in (1, 0):
        pool.write(space, [layers[layer]], first_layer=layer)
    pool.commit(space)


def read(pool, block, first=0, count=2):
    buffers = [np.zeros(size, np.uint8) for size in LAYERS[first : first + count]]
    pool.read_into(block, buffers, first_layer=first)
    return buffers


def test_what_one_stores_another_finds_bit_by_bit(client):
    """Keys are found in their order and read whole or layer by layer; other models find nothing."""
    one, other, layers = pool_of(client), pool_of(client), block_of(1)
    put(one, b"a", layers)
    put(one, b"b", block_of(2))
    assert [block.key for block in other.find([b"b", b"missing", b"a"])] == [b"b", b"a"]
    [found] = other.find([b"a"])
    for part in (read(other, found), [*read(other, found, 0, 1), *read(other, found, 1, 1)]):
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(part, layers, strict=True))
    assert pool_of(client, b"another model").find([b"a"]) == []
    with pytest.raises(BlockExistsError):
        other.reserve(b"a", LAYERS)
    other.free(found)
    assert one.find([b"a"]) == []
    with pytest.raises(BlockNotFoundError):
        read(one, found)


def test_bytes_that_changed_are_refused(client):
    """An object whose bytes are not those that were put is damaged for every client."""
    pool = pool_of(client)
    put(pool, b"c", block_of(3))
    [found] = pool.find([b"c"])
    content = np.zeros(pool.footprint_bytes(b"c", LAYERS), np.uint8)
    client.api.get_into(pool._object(found), content.ctypes.data, content.nbytes)
    client.api.remove(pool._object(found), True)
    content[10] ^= 1
    client.api.put_from(pool._object(found), content.ctypes.data, content.nbytes)
    with pytest.raises(DamagedBlockError):
        read(pool, found)


def over_dram(pool):
    """A store of DRAM over a pool."""
    return TieredStore([TierSettings(medium=DramBackend(2**20)), TierSettings(medium=pool)])


def test_blocks_from_the_pool_have_the_position_in_their_prompt(client):
    """DRAM has blocks 0, 1 and 3 of a prompt; those that come from the pool are 2, 4 and 5 in DRAM, too."""
    keys = [b"prompt/%d" % number for number in range(6)]
    with TieredStore([TierSettings(medium=pool_of(client))]) as theirs, over_dram(pool_of(client)) as mine:
        for number, key in enumerate(keys):
            assert theirs.put(key, block_of(number), position=number)
            if number in (0, 1, 3):
                assert mine.put(key, block_of(number), position=number)
        assert mine.match_prefix(keys[2:], first=2) == 4
        for key in keys[2:]:
            assert mine.read_into(key, [np.empty(size, np.uint8) for size in LAYERS]) is not None
        assert [mine._stack.tiers[0].position_of(key) for key in keys] == [0, 1, 2, 3, 4, 5]


def test_a_block_that_this_client_stored_does_not_leave_when_it_is_found(client):
    """Asking the pool for a block that the store itself put there counts no eviction, and the block stays."""
    with TieredStore([TierSettings(medium=pool_of(client))]) as store:
        assert store.put(b"mine", block_of(7), position=3)
        assert store.match_prefix([b"mine"], first=3) == 1
        assert store.statistics()[0].evicted == 0
        assert store._stack.tiers[0].position_of(b"mine") == 3


ENDING = """
import os, signal, subprocess, time
from mooncake_lab.net.mooncake_wheel import MooncakeMaster
from mooncake_lab.store.backends import MooncakeClient, MooncakeStore
master = MooncakeMaster()
pool = MooncakeStore(MooncakeClient(master.address, 16 * 2**20), 2**20, [3], fingerprint=b"m")
block = pool.reserve(b"k", [3])
pool.write(block, [b"abc"])
pool.commit(block)
print(master.address.rpartition(":")[2], flush=True)
input()
[inner] = subprocess.run(["pgrep", "-P", str(master._process.pid)], capture_output=True, text=True).stdout.split()
os.kill(int(inner), signal.SIGKILL)
try:
    pool.read_into(block, [bytearray(3)])
except OSError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("killed", ["master", "process"])
def test_a_killed_master_is_an_error_and_a_killed_process_leaves_no_master(killed):
    """Reading without a master raises `OSError`, and nothing is logged; a master ends with its process."""
    command, pipe = [sys.executable, "-c", ENDING], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        port = int(process.stdout.readline())
        if killed == "master":
            told, noise = process.communicate("\n", timeout=60)
            assert "Mooncake's code" in told
            assert noise == ""
        else:
            process.send_signal(signal.SIGKILL)
    ends_s = time.monotonic() + 20
    while is_open(port) and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert not is_open(port)


def is_open(port):
    """Whether somebody listens."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
