"""One life of a soak: a process that uses a tiered store and reports what it did; it may be killed at any time.

It reports to stdout, one line each: `C key` a block was committed to SSD, `F key` it is about to be freed, `O n`
operations were done, `X fault` one was injected, `W n` wrong bytes were served, `L n` bytes leaked.
"""

import contextlib
import errno
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import KIB, MIB
from mooncake_lab.net.mooncake_wheel import MooncakeMaster
from mooncake_lab.store.backends import (
    BlockServer,
    DramBackend,
    MooncakeClient,
    MooncakeStore,
    RemoteBackend,
    Reservation,
    SsdBackend,
    StorageBackend,
)
from mooncake_lab.store.backends.ssd_slab import Operation
from mooncake_lab.store.tiered_store import TieredStore, TierSettings

FINGERPRINT: Final = b"soak"
SSD_BYTES: Final = 24 * MIB
_DRAM_BYTES: Final = 3 * MIB
_POOL_BYTES: Final = 8 * MIB
_MOONCAKE_BYTES: Final = 16 * MIB
"""Mooncake takes no smaller segment."""
_QUEUE_BYTES: Final = MIB
_PAGE_BYTES: Final = 4 * KIB
_TOKEN: Final = b"known to both sides of the soak"
_KEYS: Final = 600
_SHAPES: Final[Sequence[Sequence[int]]] = ([4 * KIB] * 8, [20_000, 1, 5 * KIB], [64 * KIB] * 2, [33_333])
_LONGEST_FAULT_OPERATIONS: Final = 12


def soak_key(number: int) -> bytes:
    """The key of a block of the soak."""
    return b"block %06d" % number


def soak_content(key: bytes) -> list[npt.NDArray[np.uint8]]:
    """The truth: the layers that this key names, the same in every process."""
    number = int(key[-6:])
    draw = np.random.default_rng([20_250_225, number])
    return [draw.integers(0, 256, size, np.uint8) for size in _SHAPES[number % len(_SHAPES)]]


def wrong_bytes(key: bytes, layers: Sequence[npt.NDArray[np.uint8]], first_layer: int = 0) -> int:
    """How many bytes are not the truth."""
    truth = soak_content(key)[first_layer : first_layer + len(layers)]
    return sum(int(np.count_nonzero(found != right)) for found, right in zip(layers, truth, strict=True))


def tell(line: str) -> None:
    """Say it at once: a process that is killed has no time to flush."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


@final
class Witness:
    """A medium that tells of each commit after it, and of each freed block before it."""

    def __init__(self, medium: StorageBackend) -> None:
        self._medium = medium

    def __getattr__(self, name: str) -> Any:
        return getattr(self._medium, name)

    def commit(self, *reservations: Reservation) -> None:
        """As the medium, and told."""
        self._medium.commit(*reservations)
        for reservation in reservations:
            tell(f"C {reservation.key.hex()}")

    def free(self, *reservations: Reservation) -> None:
        """Told, and then as the medium."""
        for reservation in reservations:
            tell(f"F {reservation.key.hex()}")
        self._medium.free(*reservations)


@final
class DeviceFaults:
    """Refuses device operations now and then, several in a row. Mutable: it remembers how many are to come."""

    def __init__(self, seed: int, faults: Sequence[str]) -> None:
        self._draw = random.Random(seed)  # noqa: S311  # protects nothing
        self._faults = frozenset(faults)
        self._full = 0
        """Operations that are still to find no room."""
        self._denied = 0

    def __call__(self, operation: Operation) -> None:
        """Let the operation happen, or raise what a full, a failing or a forbidden device would."""
        if self._begins("denied", 0.001, self._denied):
            self._denied = self._draw.randrange(1, _LONGEST_FAULT_OPERATIONS)
        if self._denied:
            self._denied -= 1
            raise PermissionError(errno.EACCES, "injected: permission denied")
        if operation == "read":
            if self._begins("read", 0.01, 0):
                raise OSError(errno.EIO, "injected: the device cannot read")
            return
        if self._begins("full", 0.004, self._full):
            self._full = self._draw.randrange(1, _LONGEST_FAULT_OPERATIONS)
        if self._full:
            self._full -= 1
            raise OSError(errno.ENOSPC, "injected: no space left on device")

    def _begins(self, fault: str, probability: float, to_come: int) -> bool:
        begins = fault in self._faults and not to_come and self._draw.random() < probability
        if begins:
            tell(f"X {fault}")
        return begins


@final
class TornWrites:
    """Replaces `os.pwritev`, and writes only the first pages now and then: it says so, or it fails."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)  # noqa: S311  # protects nothing
        self._pwritev = os.pwritev

    def __call__(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        """The bytes that were written."""
        pages = sum(len(buffer) for buffer in buffers) // _PAGE_BYTES
        if pages < 2 or self._draw.random() > 0.01:
            return self._pwritev(file, buffers, offset)
        tell("X torn")
        left = self._draw.randrange(1, pages) * _PAGE_BYTES
        head: list[Any] = []
        for buffer in buffers:
            head.append(buffer[:left])
            left -= len(head[-1])
        moved = self._pwritev(file, [part for part in head if len(part)], offset)
        if self._draw.random() < 0.5:
            raise OSError(errno.EIO, "injected: the device failed in the middle of a write")
        return moved


class Pool(Protocol):
    """What clients share: one is the last tier of the store, each other one the only tier of another store."""

    clients: tuple[StorageBackend, ...]
    shapes: Sequence[Sequence[int]]
    """Layers of the blocks that it takes, some of `_SHAPES`."""

    def hang_up(self) -> None:
        """End every connection, where the pool can."""
        ...

    def close(self) -> int:
        """End it; the bytes that it holds and no client can reach."""
        ...


@final
class NoPool:
    """Nothing is shared: the SSD is the last tier."""

    clients: tuple[StorageBackend, ...] = ()
    shapes: Sequence[Sequence[int]] = _SHAPES

    def hang_up(self) -> None:
        """Nothing: there are no connections."""

    def close(self) -> int:
        """Nothing is held."""
        return 0


@final
class RemotePool:
    """Memory behind a block server. Mutable: its server comes and goes."""

    shapes: Sequence[Sequence[int]] = _SHAPES

    def __init__(self) -> None:
        self._arena = DramBackend(_POOL_BYTES)
        self._server = BlockServer(self._arena, _TOKEN, timeout_s=5)
        self.clients: tuple[StorageBackend, ...] = (self._client(), self._client())

    def hang_up(self) -> None:
        """End every connection, whatever moves over it, and listen anew in the same place."""
        tell("X hangup")
        _, port = self._server.address
        self._server.close()
        self._server = BlockServer(self._arena, _TOKEN, port=port, timeout_s=5)

    def close(self) -> int:
        """End it; the bytes that it holds besides those of committed blocks."""
        for client in self.clients:
            client.close()
        self._server.close()
        held = sum(self._arena.footprint_bytes(block.key, block.layer_bytes) for block in self._arena.blocks())
        return self._arena.used_bytes - held

    def _client(self) -> RemoteBackend:
        return RemoteBackend(self._server.address, _TOKEN, fingerprint=FINGERPRINT, timeout_s=5)


@final
class SoakMooncakeStore:
    """Memory in a Mooncake Store, whose master evicts and ends with this process. Mutable."""

    shapes: Sequence[Sequence[int]] = _SHAPES[2:3]  # all its blocks have one size

    def __init__(self) -> None:
        self._master = MooncakeMaster()
        self._client = client = MooncakeClient(self._master.address, _MOONCAKE_BYTES)
        layers = self.shapes[0]
        self.clients: tuple[StorageBackend, ...] = (
            MooncakeStore(client, _POOL_BYTES, layers, fingerprint=FINGERPRINT),
            MooncakeStore(client, _POOL_BYTES, layers, fingerprint=FINGERPRINT),
        )

    def hang_up(self) -> None:
        """Nothing: clients of Mooncake connect to each other as they like."""

    def close(self) -> int:
        """End it; the bytes of blocks that were never committed nor given up."""
        left_bytes = sum(client.used_bytes for client in self.clients)
        self._client.close()
        self._master.stop()
        return left_bytes


POOLS: Final[Mapping[str, Callable[[], Pool]]] = {
    "none": NoPool,
    "remote": RemotePool,
    "mooncake": SoakMooncakeStore,
}
"""Shared pools by name."""


def live(folder: Path, seed: int, faults: Sequence[str], seconds: float, pool_name: str) -> None:
    """Use the store for so long, then close it and tell what leaked; a second store uses a pool meanwhile."""
    pool = POOLS[pool_name]()
    tell("R")
    if "torn" in faults:
        os.pwritev = TornWrites(seed)  # in this process only
    ssd = _opened(folder, DeviceFaults(seed, faults))
    tiers = [
        TierSettings(medium=DramBackend(_DRAM_BYTES), queue_bytes=_QUEUE_BYTES),
        TierSettings(medium=cast("StorageBackend", Witness(ssd)), eviction="sieve", queue_bytes=_QUEUE_BYTES),
        *[TierSettings(medium=client) for client in pool.clients[:1]],
    ]
    draw = random.Random(seed)  # noqa: S311  # protects nothing
    with contextlib.ExitStack() as stores:
        store = stores.enter_context(TieredStore(tiers))
        others = [stores.enter_context(TieredStore([TierSettings(medium=client)])) for client in pool.clients[1:]]
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            for _ in range(15):
                _operate(store, draw, pool.shapes)
            for other in others:
                for _ in range(5):
                    _operate(other, draw, pool.shapes)
            tell(f"O {15 + 5 * len(others)}")
            for each in (store, *others):
                each.check()
            if "hangup" in faults and draw.random() < 0.05:
                pool.hang_up()
        store.flush()
        store.check()
    leaked_bytes = sum(each.leaked_bytes() for each in (store, *others))
    tell(f"L {leaked_bytes + pool.close()}")
    ssd.close()


def _opened(folder: Path, faults: DeviceFaults) -> SsdBackend:
    """The SSD tier, as soon as its device lets it be opened."""
    while True:
        with contextlib.suppress(OSError):
            return SsdBackend(folder, SSD_BYTES, fingerprint=FINGERPRINT, before=faults)


def _operate(store: TieredStore, draw: random.Random, shapes: Sequence[Sequence[int]]) -> None:
    """Read a block, or one layer of it; what is not there is computed again and put."""
    number = min(int(draw.expovariate(1 / 120)), _KEYS - 1)
    number += _SHAPES.index(shapes[number % len(shapes)]) - number % len(_SHAPES)
    key = soak_key(number)
    shape = _SHAPES[number % len(_SHAPES)]
    first = draw.randrange(len(shape)) if draw.random() < 0.3 else 0
    count = 1 if first else len(shape)
    buffers = [np.empty(size, np.uint8) for size in shape[first : first + count]]
    if draw.random() < 0.5:
        store.match_prefix([key], first=number % 7)  # a pool is asked only here
    if draw.random() < 0.7 and store.read_into(key, buffers, first_layer=first) is not None:
        wrong = wrong_bytes(key, buffers, first)
        if wrong:
            tell(f"W {wrong}")
    else:
        store.put(key, soak_content(key), position=number % 7)


if __name__ == "__main__":
    live(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), float(sys.argv[4]), sys.argv[5])
