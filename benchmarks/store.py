"""The store's backends beside the simplest way to move the same bytes on this machine, in the same rounds.

Run: python benchmarks/store.py --media dram,ssd,tcp,mooncake --rounds 7 --out data/measured/cpu_store.json

Compared are memcpy, pwrite and pread (cached and O_DIRECT), a plain socket, and Mooncake's API. A ratio above 1
means that the store is faster. Blocks have 32 layers. SSD writes of both sides are synced. mooncake needs the
extra of that name. The last line is the time to look up a prompt of 128k tokens.
"""  # noqa: INP001  # scripts, not a package

import argparse
import contextlib
import os
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from speed import provenance

from mooncake_lab.bench.media import arena_peer, forget_pages, peer_process
from mooncake_lab.bench.rounds import Rounds, alternating_rounds, in_order, paired_rounds, same, timed
from mooncake_lab.core import GB, MIB, block_keys
from mooncake_lab.net.mooncake_wheel import MooncakeMaster
from mooncake_lab.store.backends import (
    DramBackend,
    MooncakeClient,
    MooncakeStore,
    RemoteBackend,
    Reservation,
    SsdBackend,
    StorageBackend,
    StorageError,
)
from mooncake_lab.store.index import PrefixIndex

Blocks: TypeAlias = list[list[npt.NDArray[np.uint8]]]
"""The layers of each block."""
Pass: TypeAlias = Callable[[], object]
"""Moves all blocks once."""
ORDER: Final = struct.Struct("<cQ")
"""What a client of the bare socket asks: w to take or r to send, and how many bytes; w is answered by one byte."""
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
        MooncakeError: when Mooncake's wheel cannot be loaded.
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
    with (
        arena_peer(size * (len(source) + 1), token) as port,
        peer_process([__file__, "--serve-socket"]) as bare,
        socket.create_connection(("127.0.0.1", int(bare))) as plain,
    ):
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        medium = RemoteBackend(("127.0.0.1", port), token, fingerprint=b"bench")
        floors = {"bare socket": (lambda: send(plain, source), lambda: receive(plain, target))}
        rows = _compare("tcp", size, size * len(source), rounds, _passes(medium, source, target, 1), floors)
        medium.close()
    return rows


def _mooncake(source: Blocks, target: Blocks, size: int, rounds: int) -> list[MediumMeasurement]:
    """Blocks in this process's own segment, where Mooncake copies memory, and in another process's, over TCP."""
    room = 5 * size * len(source) // 2 + 64 * MIB  # ours and the bare one's blocks lie beside each other
    rows: list[MediumMeasurement] = []
    with MooncakeMaster() as master:
        with MooncakeClient(master.address, room) as client:
            rows += _beside_bare("mooncake", client, source, target, size, rounds)
        lender = peer_process([__file__, "--serve-segment", master.address, str(room)])
        with lender, MooncakeClient(master.address, 0) as client:
            rows += _beside_bare("mooncake, remote", client, source, target, size, rounds)
    return rows


def _beside_bare(
    name: str, client: MooncakeClient, source: Blocks, target: Blocks, size: int, rounds: int
) -> list[MediumMeasurement]:
    """A pool verifies checksums, which the bare interface does not."""
    moved = size * len(source)
    medium = MooncakeStore(client, moved, [layer.nbytes for layer in source[0]], fingerprint=b"bench")
    bare = BareObjects(client)
    write, read, clear = _passes(medium, source, target, 1)
    floors = {"its bare API": (lambda: bare.write(source), lambda: bare.read(target))}
    return _compare(name, size, moved, rounds, (write, read, lambda: (clear(), bare.clear())), floors)


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

    ways = {"ours": (write, read), **floors}

    def time_once(number: int) -> dict[tuple[str, str], float]:
        taken = dict[tuple[str, str], float]()
        for name in in_order(ways, number):
            write_one, read_one = ways[name]
            taken[name, "write"] = timed(write_one)
            taken.update(_reads(name, read_one, forget))
        clear()
        return taken

    runs = paired_rounds(time_once, rounds)
    return [
        _row(medium, operation, name, size, moved, runs)
        for name in floors
        for of, operation in runs.seconds
        if of == name
    ]


def _reads(name: str, read: Pass, forget: Pass | None) -> dict[tuple[str, str], float]:
    """One read, or two where the page cache matters: after it forgot, and again."""
    if forget is None:
        return {(name, "read"): timed(read)}
    forget()
    return {(name, "cold read"): timed(read), (name, "warm read"): timed(read)}


def _row(
    medium: str, operation: str, floor: str, size: int, moved: int, runs: Rounds[tuple[str, str]]
) -> MediumMeasurement:
    ours, plain = ("ours", operation), (floor, operation)
    return MediumMeasurement(
        medium=medium,
        operation=operation,
        floor=floor,
        block_bytes=size,
        bytes_per_s=moved / runs.median_s(ours),
        floor_bytes_per_s=moved / runs.median_s(plain),
        ratio=runs.ratio(plain, ours).median,
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


def copy(source: Blocks, target: Blocks) -> None:
    """Copy every layer from memory to memory."""
    for old, new in zip(source, target, strict=True):
        for one, other in zip(old, new, strict=True):
            np.copyto(other, one)


def writing(file: int, source: Blocks, batch: int) -> Pass:
    """Write blocks one behind the other, syncing after every `batch`."""

    def write() -> None:
        at = 0
        for number, layers in enumerate(source, start=1):
            at += os.pwritev(file, [layer.data for layer in layers], at)
            if number % batch == 0 or number == len(source):
                os.fdatasync(file)

    return write


def reading(file: int, target: Blocks) -> Pass:
    """Read blocks one behind the other."""

    def read() -> None:
        at = 0
        for layers in target:
            at += os.preadv(file, [layer.data for layer in layers], at)

    return read


def forgetting(plain: int, slab: Path) -> Pass:
    """Ask the page cache to drop both files."""

    def forget() -> None:
        os.posix_fadvise(plain, 0, 0, os.POSIX_FADV_DONTNEED)
        forget_pages(slab)

    return forget


def send(peer: socket.socket, source: Blocks) -> None:
    """Send blocks to the bare socket of `serve_socket`, each acknowledged by a byte."""
    for layers in source:
        peer.sendall(ORDER.pack(b"w", sum(layer.nbytes for layer in layers)))
        for layer in layers:
            peer.sendall(layer.data)
        peer.recv(1)


def receive(peer: socket.socket, target: Blocks) -> None:
    """Have the bare socket of `serve_socket` send blocks."""
    for layers in target:
        peer.sendall(ORDER.pack(b"r", sum(layer.nbytes for layer in layers)))
        for layer in layers:
            got = 0
            while got < layer.nbytes:
                got += peer.recv_into(layer.data[got:])


@contextlib.contextmanager
def plain_file(path: Path, size: int) -> Generator[tuple[int, int | None]]:
    """A preallocated file through the page cache, and around it where the file system can."""
    cached = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(cached, 0, size)
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        direct = None
    try:
        yield cached, direct
    finally:
        for file in (cached, direct):
            if file is not None:
                os.close(file)


@final
class BareObjects:
    """The same blocks as plain objects, written and read in one call each: `put_from` and `get_into`.

    The layers of a block lie one behind the other in memory, which is the best case of that interface. Mutable: it
    knows which objects there are.
    """

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._names: list[str] = []

    def clear(self) -> None:
        """Remove every block."""
        self._client.api.batch_remove(self._names, force=True)
        self._names.clear()

    def write(self, source: Blocks) -> None:
        """Write every block."""
        for number, layers in enumerate(source):
            name = f"bare/{number}"
            size = sum(layer.nbytes for layer in layers)
            _check(self._client.api.put_from(name, layers[0].ctypes.data, size))
            self._names.append(name)

    def read(self, target: Blocks) -> None:
        """Read every block."""
        for name, layers in zip(self._names, target, strict=True):
            size = sum(layer.nbytes for layer in layers)
            _check(self._client.api.get_into(name, layers[0].ctypes.data, size))


def _check(code: int) -> None:
    if code < 0:
        raise StorageError(f"Mooncake's bare interface fails: code {code}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Medians over rounds, for a prompt that every instance holds whole: the longest walk there is."""

    tokens: int
    block_tokens: int
    instances: int
    keys_s: float
    """The chained hashes of all blocks."""
    floor_s: float
    """One hash of the prompt's bytes as a whole."""
    match_s: float
    """The match over all instances."""


def measure_lookup(
    tokens: int = 131_072, *, block_tokens: int = 512, instances: int = 8, rounds: int = 51
) -> Lookup:
    """Time both for a random prompt (FAST'25 §4.1: the hash computation of the Conductor's prefix match)."""
    prompt = np.random.default_rng(0).integers(0, 128_000, tokens).astype(np.int32)
    index = PrefixIndex()
    for number in range(instances):
        index.join(f"prefill-{number}")
        index.update(f"prefill-{number}", block_keys(prompt, block_tokens))
    keys, whole = block_keys(prompt, block_tokens), prompt.tobytes()
    works: dict[str, Pass] = {
        "keys": lambda: block_keys(prompt, block_tokens),
        "floor": lambda: xxhash.xxh3_128_digest(whole),
        "match": lambda: index.matches(keys),
    }
    taken = alternating_rounds({name: same(partial(timed, work)) for name, work in works.items()}, rounds)
    return Lookup(
        tokens=tokens,
        block_tokens=block_tokens,
        instances=instances,
        keys_s=taken.median_s("keys"),
        floor_s=taken.median_s("floor"),
        match_s=taken.median_s("match"),
    )


def serve_socket() -> None:
    """Take and send bytes as fast as a plain socket can, out of an area that is larger than the caches."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    area = np.ones(256 * MIB, np.uint8).data
    at = 0
    while order := peer.recv(ORDER.size, socket.MSG_WAITALL):
        what, size = ORDER.unpack(order)
        at = at if at + size <= len(area) else 0
        place = area[at : at + size]
        at += size
        if what == b"r":
            peer.sendall(place)
            continue
        got = 0
        while got < size:
            got += peer.recv_into(place[got:])
        peer.sendall(b".")


def serve_segment(master: str, lent_bytes: str) -> None:
    """Lend a Mooncake Store memory until stdin closes."""
    with MooncakeClient(master, int(lent_bytes)):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()


def measure(
    folder: Path, media: Sequence[str], block_mib: Sequence[int], rounds: int, working_set_mib: int
) -> dict[str, Any]:
    """All rows and the lookup, as plain values."""
    rows = measure_media(
        folder,
        media,
        block_bytes=[size * MIB for size in block_mib],
        rounds=rounds,
        working_set_bytes=working_set_mib * MIB,
    )
    measured = {"rows": [asdict(row) for row in rows], "lookup": asdict(measure_lookup())}
    return {**provenance(), "rounds": rounds, "layers": _LAYERS, **measured}


def main() -> None:
    """Measure, show, and perhaps write."""
    if sys.argv[1:2] == ["--serve-socket"]:
        serve_socket()
        return
    if sys.argv[1:2] == ["--serve-segment"]:
        serve_segment(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the SSD that counts")
    parser.add_argument("--media", default="dram,ssd,tcp", help=f"some of {','.join(MEDIA)}")
    parser.add_argument("--block-mib", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--working-set-mib", type=int, default=128, help="moved per pass; should exceed the caches"
    )
    parser.add_argument("--out", type=Path, help="JSON file, for data/measured")
    chosen = parser.parse_args()
    media = chosen.media.split(",")
    try:
        found = measure(chosen.dir, media, chosen.block_mib, chosen.rounds, chosen.working_set_mib)
    except ValueError as error:
        parser.error(str(error))
    if chosen.out:
        chosen.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    for row in found["rows"]:
        sys.stdout.write(
            f"{row['medium']:16} {row['operation']:10} {row['block_bytes'] / MIB:5.0f} MiB"
            f" {row['bytes_per_s'] / GB:7.2f} GB/s   {row['floor']:17} {row['floor_bytes_per_s'] / GB:7.2f} GB/s"
            f" {row['ratio']:6.2f}\n"
        )
    lookup = found["lookup"]
    sys.stdout.write(
        f"keys of {lookup['tokens']:,} tokens: {1e3 * lookup['keys_s']:.3f} ms"
        f" ({1e3 * lookup['floor_s']:.3f} ms as one hash);"
        f" matched over {lookup['instances']} instances: {1e3 * lookup['match_s']:.3f} ms\n"
    )


if __name__ == "__main__":
    main()
