"""A prefill worker's store: what it tells the cluster stays true, whoever uses it meanwhile."""

import dataclasses
import errno
import random
import threading
import time
import tracemalloc

import flat
import numpy as np
import pytest
import torch
from waiting import until

from mooncake_lab.engine import KVSpan
from mooncake_lab.engine.kv_layout import KVLayout
from mooncake_lab.serving.prefix_cache import PrefixCache
from mooncake_lab.serving.spec import worker_spec
from mooncake_lab.store.backends import (
    DamagedBlockError,
    DramBackend,
    RemoteBackend,
    SsdBackend,
    StorageError,
)
from mooncake_lab.store.backends.remote_server import BlockServer
from mooncake_lab.store.backends.ssd_slab import header_bytes
from mooncake_lab.store.tiers import Tier

SIZE = 16
LAYOUT = KVLayout(
    fingerprint=b"model", layers=2, kv_heads=1, head_width=128, dtype=torch.float32, block_tokens=SIZE
)
"""A block of 16 tokens has 64 KiB, over two layers."""


def spec_of(tmp_path, *, blocks=8, ssd_blocks=256, pool=None):
    """A worker with DRAM and an SSD for some blocks."""
    tokens = {"cache_tokens": blocks * SIZE, "ssd_tokens": ssd_blocks * SIZE}
    cluster = flat.live(**tokens, block_size_tokens=SIZE, ssd_dir=str(tmp_path), shared_store=pool)
    return worker_spec(*cluster, "prefill-0", bytes(16))


def keys_of(count, first=0):
    """Some keys."""
    return [b"%032d" % number for number in range(first, first + count)]


def span_of(blocks, seed=0):
    """The KVCache of so many blocks."""
    draw = torch.Generator().manual_seed(seed)
    layers = [torch.randn((2, blocks * SIZE, 1, 128), generator=draw) for _ in range(2)]
    return KVSpan(fingerprint=b"model", start=0, tokens=blocks * SIZE, layers=tuple(layers))


def read(cache, keys):
    """The leading blocks that can be read, as one tensor a layer."""
    return [torch.cat(list(layer), dim=1) for layer in cache.prefix(keys).layers()]


def test_what_it_holds_survives_a_clean_end(tmp_path):
    """At its end DRAM sinks to the SSD, and the next worker of the name finds it, bit by bit."""
    cache, keys, span = PrefixCache(spec_of(tmp_path), LAYOUT), keys_of(5), span_of(5)
    cache.keep(keys, span)
    cache.close()
    cache = PrefixCache(spec_of(tmp_path), LAYOUT)
    assert set(cache.news().added) == set(keys)
    found = read(cache, keys)
    assert found[0].shape[1] == 5 * SIZE
    assert all(torch.equal(one, other) for one, other in zip(found, span.layers, strict=True))
    cache.close()


@pytest.mark.parametrize(("eviction", "evicted"), [("lru", 1), ("fifo", 0)])
def test_dram_evicts_by_the_policy_that_the_spec_names(eviction, evicted):
    """The block that was used least recently leaves, or the one that came first, as in the simulator."""
    cluster = flat.live(cache_tokens=4 * SIZE, block_size_tokens=SIZE, eviction=eviction)
    cache, keys = PrefixCache(worker_spec(*cluster, "prefill-0", bytes(16)), LAYOUT), keys_of(5)
    for key in keys[:4]:
        cache.keep([key], span_of(1))
    assert read(cache, keys[:1])
    cache.keep(keys[4:], span_of(1))
    assert set(cache.news().added) == set(keys) - {keys[evicted]}
    cache.close()


def test_blocks_that_could_not_sink_are_retracted(tmp_path, monkeypatch):
    """Evicted, announced while on its way down, and then refused by the SSD: the cluster hears that it is gone."""
    broken = threading.Event()
    real = SsdBackend.write

    def write(medium, reservation, layers, *, first_layer=0):
        if broken.is_set():
            raise OSError(errno.ENOSPC, "injected: no space left")
        real(medium, reservation, layers, first_layer=first_layer)

    monkeypatch.setattr(SsdBackend, "write", write)
    cache, held = PrefixCache(spec_of(tmp_path), LAYOUT), set()
    broken.set()
    for turn in range(4):
        keys = keys_of(5, first=10 * turn)
        cache.keep(keys, span_of(5, seed=turn))
        news = cache.news()
        held = (held | set(news.added)) - set(news.removed)
    cache._store.flush()
    news = cache.news()
    held -= set(news.removed) if news else set()
    assert held == {key for turn in range(4) for key in keys_of(5, first=10 * turn) if key in cache._store}
    assert len(held) < 20
    cache.close()


def test_news_are_of_what_moved(tmp_path, monkeypatch):
    """After each prompt the cluster knows every block and its tier, and few blocks were looked for."""
    cache, draw = PrefixCache(spec_of(tmp_path), LAYOUT), random.Random(5)
    holds, looked = Tier.holds, set()
    monkeypatch.setattr(Tier, "holds", lambda tier, key: looked.add(key) or holds(tier, key))
    every, held, on_ssd, most = keys_of(160), set(), set(), 0
    for turn in range(60):
        first = draw.randrange(len(every) - 3) if turn % 3 == 0 else 4 * turn % 156
        keys = every[first : first + 4]
        cache.keep(keys, span_of(4, seed=first))
        if turn % 4 == 0:
            cache.promote(draw.sample(every, 2))
        cache._store.flush()
        looked.clear()
        if news := cache.news():
            held = (held | set(news.added)) - set(news.removed)
            on_ssd = (on_ssd | set(news.demoted)) - set(news.promoted) - set(news.removed)
        most = max(most, len(looked))
        places = {key: cache._store.tier_of(key) for key in every}
        assert held == {key for key, tier in places.items() if tier}
        assert on_ssd == {key for key, tier in places.items() if tier == "ssd"}
    assert len(held) > 80
    assert most <= 20, "more were looked for than a prompt of four blocks and two that rose can move"
    cache.close()


def test_a_report_takes_no_more_memory_in_a_large_cache():
    """Telling the cluster of a prompt copies nothing that has the size of the cache."""
    layout, peaks_bytes = dataclasses.replace(LAYOUT, layers=1, head_width=32), {}
    for blocks in (64, 4096):
        cluster = flat.live(cache_tokens=blocks * SIZE, block_size_tokens=SIZE)
        cache = PrefixCache(worker_spec(*cluster, "prefill-0", bytes(16)), layout)
        kv = KVSpan(fingerprint=b"model", start=0, tokens=4 * SIZE, layers=(torch.zeros(2, 4 * SIZE, 1, 32),))
        for first in range(0, blocks, 4):
            cache.keep(keys_of(4, first), kv)
        assert len(cache.news().added) == blocks
        cache.keep(keys_of(4, blocks), kv)
        tracemalloc.start()
        update = cache.news()
        peaks_bytes[blocks] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (set(update.added), set(update.removed)) == (set(keys_of(4, blocks)), set(keys_of(4)))
        cache.close()
    assert peaks_bytes[4096] < 2 * peaks_bytes[64]


def test_a_pool_comes_and_goes_under_load(tmp_path):
    """Prompts are kept and read while pools change: what is read is right, and the cluster knows each block."""
    cache = PrefixCache(spec_of(tmp_path, blocks=8, ssd_blocks=16, pool="remote"), LAYOUT)
    stop, failures, every, whole = threading.Event(), [], keys_of(64), span_of(64).layers

    def use():
        draw = random.Random(1)
        try:
            while not stop.is_set():
                first = draw.randrange(60)
                layers = tuple(layer[:, first * SIZE : (first + 4) * SIZE] for layer in whole)
                kv = KVSpan(fingerprint=b"model", start=0, tokens=4 * SIZE, layers=layers)
                cache.keep(every[first : first + 4], kv)
                for one, other in zip(read(cache, every[first : first + 4]), layers, strict=False):
                    np.testing.assert_array_equal(one, other[:, : one.shape[1]])
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=use)
    held, pooled = set(), set()
    with BlockServer(DramBackend(1 << 24), bytes(32)) as server:
        thread.start()
        for turn in range(12):
            cache.use_shared_store(pool_client(server) if turn % 3 else None)
            time.sleep(0.02)
            if update := cache.news():
                held = (held | set(update.added)) - set(update.removed)
                pooled = (pooled | set(update.shared_added)) - set(update.shared_removed)
        stop.set()
        thread.join()
        cache._store.flush()
        if update := cache.news():
            held = (held | set(update.added)) - set(update.removed)
            pooled = (pooled | set(update.shared_added)) - set(update.shared_removed)
        pool = pool_client(server)
        assert pooled == {block.key for block in pool.blocks()} != set()
        pool.close()
        assert held == {key for key in every if cache.match([key])}
        cache._store.check()
        cache.use_shared_store(None)
        assert set(cache.news().shared_removed) == pooled
        assert failures == []
        cache.close()


def test_forgetting_waits_for_those_who_read(tmp_path):
    """Threads put and read while the store is emptied again and again: no error, no wrong byte, no orphan."""
    cache, span, keys = PrefixCache(spec_of(tmp_path), LAYOUT), span_of(12), keys_of(12)
    stop, failures = threading.Event(), []

    def use():
        try:
            while not stop.is_set():
                cache.keep(keys, span)
                found = read(cache, keys)
                for one, other in zip(found, span.layers, strict=False):  # a lost layer ends it
                    np.testing.assert_array_equal(one, other[:, : one.shape[1]])
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        assert cache.forget().added == ()
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    cache.forget()
    assert cache.match(keys) == 0
    assert cache._dram.used_bytes == cache._ssd.used_bytes == 0
    cache.close()


def test_damage_is_told_once(tmp_path):
    """A block whose bytes changed on the SSD is not delivered; the cluster hears once that it is damaged."""
    cache, keys = PrefixCache(spec_of(tmp_path), LAYOUT), keys_of(4)
    cache.keep(keys, span_of(4))
    cache.close()
    cache = PrefixCache(spec_of(tmp_path), LAYOUT)
    block = next(block for block in cache._ssd.blocks() if block.key == keys[1])
    cache.close()
    [slab] = tmp_path.rglob("slab")
    contents = np.fromfile(slab, np.uint8)
    contents[block.offset_bytes + header_bytes(block.key, LAYOUT.layers) + 100] ^= 1
    contents.tofile(slab)
    cache = PrefixCache(spec_of(tmp_path), LAYOUT)
    assert set(cache.news().added) == set(keys)
    for _ in keys:
        list(cache.prefix(keys).layers())
    told = cache.news()
    assert told.damaged_blocks == 1
    assert told.removed == (keys[1],)
    list(cache.prefix(keys).layers())
    assert cache.news() is None
    cache.close()


def pool_client(server):
    """A client of a block server that gives up soon."""
    return RemoteBackend(server.address, bytes(32), fingerprint=b"model", name="pool", timeout_s=0.5)


def test_a_reset_does_without_a_pool_that_does_not_answer(tmp_path):
    """The caches are empty afterwards and usable, and the worker has no pool until it is told of the next."""
    cache, keys = PrefixCache(spec_of(tmp_path, pool="remote"), LAYOUT), keys_of(3)
    with BlockServer(DramBackend(1 << 22), bytes(32)) as server:
        cache.use_shared_store(pool_client(server))
    cache.keep(keys, span_of(3))
    cache.news()
    assert set(cache.forget().removed) == set(keys)
    assert cache.match(keys) == 0
    cache.keep(keys, span_of(3))
    assert cache.match(keys) == 3
    cache.close()


class StalledPool:
    """A block server's backend whose writes wait for `release`, which a test sets at its end."""

    def __init__(self):
        self.release, self.began, self.is_over = threading.Event(), threading.Event(), False
        self.backend = DramBackend(1 << 22)
        self.write, self.backend.write = self.backend.write, self.stall

    def stall(self, *arguments, **settings):
        self.began.set()
        self.release.wait(20)
        self.is_over = True
        self.write(*arguments, **settings)


@pytest.fixture
def stalled_pool():
    """A pool that answers nothing any more once a block is written to it, and a client of it that is patient."""
    pool = StalledPool()
    with BlockServer(pool.backend, bytes(32)) as server:
        pool.client = RemoteBackend(server.address, bytes(32), fingerprint=b"model", name="pool", timeout_s=60.0)
        yield pool
        pool.release.set()


def test_a_pool_that_stalls_costs_nothing_that_dram_holds(tmp_path, stalled_pool):
    """At the end of a worker DRAM is on the SSD before the pool has taken a block that waits for it."""
    cache, keys = PrefixCache(spec_of(tmp_path, blocks=8, ssd_blocks=16, pool="remote"), LAYOUT), keys_of(200)
    cache.use_shared_store(stalled_pool.client)
    for first in range(0, 200, 4):  # until a block of the SSD is on its way to the pool
        cache.keep(keys[first : first + 4], span_of(4, seed=first))
        assert until(lambda: not cache._store.statistics()[0].queued_bytes)
        if stalled_pool.began.is_set():
            break
    held = {key for key in keys if cache._store.tier_of(key) == "dram"}
    assert stalled_pool.began.wait(60)
    assert held
    cache.close()
    assert not stalled_pool.is_over
    cache = PrefixCache(spec_of(tmp_path, blocks=8, ssd_blocks=16), LAYOUT)
    assert held <= set(cache.news().added)
    cache.close()


def test_no_worker_takes_back_what_another_put_into_the_pool():
    """A worker says that a block is not in the pool only where it asked the pool for it."""
    cluster = flat.live(cache_tokens=8 * SIZE, block_size_tokens=SIZE, shared_store="remote")
    with BlockServer(DramBackend(1 << 24), bytes(32)) as server:
        one, other = (PrefixCache(worker_spec(*cluster, "prefill-0", bytes(16)), LAYOUT) for _ in range(2))
        for cache in (one, other):
            cache.use_shared_store(pool_client(server))
        keys, filler = keys_of(4), keys_of(40, 100)
        for first in (None, *range(0, 40, 4)):  # what `one` keeps first ends in the pool
            one.keep(keys if first is None else filler[first : first + 4], span_of(4, first or 0))
            one._store.flush()
        assert set(keys) <= set(one.news().shared_added)
        layers = list(other.shared(keys[:2], 0))
        other.adopt(keys[:2], list(zip(*layers, strict=True)), first=0)
        assert other.news().shared_removed == ()
        pool = pool_client(server)
        pool.free(*pool.find(keys[2:]))
        pool.close()
        assert list(other.shared(keys[2:], 2)) == []
        assert set(other.news().shared_removed) == set(keys[2:])
        for cache in (one, other):
            cache.close()


def test_damage_is_counted_once_whatever_pool_is_used(tmp_path, monkeypatch):
    """A change of the pool takes nothing from the count of damaged blocks."""
    cache, keys = PrefixCache(spec_of(tmp_path), LAYOUT), keys_of(4)
    cache.keep(keys, span_of(4))
    cache.news()

    def damaged(*_args, **_settings):
        raise DamagedBlockError("a planted fault")

    with monkeypatch.context() as patch:
        patch.setattr(DramBackend, "read_into", damaged)
        list(cache.prefix(keys).layers())
    told = cache.news().damaged_blocks
    assert told > 0
    with BlockServer(DramBackend(1 << 22), bytes(32)) as server:
        cache.use_shared_store(pool_client(server))
        update = cache.news()
        assert update is None or update.damaged_blocks == 0
        cache.close()


def test_a_call_that_comes_after_the_end_does_not_wait(tmp_path):
    """A fetch that returns late is told that the cache is closed."""
    cache = PrefixCache(spec_of(tmp_path), LAYOUT)
    cache.close()
    with pytest.raises(StorageError, match="closed"):
        cache.match(keys_of(1))


def test_a_folder_of_another_model_is_left_alone(tmp_path):
    """A worker that restarts with another model finds nothing of the first, which stays for its return."""
    keys, span = keys_of(3), span_of(3)
    for model, found in ((b"model", set()), (b"other", set()), (b"model", set(keys)), (b"other", set(keys))):
        cache = PrefixCache(spec_of(tmp_path), dataclasses.replace(LAYOUT, fingerprint=model))
        update = cache.news()
        assert (set() if update is None else set(update.added)) == found
        assert cache.match(keys) == len(found)
        cache.keep(keys, span)
        cache.close()
