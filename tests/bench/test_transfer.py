"""Moving bytes between two processes: what arrives is what was sent, whatever the way; nothing is left behind."""

import subprocess
import sys

import numpy as np
import pytest

from mooncake_lab.bench.transfer import WAYS, Route, TransferError, measure_transfers, receiver
from mooncake_lab.bench.transfer_peer import LEAST_BYTES, MOST_PIECES, pieces_of


@pytest.mark.parametrize("size", [1, LEAST_BYTES - 1, LEAST_BYTES, 5 * LEAST_BYTES + 7, 1000 * LEAST_BYTES])
def test_pieces_tile_the_transfer(size):
    """Every byte is in one piece, pieces are large and few enough."""
    pieces = pieces_of(size)
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == size
    assert len(pieces) <= MOST_PIECES
    assert len(pieces) == 1 or min(piece.stop - piece.start for piece in pieces) >= LEAST_BYTES


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.wheel if way == "mooncake" else ()) for way in WAYS]
)
def test_what_arrives_is_what_was_sent(way):
    """Two different contents, odd sizes: checksums agree at both ends; and they are of the last content."""
    area = np.random.default_rng(0).integers(0, 256, 3 * LEAST_BYTES + 5, dtype=np.uint8)
    with WAYS[way](area) as route:
        for size in (area.nbytes, 1000):
            area += 1
            route.send(size)
            route.check(size)
        area[0] += 1
        with pytest.raises(TransferError, match="checksum"):
            route.check(1000)


def test_a_receiver_that_dies_is_an_error_and_no_wait():
    """The sender is told with which code the receiver ended."""
    script = "import sys; print('null', flush=True); sys.stdin.readline(); sys.exit(3)"
    area = np.zeros(8, np.uint8)
    with receiver(["-c", script]) as (process, _), pytest.raises(TransferError, match="code 3"):
        Route(process, area, lambda _size: None).send(8)


def test_every_way_is_measured_beside_the_socket():
    """A row a way and size, each with its extremes; the socket against itself is 1."""
    measured = measure_transfers(ways=["shared memory"], sizes_bytes=[1000, 300_000], rounds=2)
    assert {(row.way, row.size_bytes) for row in measured.times} == {
        (way, size) for way in ("shared memory", "socket") for size in (1000, 300_000)
    }
    for row in measured.times:
        assert 0 < row.least_s <= row.seconds <= row.most_s
        assert row.way != "socket" or row.over_socket == 1
    assert measured.left_out == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"ways": ["pigeon"]}, "pigeon"), ({"sizes_bytes": []}, "at least one"), ({"rounds": 0}, "0")],
)
def test_what_cannot_be_measured_is_refused(changes, said):
    """Unknown ways and empty plans are a sentence, before any process is started."""
    with pytest.raises(ValueError, match=said):
        measure_transfers(**({"sizes_bytes": [1000]} | changes))


def test_the_receiver_needs_no_torch():
    """Three of four receivers start in a moment, because they import neither torch nor the engine."""
    code = "import mooncake_lab.bench.transfer_peer, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
