"""A fault of a whole device, here or at a peer: the tier is asked less often, and no block is freed."""

import contextlib
import errno

import pytest
from tier_blocks import PAGE, put, read, two_stores

from mooncake_lab.store.backends import SsdBackend
from mooncake_lab.store.backends import remote as messages
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

KEYS = [b"%d" % number for number in range(6)]
CODES = ["EACCES", "EPERM", "EIO", "ENODEV", "ENXIO", "ESTALE", "EROFS"]


class FailingReads:
    """Lets reads of a device fail with one error number while it is set."""

    def __init__(self):
        self.code = None

    def __call__(self, operation):
        """Refuse to read."""
        if operation == "read" and self.code is not None:
            raise OSError(getattr(errno, self.code), f"injected: {self.code}")


@contextlib.contextmanager
def shared_pool(folder):
    """Two stores over one lent SSD that hold the same six blocks, the SSD, and what lets it fail."""
    fail = FailingReads()
    ssd = SsdBackend(folder, 64 * PAGE, fingerprint=b"m", before=fail)
    with two_stores(ssd, *KEYS) as stores:
        yield stores, ssd, fail
    ssd.close()


@pytest.mark.parametrize("code", CODES)
def test_one_clients_read_errors_leave_a_shared_pool_alone(tmp_path, code):
    """After forty failed reads of every block all clients have all of them, and the tier says what is wrong."""
    with shared_pool(tmp_path) as ((first, second), ssd, fail):
        fail.code = code
        assert [read(first, key) for _ in range(40) for key in KEYS] == [None] * 240
        found = first.statistics()[0]
        assert code in found.degraded
        assert found.damaged == 0
        assert 3 <= found.read_errors < 40  # asked less and less often
        fail.code = None
        assert len(list(ssd.blocks())) == len(KEYS)
        assert [read(second, key) for key in KEYS] == ["remote"] * len(KEYS)
        assert "remote" in [read(first, KEYS[0]) for _ in range(16)]
        assert first.statistics()[0].degraded is None
        assert [read(first, key) for key in KEYS] == ["remote"] * len(KEYS)


@pytest.mark.parametrize("code", CODES)
def test_a_local_device_that_fails_keeps_its_blocks(tmp_path, code):
    """Here as at a peer: nothing is freed, however often reads fail, and all is there when the device is."""
    fail = FailingReads()
    ssd = SsdBackend(tmp_path, 64 * PAGE, fingerprint=b"m", before=fail)
    with TieredStore([TierSettings(medium=ssd)]) as store:
        put(store, *KEYS)
        fail.code = code
        assert [read(store, key) for _ in range(40) for key in KEYS] == [None] * 240
        assert code in store.statistics()[0].degraded
        assert [store.put(key, [bytes(PAGE), bytes(PAGE)]) for key in KEYS] == [True] * len(KEYS)  # held already
        fail.code = None
        assert "ssd" in [read(store, KEYS[0]) for _ in range(16)]
        assert [read(store, key) for key in KEYS] == ["ssd"] * len(KEYS)
        assert store.statistics()[0].stored == len(KEYS)
        store.check()
    ssd.close()


def test_a_block_with_a_wrong_checksum_is_freed_for_all(tmp_path):
    """Only bytes that are not what was written free a block, and only that one."""
    with shared_pool(tmp_path) as ((first, second), ssd, _):
        with (tmp_path / b"m".hex() / "slab").open("r+b") as slab:
            slab.seek(PAGE + 17)
            flipped = slab.read(1)[0] ^ 1
            slab.seek(PAGE + 17)
            slab.write(bytes([flipped]))
        found = [read(first, key) for key in KEYS]
        assert sorted(found, key=str) == [None, *["remote"] * 5]
        assert first.statistics()[0].damaged == 1
        assert len(list(ssd.blocks())) == 5
        assert [read(second, key) for key in KEYS] == found


@pytest.mark.parametrize("code", [*CODES, "ENOSPC", "EBADMSG"])
def test_the_error_number_travels(code):
    """What a server's device answers is what its client raises: number, type and reason."""
    failure = OSError(getattr(errno, code), "injected")
    raised = messages.error_of(messages.failed(failure), messages.Status())
    assert type(raised) is type(failure)
    assert raised.errno == failure.errno
    assert "injected" in str(raised)


def test_an_error_without_a_number_is_an_error_of_the_device():
    """One that names no number, or one that this system does not have, is an OSError with no number."""
    assert messages.error_of(messages.failed(OSError("no number")), messages.Status()).errno is None
    unknown = messages.Failed("device", "strange", "ENOSUCHNAME")
    assert messages.error_of(unknown, messages.Status()).errno is None
