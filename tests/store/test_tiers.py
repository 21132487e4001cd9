"""Stacked tiers: what is put is read bit by bit from some tier, or is honestly gone."""

import contextlib
import errno
import logging
import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tier_blocks import LAYERS, PAGE, content, put, read

from mooncake_lab.store import EVICTION_POLICIES
from mooncake_lab.store.backends import BlockServer, DramBackend, RemoteBackend, SsdBackend
from mooncake_lab.store.tiered_store import TieredStore, TierSettings


@contextlib.contextmanager
def dram_tiers(*blocks, **settings_of_all):
    """A store of DRAM tiers that hold so many blocks each; every queue holds eight."""
    names = [f"tier {index}" for index in range(len(blocks))]
    media = [DramBackend((count + 8) * 2 * PAGE, name=name) for count, name in zip(blocks, names, strict=True)]
    media[-1] = DramBackend(blocks[-1] * 2 * PAGE, name=names[-1])
    queues = [16 * PAGE] * (len(blocks) - 1) + [0]
    tiers = [
        TierSettings(medium=medium, queue_bytes=queue, **settings_of_all)
        for medium, queue in zip(media, queues, strict=True)
    ]
    with TieredStore(tiers) as store:
        yield store
    store.check()
    assert store.leaked_bytes() == 0
    for medium in media:
        medium.close()


class TierMachine(RuleBasedStateMachine):
    """Any sequence of calls: no wrong byte, no leak, no tier above its capacity, no pinned block lost."""

    @initialize(policy=st.sampled_from([name for name in EVICTION_POLICIES if name != "belady"]))
    def build(self, policy):
        """Start with three empty tiers."""
        self.scope = contextlib.ExitStack()
        self.store = self.scope.enter_context(dram_tiers(2, 3, 4, eviction=policy))
        self.known = set()
        self.pinned = []

    @rule(number=st.integers(0, 12))
    def put(self, number):
        """A put block is held afterwards, unless pins fill every tier."""
        key = b"key %d" % number
        assert self.store.put(key, content(key)) or len(self.pinned) >= 2
        self.known.add(key)

    @rule(number=st.integers(0, 12))
    def read(self, number):
        """Only what was put is delivered."""
        key = b"key %d" % number
        assert read(self.store, key) is None or key in self.known

    @rule(number=st.integers(0, 12))
    def pin(self, number):
        """A held block can be pinned, a missing one cannot."""
        key = b"key %d" % number
        self.store.flush()
        if key in self.store:
            self.store.pin(key)
            self.pinned.append(key)
        else:
            with pytest.raises(KeyError):
                self.store.pin(key)

    @rule()
    def unpin(self):
        """Pins are undone one by one."""
        if self.pinned:
            self.store.unpin(self.pinned.pop())

    @rule()
    def flush(self):
        """Afterwards nothing waits, and nothing leaked."""
        self.store.flush()
        assert self.store.leaked_bytes() == 0
        assert all(tier.queued_bytes == 0 for tier in self.store.statistics())

    @invariant()
    def holds_together(self):
        """Every tier keeps its invariants, and pinned blocks are there."""
        self.store.check()
        assert all(tier.used_bytes <= tier.capacity_bytes for tier in self.store.statistics())
        assert all(read(self.store, key) for key in self.pinned)

    def teardown(self):
        """Close; that checks once more."""
        if hasattr(self, "scope"):
            while self.pinned:
                self.store.unpin(self.pinned.pop())
            self.scope.close()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_evicted_blocks_sink_and_hits_rise():
    """The first block sinks as newcomers arrive; read again, it is in the first tier too."""
    with dram_tiers(2, 3, 4) as store:
        put(store, b"a", b"b", b"c")
        assert store.tier_of(b"a") == "tier 1"
        assert read(store, b"a") == "tier 1"
        assert store.tier_of(b"a") == "tier 0"
        assert read(store, b"a") == "tier 0"
        store.flush()
        upper, middle, lowest = store.statistics()
        assert (upper.hits, upper.misses, upper.demoted) == (1, 1, 2)
        assert (middle.hits, middle.misses, middle.promoted) == (1, 0, 1)
        assert (lowest.hits, lowest.misses) == (0, 0)


def test_one_layer_alone_is_read_without_promotion():
    """Layers can be read singly, from any tier, and the block stays where it is."""
    with dram_tiers(1, 4) as store:
        put(store, b"a", b"b")
        buffer = np.empty(LAYERS[1], np.uint8)
        assert store.read_into(b"a", [buffer], first_layer=1) == "tier 1"
        assert buffer.tobytes() == content(b"a")[1].tobytes()
        assert store.tier_of(b"a") == "tier 1"
        with pytest.raises(ValueError, match="buffers of"):
            store.read_into(b"a", [buffer], first_layer=0)
        store.promote([b"a", b"missing"])
        assert store.tier_of(b"a") == "tier 0"


def test_durable_tiers_are_taken_over(tmp_path):
    """What an SSD tier held before is found by the next store, oldest first to leave."""
    for life in range(2):
        ssd = SsdBackend(tmp_path, 9 * PAGE, fingerprint=b"m")
        with TieredStore([TierSettings(medium=ssd)]) as store:
            if life == 0:
                put(store, b"a", b"b", b"c")
            else:
                assert read(store, b"b") == "ssd"
                put(store, b"d")
                assert [store.tier_of(key) for key in (b"a", b"b", b"c", b"d")] == [None, "ssd", "ssd", "ssd"]
            store.check()
        ssd.close()


def test_blocks_of_several_sizes_sink_without_a_loss():
    """The queue is emptied whenever the largest block might not fit: none is dropped."""
    dram, below = DramBackend(16 * PAGE), DramBackend(64 * PAGE, name="below")
    with TieredStore([TierSettings(medium=dram, queue_bytes=2 * PAGE), TierSettings(medium=below)]) as store:
        for number in range(8):
            assert store.put(b"%d" % number, [bytes([number]) * (PAGE * (1 + number % 2))])
        store.sink()
        assert [store.tier_of(b"%d" % number) for number in range(8)] == ["below"] * 8
        assert store.statistics()[0].dropped == 0


def test_what_sinks_survives(tmp_path):
    """After `sink` every block that is not pinned is in the last tier, through a queue of one block at a time."""
    keys = [b"%d" % number for number in range(6)]
    ssd = SsdBackend(tmp_path, 64 * PAGE, fingerprint=b"m")
    dram = DramBackend(8 * 2 * PAGE)
    with TieredStore([TierSettings(medium=dram, queue_bytes=2 * PAGE), TierSettings(medium=ssd)]) as store:
        put(store, *keys)
        store.pin(b"0")
        store.sink()
        assert [store.tier_of(key) for key in keys] == ["dram"] + ["ssd"] * 5
        assert store.statistics()[0].dropped == 0
        store.unpin(b"0")
        store.sink()
    ssd.close()
    with TieredStore([TierSettings(medium=dram), TierSettings(medium=DramBackend(PAGE))]) as store:
        put(store, b"a")
        with pytest.raises(ValueError, match="cannot sink a block of 8192 bytes: its queue has 0"):
            store.sink()
    ssd = SsdBackend(tmp_path, 64 * PAGE, fingerprint=b"m")
    with TieredStore([TierSettings(medium=ssd)]) as store:
        assert [read(store, key) for key in keys] == ["ssd"] * 6
    ssd.close()


def damage_first_block(folder):
    """Flip a bit of the first block's payload."""
    with (folder / b"m".hex() / "slab").open("r+b") as slab:
        slab.seek(PAGE + 17)
        flipped = slab.read(1)[0] ^ 1
        slab.seek(PAGE + 17)
        slab.write(bytes([flipped]))


class Faults:
    """Makes a device refuse chosen operations."""

    def __init__(self):
        self.broken = set()

    def __call__(self, operation):
        """Refuse what is broken."""
        if operation in self.broken:
            raise OSError(errno.ENOSPC if operation == "write" else errno.EIO, f"injected into {operation}")


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_tier_that_cannot_be_written_is_skipped_and_says_so(tmp_path, caplog, operation):
    """Requests go on, statistics and log have the reason, and when the device recovers so does the tier."""
    faults = Faults()
    ssd = SsdBackend(tmp_path, 640 * PAGE, fingerprint=b"m", before=faults)
    dram = DramBackend(9 * 2 * PAGE)
    tiers = [TierSettings(medium=dram, queue_bytes=16 * PAGE), TierSettings(medium=ssd)]
    with TieredStore(tiers) as store, caplog.at_level(logging.WARNING, "mooncake_lab.store"):
        put(store, b"a", b"b")
        assert store.tier_of(b"a") == "ssd"
        faults.broken.add(operation)
        put(store, *(b"%d" % number for number in range(20)))
        assert f"injected into {operation}" in store.statistics()[1].degraded
        assert "writing to ssd is degraded" in caplog.text
        assert 1 <= store.statistics()[1].write_errors <= 3
        assert read(store, b"a") == "ssd"
        assert store.leaked_bytes() == 0
        faults.broken.clear()
        put(store, *(b"later %d" % number for number in range(20)))
        assert store.statistics()[1].degraded is None
        assert "writing to ssd works again" in caplog.text
        store.check()
        assert store.leaked_bytes() == 0
    ssd.close()


def test_damage_on_the_way_down_is_the_upper_tiers(tmp_path):
    """A damaged block is not sunk, and only the tier where it was damaged hears of it."""
    ssd = SsdBackend(tmp_path, 20 * PAGE, fingerprint=b"m")
    below = DramBackend(64 * PAGE, name="below")
    tiers = [TierSettings(medium=ssd, queue_bytes=4 * PAGE), TierSettings(medium=below)]
    with TieredStore(tiers) as store:
        put(store, b"a", b"b")
        damage_first_block(tmp_path)
        put(store, *(b"%d" % number for number in range(8)))
        upper, lower = store.statistics()
        assert (upper.damaged, upper.dropped) == (1, 1)
        assert (lower.degraded, lower.write_errors) == (None, 0)
        assert b"a" not in store
        assert read(store, b"b") == "below"
        store.check()
        assert store.leaked_bytes() == 0
    ssd.close()


def test_other_clients_blocks_are_left_alone():
    """A store that takes over less than a shared medium holds frees nothing of it."""
    arena = DramBackend(64 * PAGE)
    with BlockServer(arena, b"a token of the tests", timeout_s=2) as server:
        remote = RemoteBackend(server.address, b"a token of the tests", fingerprint=b"m", timeout_s=2)
        with TieredStore([TierSettings(medium=remote)]) as store:
            put(store, *(b"%d" % number for number in range(6)))
        small = TierSettings(medium=remote)
        remote.capacity_bytes = 2 * sum(LAYERS)
        with TieredStore([small]) as store:
            assert [store.tier_of(b"%d" % number) for number in range(6)] == [None] * 4 + ["remote"] * 2
        assert len(list(arena.blocks())) == 6
        remote.close()


def test_threads_share_a_store():
    """Several threads that put and read the same blocks never see a wrong byte, and nothing leaks."""
    failures = []

    def work(seed):
        draw = np.random.default_rng(seed)
        try:
            for number in draw.integers(0, 30, 150).tolist():
                key = b"key %d" % number
                if read(store, key) is None:
                    store.put(key, content(key))
        except AssertionError as error:
            failures.append(error)

    with dram_tiers(4, 6, 8) as store:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        store.flush()
        assert store.statistics()[0].hits > 0


def test_bad_settings_are_refused():
    """No tiers, and a queue that takes all of the medium, are errors."""
    with pytest.raises(ValueError, match="0 tiers"):
        TieredStore([])
    with pytest.raises(ValueError, match="cannot keep a queue"):
        TieredStore([TierSettings(medium=DramBackend(PAGE), queue_bytes=PAGE)])
