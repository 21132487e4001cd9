"""One life of a soak: a process that uses a tiered store hard, tells what it did, and may be killed at any moment.

What it tells goes to stdout, a line at a time: `C key` a block was committed to SSD, `F key` it is about to be
freed, `O n` so many operations more, `X fault` one was injected, `W n` so many wrong bytes were served, `L n` so
many leaked.
"""

import errno
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, final

import numpy as np
import numpy.typing as npt

from mooncake_lab.core import KIB, MIB
from mooncake_lab.store.media import Bandwidth, Buffer, DramMedium, Medium, Reservation, SsdMedium
from mooncake_lab.store.media.slab import Operation
from mooncake_lab.store.tier import TierSettings
from mooncake_lab.store.tiers import TieredStore

FINGERPRINT: Final = b"soak"
SSD_BYTES: Final = 24 * MIB
_DRAM_BYTES: Final = 3 * MIB
_QUEUE_BYTES: Final = MIB
_KEYS: Final = 600
_SHAPES: Final = ([4 * KIB] * 8, [20_000, 1, 5 * KIB], [64 * KIB] * 2, [33_333])
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

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self.name = medium.name
        self.capacity_bytes = medium.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """As the medium."""
        return self._medium.used_bytes

    def footprint_bytes(self, key: bytes, layer_bytes: Sequence[int]) -> int:
        """As the medium."""
        return self._medium.footprint_bytes(key, layer_bytes)

    def reserve(self, key: bytes, layer_bytes: Sequence[int], *, position: int = 0) -> Reservation:
        """As the medium."""
        return self._medium.reserve(key, layer_bytes, position=position)

    def write(self, reservation: Reservation, layers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """As the medium."""
        self._medium.write(reservation, layers, first_layer=first_layer)

    def commit(self, *reservations: Reservation) -> None:
        """As the medium, and told."""
        self._medium.commit(*reservations)
        for reservation in reservations:
            tell(f"C {reservation.key.hex()}")

    def read_into(self, reservation: Reservation, buffers: Sequence[Buffer], *, first_layer: int = 0) -> None:
        """As the medium."""
        self._medium.read_into(reservation, buffers, first_layer=first_layer)

    def free(self, *reservations: Reservation) -> None:
        """Told, and then as the medium."""
        for reservation in reservations:
            tell(f"F {reservation.key.hex()}")
        self._medium.free(*reservations)

    def blocks(self) -> Iterator[Reservation]:
        """As the medium."""
        return self._medium.blocks()

    def bandwidth(self) -> Bandwidth:
        """As the medium."""
        return self._medium.bandwidth()

    def close(self) -> None:
        """As the medium."""
        self._medium.close()


@final
class DeviceFaults:
    """Refuses device operations now and then, several in a row. Mutable: it remembers how many are to come."""

    def __init__(self, seed: int, faults: Sequence[str]) -> None:
        self._draw = random.Random(seed)  # noqa: S311  # protects nothing
        self._full = "full" in faults
        self._read = "read" in faults
        self._to_come = 0

    def __call__(self, operation: Operation) -> None:
        """Let the operation happen, or raise what a full or a failing device would."""
        if operation == "read":
            if self._read and self._draw.random() < 0.01:
                tell("X read")
                raise OSError(errno.EIO, "injected: the device cannot read")
            return
        if self._full and not self._to_come and self._draw.random() < 0.004:
            self._to_come = self._draw.randrange(1, _LONGEST_FAULT_OPERATIONS)
            tell("X full")
        if self._to_come:
            self._to_come -= 1
            raise OSError(errno.ENOSPC, "injected: no space left on device")


def live(folder: Path, seed: int, faults: Sequence[str], seconds: float) -> None:
    """Use the store for so long, then close it and tell what leaked."""
    tell("R")
    ssd = SsdMedium(folder, SSD_BYTES, fingerprint=FINGERPRINT, before=DeviceFaults(seed, faults))
    tiers = [
        TierSettings(medium=DramMedium(_DRAM_BYTES), queue_bytes=_QUEUE_BYTES),
        TierSettings(medium=Witness(ssd), eviction="sieve"),
    ]
    draw = random.Random(seed)  # noqa: S311  # protects nothing
    with TieredStore(tiers) as store:
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            for _ in range(20):
                _operate(store, draw)
            tell("O 20")
            store.check()
        store.flush()
        store.check()
        tell(f"L {store.leaked_bytes()}")
    ssd.close()


def _operate(store: TieredStore, draw: random.Random) -> None:
    """Read a block, or one layer of it; what is not there is computed again and put."""
    number = min(int(draw.expovariate(1 / 120)), _KEYS - 1)
    key = soak_key(number)
    shape = _SHAPES[number % len(_SHAPES)]
    first = draw.randrange(len(shape)) if draw.random() < 0.3 else 0
    count = 1 if first else len(shape)
    buffers = [np.empty(size, np.uint8) for size in shape[first : first + count]]
    if draw.random() < 0.7 and store.read_into(key, buffers, first_layer=first) is not None:
        wrong = wrong_bytes(key, buffers, first)
        if wrong:
            tell(f"W {wrong}")
    else:
        store.put(key, soak_content(key), position=number % 7)
    if draw.random() < 0.1 and key in store:
        store.match_prefix([key])


if __name__ == "__main__":
    live(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), float(sys.argv[4]))
