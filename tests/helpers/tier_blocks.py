"""Blocks whose content their key tells, and how they go into a store of tiers and come out of it."""

import contextlib

import numpy as np

from mooncake_lab.store.backends import BlockServer, RemoteBackend
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

PAGE = 4096
LAYERS = [PAGE, 100]
"""Two pages a block in DRAM, and three on SSD with its header."""


def content(key):
    """The layers that a key stands for."""
    draw = np.random.default_rng(list(key))
    return [draw.integers(0, 256, size, np.uint8) for size in LAYERS]


def read(store, key):
    """The tier that delivers a block, after checking every byte of it."""
    buffers = [np.full(size, 7, np.uint8) for size in LAYERS]
    tier = store.read_into(key, buffers)
    if tier is not None:
        assert [buffer.tobytes() for buffer in buffers] == [layer.tobytes() for layer in content(key)]
    return tier


def put(store, *keys):
    """Put blocks, and let what they push out sink."""
    for key in keys:
        assert store.put(key, content(key))
        store.flush()


@contextlib.contextmanager
def two_stores(medium, *keys):
    """Two stores over one lent medium; the first puts some blocks, which the second finds when it opens."""
    token = b"a token of the tests"
    with BlockServer(medium, token) as server, contextlib.ExitStack() as stack:
        stores = []
        for _ in range(2):
            remote = RemoteBackend(server.address, token, fingerprint=b"m")
            stack.callback(remote.close)
            stores.append(stack.enter_context(TieredStore([TierSettings(medium=remote)])))
            put(stores[0], *keys)
        yield stores
