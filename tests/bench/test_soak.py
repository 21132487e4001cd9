"""The soak: it passes on a sound store, and it notices every kind of harm."""

import errno
import json
from pathlib import Path

import pytest

from mooncake_lab.bench import soak_process
from mooncake_lab.bench.soak import FAULTS, Soak
from mooncake_lab.bench.soak_process import (
    FINGERPRINT,
    SSD_BYTES,
    DeviceFaults,
    RemotePool,
    TornWrites,
    soak_content,
    soak_key,
)
from mooncake_lab.store.backends import SsdBackend


def prepared(folder, blocks=4):
    """A soak over a folder that holds some true blocks, and knows that it does."""
    medium = SsdBackend(folder, SSD_BYTES, fingerprint=FINGERPRINT)
    for number in range(blocks):
        key = soak_key(number)
        block = medium.reserve(key, [layer.nbytes for layer in soak_content(key)])
        medium.write(block, soak_content(key))
        medium.commit(block)
    medium.close()
    soak = Soak(folder, [])
    soak._held = {soak_key(number) for number in range(blocks)}
    return soak


def test_a_sound_folder_passes(tmp_path):
    """The checker reads every block, and finds nothing wrong."""
    soak = prepared(tmp_path)
    assert len(soak._check(set())) == 4
    assert soak.report.passed
    assert soak.report.blocks_checked == 4


def test_a_lost_block_is_noticed(tmp_path):
    """A committed block that is gone counts, unless a flip hit it."""
    soak = prepared(tmp_path)
    soak._held.add(soak_key(9))
    soak._check({soak_key(9)})
    assert soak.report.passed
    soak._check(set())
    assert soak.report.lost_committed_blocks == 1
    assert not soak.report.passed


def test_a_wrong_byte_is_noticed(tmp_path, monkeypatch):
    """A store that would serve damaged bytes fails the soak, byte by byte."""
    soak = prepared(tmp_path)
    medium = SsdBackend(tmp_path, SSD_BYTES, fingerprint=FINGERPRINT)
    hit = next(medium.blocks())
    medium.close()
    soak._flip([hit])
    monkeypatch.setattr(SsdBackend, "read_into", unchecked_read)
    soak._check(set())
    assert soak.report.wrong_bytes >= 1
    assert not soak.report.passed


def unchecked_read(medium, reservation, buffers, *, first_layer=0):
    """A read without its checksums."""
    start = reservation.offset_bytes + 4096
    for buffer in buffers:
        medium._slab.read(start, [buffer])
        start += -(-buffer.nbytes // 4096) * 4096
    assert first_layer == 0


def test_a_leak_is_noticed(tmp_path, monkeypatch):
    """Bytes in use without a block count."""
    soak = prepared(tmp_path)
    plain = SsdBackend.used_bytes.fget
    monkeypatch.setattr(SsdBackend, "used_bytes", property(lambda medium: plain(medium) + 4096))
    soak._check(set())
    assert soak.report.leaked_bytes == 4096


def test_flips_are_detected_and_nothing_else_is_lost(tmp_path):
    """After any flips of slab and index, what is not served was hit, and what was not hit is served."""
    soak = prepared(tmp_path, 12)
    blocks = soak._check(set())
    for _ in range(6):
        hit = soak._flip(blocks)
        blocks = soak._check(hit)
        soak._held = {block.key for block in blocks}
    assert soak.report.passed
    assert soak.report.faults["flip"] >= 6


def test_lives_and_deaths(tmp_path):
    """Lives with every fault at once: no wrong byte, no lost block, no leak; two lives in three die."""
    soak = Soak(tmp_path, FAULTS, seed=1)
    report = soak.run(0, lives=9)
    assert report.lives == 9
    assert report.faults["kill"] == 6
    while min(report.faults.values()) == 0 and report.lives < 90:  # lives are short where the machine is busy
        report = soak.run(0, lives=report.lives + 3)
    assert report.passed, report.plain()
    assert min(report.faults.values()) > 0
    assert report.damage_detected > 0


def test_what_a_life_says_of_leaks_is_heard(tmp_path, monkeypatch):
    """The third life ends by itself, and what it says last counts."""
    heard = []
    soak = Soak(tmp_path, ["kill"], seed=4)
    monkeypatch.setattr(soak, "_hear", heard.append)
    for _ in range(3):
        soak._live()
    assert [line for line in heard if line.startswith("L")] == ["L 0"]
    assert soak.report.faults["kill"] == 2
    assert soak.report.crashes == 0


def test_a_life_without_kills_ends_well(tmp_path):
    """Where nobody kills, lives end by themselves, and tell that nothing leaked."""
    report = Soak(tmp_path, ["full"], seed=2).run(1)
    assert report.passed, report.plain()
    assert report.operations > 0
    assert report.faults["kill"] == 0


def test_a_torn_write_is_short_or_fails(tmp_path, monkeypatch):
    """The first pages are on the device, the last is not; the call says how much it wrote, or fails."""
    outcomes = set()
    monkeypatch.setattr(soak_process, "tell", outcomes.add)
    torn = TornWrites(seed=5)
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        for _ in range(2000):
            file.truncate(0)
            try:
                moved = torn(file.fileno(), [b"a" * 4096, b"b" * 4095, b"c" * 1], 0)
                outcomes.add("short" if moved < 8192 else "whole")
            except OSError:
                outcomes.add("failed")
                moved = 4096
            assert (tmp_path / "file").stat().st_size == moved
    assert outcomes == {"X torn", "short", "whole", "failed"}


def test_faults_are_what_they_are_called(monkeypatch):
    """Each fault alone raises its own error, and only for its operations."""
    monkeypatch.setattr(soak_process, "tell", lambda _line: None)
    raised = {}
    for fault in ("read", "full", "denied"):
        faults = DeviceFaults(7, [fault])
        for _ in range(3000):
            for operation in ("read", "write", "sync"):
                try:
                    faults(operation)
                except OSError as error:
                    raised.setdefault(fault, set()).add((errno.errorcode[error.errno], operation == "read"))
    assert raised == {
        "read": {("EIO", True)},
        "full": {("ENOSPC", False)},
        "denied": {("EACCES", True), ("EACCES", False)},
    }


def test_a_pool_that_keeps_bytes_for_nobody_is_noticed():
    """What a server holds and nobody can read counts as leaked; closing frees what was open."""
    pool = RemotePool()
    held = pool.clients[0].reserve(b"held", [100])
    pool.clients[0].write(held, [bytes(100)])
    pool.clients[0].commit(held)
    pool.clients[1].reserve(b"open", [100])
    assert pool.close() == 0
    pool = RemotePool()
    pool._arena.reserve(b"leaked", [100])
    assert pool.close() > 0


@pytest.mark.wheel
def test_a_soak_over_mooncakes_store_passes(tmp_path):
    """Two stores over one Mooncake Store: no wrong byte, no object left behind; skipped without its wheel."""
    report = Soak(tmp_path, ["kill", "full", "read"], seed=3, pool="mooncake").run(0, lives=3)
    assert report.passed, report.plain()
    assert report.operations > 0


def test_a_soak_without_a_pool_passes(tmp_path):
    """DRAM over SSD alone: no wrong byte, no lost block, no leak; nothing hangs up."""
    report = Soak(tmp_path, FAULTS, seed=5, pool="none").run(0, lives=3)
    assert report.passed, report.plain()
    assert report.operations > 0
    assert report.faults["kill"] == 2
    assert report.faults["hangup"] == 0


def test_unknown_pools_are_refused(tmp_path):
    """A pool that nobody knows is an error that lists those that are known."""
    with pytest.raises(ValueError, match="'sea'; allowed are none, remote, mooncake"):
        Soak(tmp_path, [], pool="sea")


def test_unknown_faults_are_refused(tmp_path):
    """A fault that nobody knows is an error that lists those that are known."""
    with pytest.raises(ValueError, match="'fire'; allowed are kill, flip, full, read"):
        Soak(tmp_path, ["fire"])


def test_the_page_of_the_benchmarks_shows_the_kept_soaks():
    """Each kept run had every fault that its stack can have and no harm; the page has its counts."""
    root = Path(__file__).parents[2]
    page = (root / "benchmarks" / "README.md").read_text()
    table = page.partition("<!-- soak: begin -->\n")[2].partition("<!-- soak: end -->")[0].splitlines()[2:]
    runs = json.loads((root / "data" / "measured" / "store_soak.json").read_text())["runs"]
    assert [run["pool"] for run in runs] == ["none", "remote", "mooncake"]
    for run, row in zip(runs, table, strict=True):
        counts = [run["operations"], run["blocks_checked"], *(run["faults"][name] for name in FAULTS)]
        assert row.split(" | ")[1:] == [*(f"{count:,}" for count in counts[:-1]), f"{counts[-1]:,} |"]
        assert (run["wrong_bytes"], run["lost_committed_blocks"], run["leaked_bytes"], run["crashes"]) == (
            0,
            0,
            0,
            0,
        )
        assert run["seconds"] >= 600
        able = [name for name in FAULTS if name != "hangup" or run["pool"] == "remote"]
        assert min(run["faults"][name] for name in able) > 0
