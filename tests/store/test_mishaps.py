"""What goes wrong with one block ends that block: no slot stays taken, no thread dies, no tier freezes."""

import errno
import threading
from contextlib import contextmanager

import pytest
from tier_blocks import LAYERS, PAGE, content, put, read

from mooncake_lab.store.backends import BlockServer, DramBackend, RemoteBackend, SsdBackend, StorageError
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

TOKEN = b"a token of the tests"


class Wrapped:
    """A medium whose methods raise, wait or count where a test says so."""

    def __init__(self, medium, **instead):
        self._medium = medium
        self._instead = instead
        self.calls = []

    def __getattr__(self, name):
        """What stands in for it, called first; then as the medium."""
        plain = getattr(self._medium, name)
        if not callable(plain):
            return plain

        def call(*given, **named):
            self.calls.append(name)
            if name in self._instead:
                self._instead[name](*given)
            return plain(*given, **named)

        return call


@contextmanager
def stacked(*tiers):
    """A store of these tiers, checked at the end."""
    with TieredStore(list(tiers)) as store:
        yield store
    store.check()
    assert store.leaked_bytes() == 0


def over(below, blocks=1):
    """Tiers: DRAM of so many blocks, which sink into a medium."""
    above = DramBackend((blocks + 8) * 2 * PAGE)
    return TierSettings(medium=above, queue_bytes=16 * PAGE), TierSettings(medium=below)


class TestErrorsThatAreRaised:
    """A `ValueError` goes to the caller, and leaves nothing behind."""

    @pytest.mark.parametrize("method", ["reserve", "write", "commit"])
    def test_whatever_a_medium_raises_the_block_is_out_of_the_books(self, method):
        """An error of no known kind is raised, and the next attempt begins anew."""

        def refuse(*_given):
            raise trouble.pop() if trouble else AssertionError

        trouble = [ZeroDivisionError()]
        medium = Wrapped(DramBackend(8 * PAGE), **{method: refuse})
        with stacked(TierSettings(medium=medium)) as store:
            with pytest.raises(ZeroDivisionError):
                store.put(b"a", content(b"a"))
            assert medium.used_bytes == 0
            medium._instead.clear()
            put(store, b"a")

    @pytest.mark.parametrize("method", ["write", "commit"])
    def test_a_block_that_cannot_sink_ends_alone(self, method, caplog):
        """Write-back gives up what raises, says so, and carries the next ones down."""

        def refuse(*given):
            named = given[0].key if given else b""
            if named == b"a":
                raise ValueError("injected")

        below = Wrapped(DramBackend(64 * PAGE, name="below"), **{method: refuse})
        with stacked(*over(below)) as store:
            put(store, b"a", b"b", b"c")
            assert [store.tier_of(key) for key in (b"a", b"b", b"c")] == [None, "below", "dram"]
            assert (store.statistics()[0].dropped, store.statistics()[0].demoted) == (1, 1)
            assert "is given up" in caplog.text or "are given up" in caplog.text


class TestDevicesThatFail:
    """A device that fails is asked as little as can be."""

    def test_a_lost_sync_is_charged_once(self, tmp_path):
        """Blocks that it made doubtful are no more failures: the tier that works again stays in use."""

        def fail(operation):
            if broken and operation == "sync":
                raise OSError(errno.EIO, "injected: pages were lost")

        broken = []
        ssd = SsdBackend(tmp_path, 64 * PAGE, fingerprint=b"m", before=fail)
        with stacked(TierSettings(medium=ssd)) as store:
            doubtful = [store.open(key, LAYERS) for key in (b"a", b"b")]
            for block, key in zip(doubtful, (b"a", b"b"), strict=True):
                assert block.write(content(key)[:1], first_layer=0)
            broken.append(True)
            assert not store.put(b"c", content(b"c"))
            assert store.statistics()[0].degraded == "OSError: [Errno 5] injected: pages were lost"
            broken.clear()
            assert [store.put(b"c", content(b"c")) for _ in range(16)] == [False] * 15 + [True]
            assert not doubtful[0].write(content(b"a")[1:], first_layer=1)
            assert not doubtful[1].write(content(b"b")[1:], first_layer=1)
            found = store.statistics()[0]
            assert (found.degraded, found.write_errors, found.refused) == (None, 1, 2)
            put(store, b"a", b"b")
            assert [read(store, key) for key in (b"a", b"b", b"c")] == ["ssd"] * 3
        ssd.close()

    def test_a_bad_sector_costs_one_computation(self, tmp_path):
        """A block that cannot be read is written anew elsewhere when its bytes come again; the tier is well."""

        def bad(reservation, *_given):
            if reservation.offset_bytes in sectors:
                raise OSError(errno.EIO, "injected: a bad sector")

        sectors = set()
        ssd = SsdBackend(tmp_path, 64 * PAGE, fingerprint=b"m")
        with stacked(TierSettings(medium=Wrapped(ssd, read_into=bad))) as store:
            put(store, b"a")
            sectors.add(next(ssd.blocks()).offset_bytes)
            assert read(store, b"a") is None
            put(store, b"a")
            assert [read(store, b"a") for _ in range(3)] == ["ssd"] * 3
            assert store.statistics()[0].degraded is None
            assert store.statistics()[0].stored == 2
        ssd.close()

    @pytest.mark.parametrize("code", ["EBADMSG", "EILSEQ", "ENODATA"])
    def test_a_block_whose_checksum_the_device_refuses_twice_is_dropped(self, tmp_path, code):
        """However often it is asked for, one bad block does not degrade its tier; others are served."""

        def bad(reservation, *_given):
            if reservation.key == b"a":
                raise OSError(getattr(errno, code), "injected: a bad sector")

        ssd = SsdBackend(tmp_path, 64 * PAGE, fingerprint=b"m")
        with stacked(TierSettings(medium=Wrapped(ssd, read_into=bad))) as store:
            put(store, b"a", b"b")
            assert [read(store, b"a") for _ in range(5)] == [None] * 5
            assert b"a" not in store
            found = store.statistics()[0]
            assert (found.degraded, found.read_errors, found.damaged, found.blocks) == (None, 1, 1, 1)
            assert read(store, b"b") == "ssd"
        assert [block.key for block in ssd.blocks()] == [b"b"]
        ssd.close()


class TestSharedMedia:
    """Media that others use too, or that are not always there."""

    def test_what_could_not_be_freed_is_freed_later(self):
        """A block that leaves while its medium does not answer does not stay there for ever."""

        def silent(*_given):
            if is_silent.is_set():
                raise TimeoutError("injected: nobody answers")

        is_silent = threading.Event()
        arena = DramBackend(8 * PAGE)
        medium = Wrapped(arena, free=silent)
        with stacked(TierSettings(medium=medium)) as store:
            put(store, b"a", b"b", b"c", b"d")
            is_silent.set()
            assert not store.put(b"e", content(b"e"))  # a has left the books, and still takes its room
            assert store.leaked_bytes() > 0
            is_silent.clear()
            put(store, b"a")  # the very one that could not be freed
            put(store, b"f")
            assert store.leaked_bytes() == 0
            assert len(list(arena.blocks())) == store.statistics()[0].blocks == 4
            assert [read(store, key) for key in (b"a", b"f")] == ["dram"] * 2

    def test_a_block_of_another_client_is_taken_over(self):
        """Who stores what another client stored meanwhile has it, and no byte is moved."""
        arena = DramBackend(64 * PAGE)
        with BlockServer(arena, TOKEN, timeout_s=20) as server:
            one, other = (RemoteBackend(server.address, TOKEN, fingerprint=b"m", timeout_s=20) for _ in range(2))
            with stacked(TierSettings(medium=one)) as first, stacked(*over(other)) as second:
                put(first, b"a")
                put(second, b"a", b"b")
                above, below = second.statistics()
                assert (above.demoted, below.stored, below.refused) == (1, 0, 0)
                assert read(second, b"a") == "remote"  # and goes into the DRAM, from which b leaves for the pool
                half = one.reserve(b"open", LAYERS)
                assert not first.put(b"open", content(b"open"))  # not committed: nothing to take over
                one.free(half)
                put(first, b"open")
            one.close()
            other.close()


class TestChangesUnderWay:
    """A store whose tiers come and go, or are emptied, while it is used."""

    def test_a_tier_comes_and_goes(self):
        """What an attached tier holds is found, evicted blocks go there, and it keeps them when it is detached."""
        above, below = over(DramBackend(64 * PAGE, name="below"))
        with stacked(below) as other:
            put(other, b"there")
        with stacked(above) as store:
            put(store, b"a")
            store.attach(below)
            assert read(store, b"there") == "below"
            put(store, *(b"%d" % number for number in range(8)))
            assert store.tier_of(b"a") == "below"
            store.detach()
            assert (store.tier_of(b"a"), store.tier_of(b"7")) == (None, "dram")
            put(store, *(b"more %d" % number for number in range(8)))
            with pytest.raises(ValueError, match="dram is the only tier and cannot be detached"):
                store.detach()
            store.attach(below)
            assert read(store, b"a") == "below"
            assert len(store.statistics()) == 2

    def test_blocks_that_wait_for_a_detached_tier_reach_it(self):
        """Detaching returns when no block is on its way, and others are read meanwhile."""
        began, gate = threading.Event(), threading.Event()

        def wait(*_given):
            began.set()
            gate.wait(30)

        backend = Wrapped(DramBackend(64 * PAGE, name="below"), write=wait)
        with stacked(*over(backend)) as store:
            for number in range(16):
                store.put(b"%d" % number, content(b"%d" % number))
            assert began.wait(30)
            detaching = threading.Thread(target=store.detach)
            detaching.start()
            while len(store.statistics()) == 2:
                pass
            assert read(store, b"15") == "dram"
            assert detaching.is_alive()
            gate.set()
            detaching.join(30)
            assert not detaching.is_alive()
            assert b"0" in {block.key for block in backend.blocks()}

    def test_an_emptied_store_keeps_nothing_that_was_under_way(self):
        """Blocks leave at once, an open one when it is committed, and one that is read when that is over."""
        began, gate = threading.Event(), threading.Event()

        def wait(reservation, *_given):
            if reservation.key == b"slow":
                began.set()
                gate.wait(30)

        medium = Wrapped(DramBackend(64 * PAGE), read_into=wait)
        with stacked(TierSettings(medium=medium)) as store:
            put(store, b"a", b"slow")
            found = []
            reader = threading.Thread(target=lambda: found.append(read(store, b"slow")))
            reader.start()
            assert began.wait(30)
            block = store.open(b"open", LAYERS)
            assert store.clear() == []  # of a store that does not report changes
            assert [store.tier_of(key) for key in (b"a", b"slow", b"open")] == [None] * 3
            assert block.write(content(b"open"))
            assert not block.commit()
            gate.set()
            reader.join(30)
            assert found == ["dram"]
            assert medium.used_bytes == 0
            put(store, b"a", b"open")

    def test_closing_waits_for_calls_and_refuses_later_ones(self):
        """A read that is under way ends as always; one that comes later is refused."""
        began, gate, found = threading.Event(), threading.Event(), []

        def wait(*_given):
            began.set()
            gate.wait(30)

        medium = Wrapped(DramBackend(16 * PAGE), read_into=wait)
        store = TieredStore([TierSettings(medium=medium)])
        put(store, b"a")
        reader = threading.Thread(target=lambda: found.append(read(store, b"a")))
        closer = threading.Thread(target=store.close)
        reader.start()
        assert began.wait(30)
        closer.start()
        closer.join(0.05)
        assert closer.is_alive()
        gate.set()
        closer.join(30)
        reader.join(30)
        assert found == ["dram"]
        for late in (lambda: store.put(b"b", content(b"b")), lambda: read(store, b"a"), store.clear):
            with pytest.raises(StorageError, match="this store is closed"):
                late()


class TestTwoWriters:
    """One block is written once, whoever else wants to."""

    def test_an_open_block_gets_no_second_room(self):
        """While somebody writes a block, nobody else is given room for it, in no tier; afterwards they are."""
        below = DramBackend(64 * PAGE, name="below")
        with stacked(*over(below, blocks=4)) as store:
            block = store.open(b"a", LAYERS)
            assert store.open(b"a", LAYERS) is None
            assert not store.put(b"a", content(b"a"))
            assert below.used_bytes == 0
            block.abandon()
            again = store.open(b"a", LAYERS)
            assert again.write(content(b"a"), first_layer=0)
            assert again.commit()
            assert store.put(b"a", content(b"a"))
            assert read(store, b"a") == "dram"
            assert below.used_bytes == 0

    def test_a_put_under_way_is_left_alone(self):
        """The second writer returns at once, and the block is where the first one put it."""
        began, gate = threading.Event(), threading.Event()

        def wait(*_given):
            began.set()
            gate.wait(30)

        below = DramBackend(64 * PAGE, name="below")
        first = TierSettings(medium=Wrapped(DramBackend(16 * PAGE), write=wait), queue_bytes=4 * PAGE)
        with stacked(first, TierSettings(medium=below)) as store:
            writer = threading.Thread(target=store.put, args=(b"a", content(b"a")))
            writer.start()
            assert began.wait(30)
            assert not store.put(b"a", content(b"a"))
            assert store.open(b"a", LAYERS) is None
            gate.set()
            writer.join()
            assert read(store, b"a") == "dram"
            assert below.used_bytes == 0
