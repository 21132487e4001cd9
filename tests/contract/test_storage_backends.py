"""The contract of media, law by law, for every medium we ship, Mooncake Store as the clusters use it included."""

import contextlib
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_lab.net.mooncake_wheel import MooncakeMaster
from mooncake_lab.store.backends import (
    BlockExistsError,
    BlockNotFoundError,
    BlockServer,
    DramBackend,
    MooncakeClient,
    MooncakeStore,
    RemoteBackend,
    SsdBackend,
    StorageFullError,
)

CAPACITY = 64 * 4096
TOKEN = b"a token of the tests"
MODEL = b"model"


@contextlib.contextmanager
def lent(medium):
    """A medium behind a server, and its client."""
    with BlockServer(medium, TOKEN, timeout_s=5) as server:
        client = RemoteBackend(server.address, TOKEN, fingerprint=MODEL, timeout_s=5)
        try:
            yield client
        finally:
            client.close()
            medium.close()


@contextlib.contextmanager
def owned(medium):
    """A medium that is closed at the end."""
    try:
        yield medium
    finally:
        medium.close()


class AnyShape:
    """A `MooncakeStore` for each shape of blocks, as one medium that lists what it stored: each has one shape."""

    is_shared = True

    def __init__(self, client):
        self.client = client
        self.pools = {}
        self.keys = {}
        self.capacity_bytes = 16 * 2**20

    def pool(self, layer_bytes):
        """The pool of blocks of this shape."""
        shape = tuple(layer_bytes)
        made = self.pools.get(shape)
        if made is None:
            made = self.pools[shape] = MooncakeStore(self.client, self.capacity_bytes, shape, fingerprint=MODEL)
        return made

    def reserve(self, key, layer_bytes, *, position=0):
        """A reservation, of a key that is known from now on."""
        held = self.pools.get(self.keys.get(key))
        if held is not None and held.find([key]):
            raise BlockExistsError(key)
        block = self.pool(layer_bytes).reserve(key, layer_bytes, position=position)
        self.keys[key] = block.layer_bytes
        return block

    def commit(self, *blocks):
        """Blocks of one shape."""
        self.pool(blocks[0].layer_bytes).commit(*blocks)

    def find(self, keys):
        """The blocks with these keys."""
        return [block for key in keys if key in self.keys for block in self.pool(self.keys[key]).find([key])]

    def blocks(self):
        """Those of the known keys that the store still has."""
        return iter(self.find(self.keys))

    @property
    def used_bytes(self):
        """Of all pools, with what the store holds."""
        held = sum(self.footprint_bytes(block.key, block.layer_bytes) for block in self.blocks())
        return held + sum(pool.used_bytes for pool in self.pools.values())

    def footprint_bytes(self, key, layer_bytes):
        """As the pool."""
        return self.pool(layer_bytes).footprint_bytes(key, layer_bytes)

    def __getattr__(self, name):
        """Any other call goes to the pool of the block that it names."""
        return lambda block, *given, **named: getattr(self.pool(block.layer_bytes), name)(block, *given, **named)

    def close(self):
        """The client stays for the next test; its objects go."""
        for block in self.blocks():
            self.free(block)


MEDIA = {
    "dram": lambda _folder: owned(DramBackend(CAPACITY)),
    "ssd": lambda folder: owned(SsdBackend(folder, CAPACITY, fingerprint=MODEL)),
    "tcp_dram": lambda _folder: lent(DramBackend(CAPACITY)),
    "mooncake": lambda client: owned(AnyShape(client)),
    "tcp_ssd": lambda folder: lent(SsdBackend(folder, CAPACITY, fingerprint=b"server")),
}


@pytest.fixture(scope="session")
def mooncake():
    """A client of a Mooncake Store, where its wheel can be loaded: a process has one."""
    with MooncakeMaster() as master, MooncakeClient(master.address, 16 * 2**20) as client:
        yield client


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.wheel if name == "mooncake" else ()) for name in MEDIA]
)
def medium(request, tmp_path):
    """Each medium, empty, of 64 pages."""
    place = request.getfixturevalue("mooncake") if request.param == "mooncake" else tmp_path / "store"
    with MEDIA[request.param](place) as made:
        yield made


def content(key, layer_bytes):
    """The layers that a key stands for."""
    draw = np.random.default_rng(list(key))
    return [draw.integers(0, 256, size, np.uint8) for size in layer_bytes]


def store(medium, key, layer_bytes):
    """Reserve, write and commit a block."""
    reservation = medium.reserve(key, layer_bytes)
    try:
        medium.write(reservation, content(key, layer_bytes))
        medium.commit(reservation)
    except StorageFullError:
        medium.free(reservation)
        raise
    return reservation


def load(medium, reservation, first_layer=0, layers=None):
    """Layers of a block, into buffers of their size."""
    sizes = reservation.layer_bytes[first_layer:][:layers]
    buffers = [np.full(size, 7, np.uint8) for size in sizes]
    medium.read_into(reservation, buffers, first_layer=first_layer)
    return [buffer.tobytes() for buffer in buffers]


def expected(reservation):
    """The bytes that a reservation's key stands for."""
    return [layer.tobytes() for layer in content(reservation.key, reservation.layer_bytes)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layer_bytes=st.lists(st.integers(1, 9000), min_size=1, max_size=9), first=st.integers(0, 8))
def test_what_is_written_is_read(medium, layer_bytes, first):
    """A block of any layers comes back bit by bit, whole and one layer at a time, and leaves no byte behind."""
    block = store(medium, b"key", layer_bytes)
    assert load(medium, block) == expected(block)
    layer = first % len(layer_bytes)
    assert load(medium, block, layer, 1) == expected(block)[layer : layer + 1]
    medium.free(block)
    assert medium.used_bytes == 0


def test_one_commit_takes_a_block_once(medium):
    """A block named twice is refused before anything changes; named once, it commits and its room comes back."""
    block = medium.reserve(b"key", [100])
    medium.write(block, content(b"key", [100]))
    with pytest.raises(ValueError, match="twice"):
        medium.commit(block, block)
    assert list(medium.blocks()) == []
    medium.commit(block)
    assert load(medium, block) == expected(block)
    medium.free(block)
    assert medium.used_bytes == 0


def test_nothing_is_read_before_the_commit(medium):
    """An open reservation cannot be read, and is not listed."""
    block = medium.reserve(b"key", [10])
    medium.write(block, content(b"key", [10]))
    with pytest.raises(BlockNotFoundError):
        load(medium, block)
    assert list(medium.blocks()) == []


def test_a_commit_needs_every_layer(medium):
    """A block with a missing layer is not committed, and stays open."""
    block = medium.reserve(b"key", [10, 20])
    medium.write(block, content(b"key", [10, 20])[1:], first_layer=1)
    with pytest.raises(ValueError, match=r"lacks layers \[0\]"):
        medium.commit(block)
    medium.write(block, content(b"key", [10, 20])[:1])
    medium.commit(block)
    assert load(medium, block) == expected(block)


def test_a_committed_block_cannot_be_changed(medium):
    """Writing after the commit is refused, and changes nothing."""
    block = store(medium, b"key", [10])
    with pytest.raises(BlockNotFoundError):
        medium.write(block, [b"0123456789"])
    assert load(medium, block) == expected(block)


def test_one_key_is_held_once(medium):
    """A reserved or held key cannot be reserved; a freed one can."""
    block = medium.reserve(b"key", [10])
    with pytest.raises(BlockExistsError):
        medium.reserve(b"key", [10])
    medium.free(block)
    block = store(medium, b"key", [10])
    with pytest.raises(BlockExistsError):
        medium.reserve(b"key", [10])
    medium.free(block)
    assert load(medium, store(medium, b"key", [10])) == expected(block)


def test_a_freed_block_is_gone(medium):
    """It cannot be read or freed again, and an old handle does not reach a new block of the same key.

    In Mooncake Store a handle is a key, so there it reads the new block: one key names one content.
    """
    block = store(medium, b"key", [10])
    medium.free(block)
    with pytest.raises(BlockNotFoundError):
        load(medium, block)
    with pytest.raises(BlockNotFoundError):
        medium.free(block)
    if store(medium, b"key", [10]) == block:
        assert isinstance(medium, AnyShape)
        assert load(medium, block) == expected(block)
        return
    with pytest.raises(BlockNotFoundError):
        load(medium, block)
    with pytest.raises(BlockNotFoundError):
        medium.free(block)


def test_a_full_medium_says_so_and_keeps_what_it_has(medium):
    """Blocks fit until they do not; the refusal changes nothing, and freeing one makes room for one.

    A pool that evicts makes room itself: what it still has is right, and those that left are not found. A block
    server keeps the newest blocks, while Mooncake evicts later, and refuses some blocks until then.
    """
    held = []
    if medium.is_shared:
        written = []
        for number in range(100):
            with contextlib.suppress(*[StorageFullError] if isinstance(medium, AnyShape) else []):
                written.append(store(medium, b"%d" % number, [medium.capacity_bytes // 50] * 2))
        held = list(medium.blocks())
        assert isinstance(medium, AnyShape) or held == written[-len(held) :]
        assert 5 < len(held) < 100
        assert medium.find(block.key for block in written) == held
        assert medium.used_bytes <= medium.capacity_bytes
        assert [load(medium, block) for block in held] == [expected(block) for block in held]
        with pytest.raises(BlockNotFoundError):
            load(medium, next(block for block in written if block not in held))
        return

    def fill():
        for number in range(100):
            held.append(store(medium, b"%d" % number, [5000, 5000]))

    with pytest.raises(StorageFullError):
        fill()
    assert len(held) > 5
    assert medium.used_bytes <= medium.capacity_bytes
    assert [load(medium, block) for block in held] == [expected(block) for block in held]
    medium.free(held.pop(3))
    held.append(store(medium, b"newcomer", [5000, 5000]))
    assert [load(medium, block) for block in held] == [expected(block) for block in held]


def test_blocks_are_listed_oldest_first(medium):
    """What is committed, and nothing else, in the order of its reservation, with its position if that is kept."""
    made = [medium.reserve(b"%d" % number, [4], position=number) for number in (3, 1, 2)]
    for block in made:
        medium.write(block, [b"data"])
        medium.commit(block)
    medium.free(made[0])
    assert list(medium.blocks()) == made[1:]
    assert isinstance(medium, AnyShape) or [block.position for block in medium.blocks()] == [1, 2]


def test_committed_blocks_are_found_by_their_keys(medium):
    """`find` gives those of the keys that are committed, in the order of the keys."""
    blocks = [store(medium, key, [10]) for key in (b"a", b"b", b"c")]
    medium.reserve(b"open", [10])
    assert medium.find([b"c", b"open", b"other", b"a"]) == [blocks[2], blocks[0]]
    assert medium.find([]) == []
    medium.free(blocks[2])
    assert medium.find([b"c", b"a"]) == [blocks[0]]


@pytest.mark.parametrize(
    ("key", "layer_bytes"), [(b"", [1]), (b"k" * 129, [1]), (b"k", []), (b"k", [1, 0]), (b"k", [1] * 513)]
)
def test_bad_blocks_are_refused(medium, key, layer_bytes):
    """Keys and layers out of bounds are an error, and reserve nothing."""
    with pytest.raises(ValueError, match="allowed are 1 to"):
        medium.reserve(key, layer_bytes)
    assert medium.used_bytes == 0


def test_buffers_must_fit_their_layers(medium):
    """Wrong sizes, layers that do not exist and scattered or read-only memory are errors."""
    block = medium.reserve(b"key", [10, 20])
    for buffers, first in [([b"short"], 0), ([bytes(10), bytes(20), bytes(1)], 0), ([bytes(10)], 2), ([], 0)]:
        with pytest.raises(ValueError, match="buffers of"):
            medium.write(block, buffers, first_layer=first)
    with pytest.raises(ValueError, match="not contiguous"):
        medium.write(block, [np.zeros(20, np.uint8)[::2]])
    medium.write(block, content(b"key", [10, 20]))
    medium.commit(block)
    with pytest.raises(ValueError, match="not contiguous and writable"):
        medium.read_into(block, [bytes(10)])


def test_footprints_are_what_is_used(medium):
    """The announced footprint is at most what a block then takes; for media of this machine it is exactly that."""
    announced = medium.footprint_bytes(b"key", [5000, 10])
    store(medium, b"key", [5000, 10])
    if medium.is_shared:
        assert announced <= medium.used_bytes
    else:
        assert announced == medium.used_bytes


def test_layers_are_written_and_read_through_its_own_buffers(medium):
    """What is put into the write buffers of a backend and written is what `read` returns."""
    block = medium.reserve(b"key", [100, 4096, 5000])
    for first, count in ((2, 1), (0, 2)):
        buffers = medium.write_buffers(block, first, count)
        for buffer, layer in zip(buffers, content(b"key", block.layer_bytes)[first:], strict=False):
            buffer[:] = layer
        medium.write(block, buffers, first_layer=first)
    medium.commit(block)
    assert [layer.tobytes() for layer in medium.read(block, 0, 3)] == expected(block)
    assert [layer.tobytes() for layer in medium.read(block, 1, 1)] == expected(block)[1:2]
    medium.free(block)
    with pytest.raises(BlockNotFoundError):
        medium.read(block, 0, 3)


def test_threads_share_a_medium(medium):
    """Threads that store, read and free their own blocks never see anything else."""
    wrong = []

    def work(thread):
        for turn in range(12):
            block = store(medium, b"%d/%d" % (thread, turn), [3000, 4096])
            if load(medium, block) != expected(block):
                wrong.append(block)
            medium.free(block)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert medium.used_bytes == 0
