"""Two stores over one lent medium."""

import contextlib

import pytest
from tier_blocks import LAYERS, content, put, read, two_stores

from mooncake_lab.store.backends import BlockServer, DramBackend, RemoteBackend, StorageFullError
from mooncake_lab.store.backends.remote_server import Leases
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

TOKEN = b"a token of the tests"
POOL_BLOCKS = 8
KEYS = [b"%d" % number for number in range(POOL_BLOCKS)]


@contextlib.contextmanager
def two_clients():
    """Two stores over a pool of eight blocks, and the pool."""
    pool = DramBackend(POOL_BLOCKS * 2 * 4096)
    with two_stores(pool) as stores:
        yield (*stores, pool)
    pool.close()


def test_no_client_announces_what_is_gone():
    """After another client has made room for its own blocks, the first one counts only those that are there."""
    with two_clients() as (first, second, _):
        put(first, *KEYS)
        assert all(second.put(key, content(key)) for key in KEYS)
        for number in range(6):
            second.put(b"new %d" % number, content(b"new %d" % number))
        announced = first.match_prefix(KEYS)
        readable = [read(first, key) is not None for key in KEYS]
        assert announced == (readable.index(False) if False in readable else len(KEYS))


def test_a_client_finds_what_another_stores_later():
    """A prefix that one client stores is matched and read by the other, which computed none of it."""
    with two_clients() as (first, second, _):
        assert second.match_prefix(KEYS) == 0
        put(first, *KEYS[:5])
        assert second.match_prefix(KEYS) == 5
        assert [read(second, key) for key in KEYS[:5]] == ["remote"] * 5
        assert second.statistics()[0].stored == 0


def test_clients_share_the_capacity():
    """A client that comes late to a full pool stores all the same; together they never exceed the pool."""
    with two_clients() as (first, second, pool):
        put(first, *KEYS)
        late = [b"late %d" % number for number in range(POOL_BLOCKS)]
        for number, key in enumerate(late, 1):
            put(second, key)
            assert pool.used_bytes <= pool.capacity_bytes
            left = [block.key[-len(KEYS[0]) :] for block in pool.blocks()]
            assert left == KEYS[number:] + [
                str(other).encode() for other in range(number)
            ]  # the oldest leave first
        assert first.match_prefix(KEYS) == 0
        assert second.match_prefix(late) == POOL_BLOCKS


def test_the_pool_keeps_what_any_client_uses():
    """What one client matches or reads is not the next to leave, although the other stores new blocks."""
    with two_clients() as (first, second, _):
        put(first, *KEYS)
        for number in range(3 * POOL_BLOCKS):
            assert first.match_prefix(KEYS[:4]) == 4
            put(second, b"new %d" % number)
        assert first.match_prefix(KEYS[4:]) == 0


def test_a_block_that_is_stored_again_is_read_where_it_is_now():
    """A block that left the pool and came back has another place there; who knew the old one reads it."""
    with two_clients() as (first, second, pool):
        put(first, KEYS[0])
        for number in range(POOL_BLOCKS):
            put(second, b"new %d" % number)
        put(second, KEYS[0])
        assert first.match_prefix(KEYS[:1]) == 1
        assert read(first, KEYS[0]) == "remote"
        assert first.statistics()[0].misses == 0
        assert pool.used_bytes <= pool.capacity_bytes


def test_a_block_that_is_read_does_not_leave():
    """The pool keeps a block while its bytes are on their way; when none can leave, the newcomer is refused."""
    arena = DramBackend(2 * 4096)
    pool = Leases(arena, 1.0)
    block = pool.reserve(b"a", tuple(LAYERS), 0)
    arena.write(block, content(b"a"))
    pool.commit([block])
    with pool.lease(block), pytest.raises(StorageFullError):
        pool.reserve(b"b", tuple(LAYERS), 0)
    assert pool.reserve(b"b", tuple(LAYERS), 0).key == b"b"
    assert pool.find([b"a"]) == []
    with pytest.raises(StorageFullError):  # b is not committed: its writer is not robbed of it
        pool.reserve(b"c", tuple(LAYERS), 0)


def test_a_pool_that_does_not_answer_announces_nothing_and_loses_nothing():
    """While its server is gone its blocks are misses; when it is back they are found, without another write."""
    arena = DramBackend(64 * 4096)
    server = BlockServer(arena, TOKEN, timeout_s=2)
    _, port = server.address
    remote = RemoteBackend(server.address, TOKEN, fingerprint=b"m", timeout_s=2)
    with TieredStore([TierSettings(medium=remote)]) as store:
        put(store, *KEYS)
        store.pin(KEYS[0])
        server.close()
        assert [store.match_prefix(KEYS) for _ in range(4)] == [0] * 4
        assert store.statistics()[0].degraded is not None
        with BlockServer(arena, TOKEN, port=port, timeout_s=2):
            store.unpin(KEYS[0])
            assert POOL_BLOCKS in [store.match_prefix(KEYS) for _ in range(40)]
            assert [read(store, key) for key in KEYS] == ["remote"] * POOL_BLOCKS
            assert store.statistics()[0].stored == POOL_BLOCKS
            store.check()
            remote.close()
    arena.close()


def test_a_node_that_fails_takes_its_blocks_and_no_others():
    """Two nodes lend memory; one restarts empty: only its blocks are misses, and they can be stored again."""
    arenas = [DramBackend(POOL_BLOCKS * 2 * 4096) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        servers = [BlockServer(arena, TOKEN, timeout_s=2) for arena in arenas[:2]]
        stack.callback(servers[1].close)
        remotes = [
            RemoteBackend(server.address, TOKEN, fingerprint=b"m", name=f"node {number}", timeout_s=2)
            for number, server in enumerate(servers)
        ]
        store = stack.enter_context(
            TieredStore([TierSettings(medium=remote, promotes=False) for remote in remotes])
        )
        others = [b"other %d" % number for number in range(4)]
        for key in others:
            block = remotes[1].reserve(key, LAYERS)
            remotes[1].write(block, content(key))
            remotes[1].commit(block)
        put(store, *KEYS)
        assert store.match_prefix(KEYS + others) == len(KEYS + others)
        _, port = servers[0].address
        servers[0].close()
        with BlockServer(arenas[2], TOKEN, port=port, timeout_s=2):
            assert [store.match_prefix([key]) for key in KEYS] == [0] * len(KEYS)
            assert store.match_prefix(others) == len(others)
            assert [read(store, key) for key in others] == ["node 1"] * len(others)
            put(store, *KEYS)
            assert store.match_prefix(KEYS + others) == len(KEYS + others)
            for remote in remotes:
                remote.close()
    for arena in arenas:
        arena.close()
