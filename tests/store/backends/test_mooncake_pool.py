"""Mooncake Store as a pool: what one client puts every client finds, and nobody gets wrong bytes."""

import numpy as np
import pytest

from mooncake_lab.store.backends import (
    BlockExistsError,
    BlockNotFoundError,
    DamagedBlockError,
    MooncakeMaster,
    MooncakePool,
    StorageError,
)
from mooncake_lab.store.backends.mooncake_client import load_wheel

LAYERS = (300, 500)


def _missing():
    try:
        load_wheel()
    except StorageError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing())


@pytest.fixture(scope="module")
def client():
    """A process may have one client; both pools of a test share it."""
    with MooncakeMaster() as master:
        yield master.client(16 * 2**20)


def pool_of(client, fingerprint=b"model"):
    return MooncakePool(client, 2**20, LAYERS, fingerprint=fingerprint)


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
    client.api.get_into(pool._object(b"c"), content.ctypes.data, content.nbytes)
    client.api.remove(pool._object(b"c"), True)
    content[10] ^= 1
    client.api.put_from(pool._object(b"c"), content.ctypes.data, content.nbytes, client.pinned)
    with pytest.raises(DamagedBlockError):
        read(pool, found)


def test_nothing_is_stored_before_the_commit(client):
    """A block that lacks a layer cannot be committed; one that is given up leaves nothing."""
    pool = pool_of(client)
    space = pool.reserve(b"d", LAYERS)
    pool.write(space, [block_of(4)[0]])
    with pytest.raises(ValueError, match="lacks layers"):
        pool.commit(space)
    with pytest.raises(BlockExistsError):
        pool.reserve(b"d", LAYERS)
    pool.free(space)
    assert pool.find([b"d"]) == []
    assert pool.used_bytes == 0
    with pytest.raises(ValueError, match="layers of"):
        pool.reserve(b"e", (1, 2))
