"""How fast media are, beside the plainest way to move the same bytes on this machine, in the same run."""

import contextlib
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from mooncake_lab.bench.measuring import median_ratio, paired_rounds, timed
from mooncake_lab.bench.store_floors import (
    Blocks,
    Pass,
    copy,
    forgetting,
    plain_file,
    reading,
    receive,
    send,
    writing,
)
from mooncake_lab.bench.store_mooncake import BareObjects, provider, segment_bytes
from mooncake_lab.core import MIB
from mooncake_lab.store.backends import (
    DramBackend,
    MooncakeClient,
    MooncakeMaster,
    MooncakePool,
    RemoteBackend,
    Reservation,
    SsdBackend,
    StorageBackend,
)

MEDIA: Final = ("dram", "ssd", "tcp", "mooncake")
_LAYERS: Final = 32
_BATCH_BLOCKS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumMeasurement:
    """One operation of one medium, and its floor; medians over rounds that took turns."""

    medium: str
    operation: str
    floor: str
    """The plain way it is compared with."""
    block_bytes: int
    bytes_per_s: float
    floor_bytes_per_s: float
    ratio: float
    """Ours over the floor, paired round by round; its median."""


def measure_media(
    folder: Path,
    media: Sequence[str],
    *,
    block_bytes: Sequence[int],
    rounds: int = 5,
    working_set_bytes: int = 128 * MIB,
) -> list[MediumMeasurement]:
    """Measure reading and writing of each medium for each block size.

    Args:
        folder: where the SSD medium and the plain files lie; what is made there is removed.
        media: names in `MEDIA`.
        block_bytes: sizes of blocks, each of 32 equal layers.
        rounds: rounds of each; ours and the floors take turns in each round.
        working_set_bytes: moved in one pass: more than the processor's caches hold, so that they favour no side.

    Raises:
        ValueError: when a medium is unknown or a size is no multiple of 32 pages.
        StorageError: when Mooncake's wheel cannot be loaded.
        OSError: when the folder has no room.
    """
    unknown = [name for name in media if name not in MEDIA]
    if unknown:
        raise ValueError(f"unknown medium {unknown[0]!r}; allowed are {', '.join(MEDIA)}")
    odd = [size for size in block_bytes if size < 1 or size % (4096 * _LAYERS)]
    if odd:
        raise ValueError(f"blocks of {odd[0]} bytes; allowed are multiples of {4096 * _LAYERS}")
    measured: list[MediumMeasurement] = []
    for size in block_bytes:
        count = max(_BATCH_BLOCKS, working_set_bytes // size)
        with _memory(size, count) as source, _memory(size, count) as target:
            if "dram" in media:
                measured += _dram(source, target, size, rounds)
            if "ssd" in media:
                measured += _ssd(folder, source, target, size, rounds)
            if "tcp" in media:
                measured += _tcp(source, target, size, rounds)
            if "mooncake" in media:
                measured += _mooncake(source, target, size, rounds)
    return measured


def _dram(source: Blocks, target: Blocks, size: int, rounds: int) -> list[MediumMeasurement]:
    medium = DramBackend(size * len(source))
    with _memory(size, len(source)) as plain:
        rows = _compare("dram", size, size * len(source), rounds, _passes(medium, source, target, 1), {
            "memcpy": (lambda: copy(source, plain), lambda: copy(plain, target)),
        })  # fmt: skip  # a small table
    medium.close()
    return rows


def _ssd(folder: Path, source: Blocks, target: Blocks, size: int, rounds: int) -> list[MediumMeasurement]:
    rows: list[MediumMeasurement] = []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        medium = SsdBackend(Path(scratch) / "store", (size + MIB) * len(source), fingerprint=b"bench")
        slab = Path(scratch) / "store" / b"bench".hex() / "slab"
        with plain_file(Path(scratch) / "plain", size * len(source)) as (cached, direct):
            for batch in (1, _BATCH_BLOCKS):
                floors: dict[str, tuple[Pass, Pass]] = {}
                for name, file in (("pwrite and pread", cached), ("O_DIRECT", direct)):
                    if file is not None:
                        floors[name] = (writing(file, source, batch), reading(file, target))
                forget = forgetting(cached, slab)
                name = "ssd" if batch == 1 else f"ssd, {batch} a commit"
                rows += _compare(
                    name, size, size * len(source), rounds, _passes(medium, source, target, batch), floors, forget
                )
        medium.close()
    return rows


def _tcp(source: Blocks, target: Blocks, size: int, rounds: int) -> list[MediumMeasurement]:
    token = secrets.token_bytes(32)
    with arena_peer(size * (len(source) + 1), token) as (lent, bare):
        medium = RemoteBackend(("127.0.0.1", lent), token, fingerprint=b"bench")
        with socket.create_connection(("127.0.0.1", bare)) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            floors = {"bare socket": (lambda: send(plain, source), lambda: receive(plain, target))}
            rows = _compare("tcp", size, size * len(source), rounds, _passes(medium, source, target, 1), floors)
        medium.close()
    return rows


def _mooncake(source: Blocks, target: Blocks, size: int, rounds: int) -> list[MediumMeasurement]:
    """Blocks in this process's own segment, where Mooncake copies memory, and in another process's, over TCP."""
    room, rows = segment_bytes(size * len(source)), list[MediumMeasurement]()
    with MooncakeMaster() as master:
        with master.client(room) as client:
            rows += _beside_bare("mooncake", client, source, target, size, rounds)
        with provider(master.address, room), master.client(0) as client:
            rows += _beside_bare("mooncake, remote", client, source, target, size, rounds)
    return rows


def _beside_bare(
    name: str, client: MooncakeClient, source: Blocks, target: Blocks, size: int, rounds: int
) -> list[MediumMeasurement]:
    """A pool verifies checksums, which the bare interface does not."""
    moved = size * len(source)
    medium = MooncakePool(client, moved, [layer.nbytes for layer in source[0]], fingerprint=b"bench")
    bare = BareObjects(client)
    write, read, clear = _passes(medium, source, target, 1)
    floors = {"its bare API": bare.passes(source, target)}
    return _compare(name, size, moved, rounds, (write, read, _both(clear, bare.clear)), floors)


def _both(first: Pass, second: Pass) -> Pass:
    def work() -> None:
        first()
        second()

    return work


def _compare(
    medium: str,
    size: int,
    moved: int,
    rounds: int,
    ours: tuple[Pass, Pass, Pass],
    floors: dict[str, tuple[Pass, Pass]],
    forget: Pass | None = None,
) -> list[MediumMeasurement]:
    """Time our writing and reading and the floors' in paired rounds."""
    write, read, clear = ours

    def time_once() -> dict[tuple[str, str], float]:
        taken = {("ours", "write"): timed(write)}
        for name, (plain_write, plain_read) in floors.items():
            taken[name, "write"] = timed(plain_write)
            taken.update(_reads(name, plain_read, forget))
        taken.update(_reads("ours", read, forget))
        clear()
        return taken

    runs = paired_rounds(time_once, rounds)
    return [
        _row(medium, operation, name, size, moved, runs["ours", operation], seconds)
        for (name, operation), seconds in runs.items()
        if name != "ours"
    ]


def _reads(name: str, read: Pass, forget: Pass | None) -> dict[tuple[str, str], float]:
    """One read, or two where the page cache matters: after it forgot, and again."""
    if forget is None:
        return {(name, "read"): timed(read)}
    forget()
    return {(name, "cold read"): timed(read), (name, "warm read"): timed(read)}


def _row(
    medium: str, operation: str, floor: str, size: int, moved: int, ours: list[float], plain: list[float]
) -> MediumMeasurement:
    return MediumMeasurement(
        medium=medium,
        operation=operation,
        floor=floor,
        block_bytes=size,
        bytes_per_s=moved / statistics.median(ours),
        floor_bytes_per_s=moved / statistics.median(plain),
        ratio=median_ratio(plain, ours),
    )


def _passes(medium: StorageBackend, source: Blocks, target: Blocks, batch: int) -> tuple[Pass, Pass, Pass]:
    """Store every block, read every block, free every block."""
    held: list[Reservation] = []

    def write() -> None:
        for start in range(0, len(source), batch):
            new: list[Reservation] = []
            for number in range(start, min(start + batch, len(source))):
                reservation = medium.reserve(b"block %d" % number, [layer.nbytes for layer in source[number]])
                medium.write(reservation, source[number])
                new.append(reservation)
            medium.commit(*new)
            held.extend(new)

    def read() -> None:
        for reservation, layers in zip(held, target, strict=True):
            medium.read_into(reservation, layers)

    def clear() -> None:
        medium.free(*held)
        held.clear()

    return write, read, clear


@contextlib.contextmanager
def _memory(size: int, count: int) -> Generator[Blocks]:
    """Blocks of page-aligned layers in touched memory, all different."""
    arena = DramBackend(size * count, pinned=False)
    blocks = [
        arena.write_buffers(arena.reserve(b"%d" % i, [size // _LAYERS] * _LAYERS), 0, _LAYERS)
        for i in range(count)
    ]
    draw = np.random.default_rng(0)
    for layers in blocks:
        for layer in layers:
            layer[:] = draw.integers(0, 256, layer.nbytes, np.uint8)
    yield blocks
    arena.close()


@contextlib.contextmanager
def arena_peer(arena_bytes: int, token: bytes) -> Generator[tuple[int, int]]:
    """A process that lends an arena and runs a bare socket; the ports of both."""
    command = [sys.executable, "-m", "mooncake_lab.bench.store_peer", str(arena_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:  # noqa: S603  # our own
        assert peer.stdin is not None  # noqa: S101  # both were asked for
        assert peer.stdout is not None  # noqa: S101  # likewise
        peer.stdin.write(token.hex() + "\n")
        peer.stdin.flush()
        lent, bare = peer.stdout.readline().split()
        try:
            yield int(lent), int(bare)
        finally:
            peer.stdin.close()
