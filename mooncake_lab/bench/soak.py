"""Soak: life after life of a store under injected faults, watched by a checker that knows every block's truth."""

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from mooncake_lab.bench.soak_process import FINGERPRINT, POOLS, SSD_BYTES, wrong_bytes
from mooncake_lab.store.backends import DamagedBlockError, Reservation, SsdBackend
from mooncake_lab.store.backends.ssd import model_folder
from mooncake_lab.store.backends.ssd_slab import extent_bytes

FAULTS: Final = ("kill", "flip", "full", "read", "denied", "torn", "hangup")
_LONGEST_LIFE_S: Final = 1.5
_DEADLINE_S: Final = 60.0
_LIVES_TO_AN_END: Final = 3


@dataclass(slots=True)
class SoakReport:
    """What a soak saw. Mutable: it is counted up."""

    seconds: float = 0.0
    lives: int = 0
    operations: int = 0
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    """Faults injected, by name."""
    blocks_checked: int = 0
    """Blocks read whole by the checker, between lives."""
    damage_detected: int = 0
    """Blocks that a flipped byte made unreadable, and that said so."""
    wrong_bytes: int = 0
    """Bytes served, to the process or to the checker, that were not the truth."""
    lost_committed_blocks: int = 0
    """Blocks that were committed, not freed, not hit by a flip, and are gone."""
    leaked_bytes: int = 0
    """Bytes in use that belong to no block."""
    crashes: int = 0
    """Lives that ended by themselves, and badly."""

    @property
    def passed(self) -> bool:
        """Whether nothing happened that must not."""
        return not (self.wrong_bytes or self.lost_committed_blocks or self.leaked_bytes or self.crashes)

    def plain(self) -> dict[str, Any]:
        """The numbers, and the verdict."""
        return {**asdict(self), "passed": self.passed}


@final
class Soak:
    """The checker of one folder under faults. Mutable: it knows what the folder has to hold.

    Args:
        folder: where the SSD tier lies; made where it is missing.
        faults: names in `FAULTS`.
        seed: of everything that is drawn.
        pool: a name in `POOLS`: the last tier, which a second store uses, too.

    Raises:
        ValueError: when a fault or the pool is unknown.
    """

    def __init__(self, folder: Path, faults: Sequence[str], seed: int = 0, pool: str = "remote") -> None:
        unknown = [name for name in faults if name not in FAULTS]
        if unknown:
            raise ValueError(f"unknown fault {unknown[0]!r}; allowed are {', '.join(FAULTS)}")
        if pool not in POOLS:
            raise ValueError(f"unknown pool {pool!r}; allowed are {', '.join(POOLS)}")
        self._folder = folder
        self._faults = tuple(faults)
        self._draw = random.Random(seed)  # noqa: S311  # protects nothing
        self._pool = pool
        self._held: set[bytes] = set()
        self.report = SoakReport()

    def run(self, seconds: float, *, lives: int = 1) -> SoakReport:
        """Live, die, check, flip, check again, until the time is over and there were at least `lives`."""
        self._held = {block.key for block in self._check(set())}
        started_s = time.monotonic()  # however slow the machine, the first life begins in time
        while time.monotonic() - started_s < seconds or self.report.lives < lives:
            self._live()
            blocks = self._check(set())
            if "flip" in self._faults and blocks:
                hit = self._flip(blocks)
                blocks = self._check(hit)
            self._held = {block.key for block in blocks}
        self.report.seconds = round(time.monotonic() - started_s, 1)
        return self.report

    def _live(self) -> None:
        """One process, killed after a while where kills are asked for; what it told is believed.

        Every third ends by itself all the same: only such a life can say whether it leaked.
        """
        self.report.lives += 1
        life_s = self._draw.uniform(0.1, _LONGEST_LIFE_S)
        module = [sys.executable, "-m", "mooncake_lab.bench.soak_process"]
        mine = [str(self._folder), str(self._draw.randrange(2**31)), ",".join(self._faults) or "none"]
        kills = "kill" in self._faults and self.report.lives % _LIVES_TO_AN_END > 0
        command = [*module, *mine, str(_DEADLINE_S if kills else life_s), self._pool]
        with subprocess.Popen(  # noqa: S603  # our own
            command,
            bufsize=0,  # or lines would wait where `communicate` does not look
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None  # noqa: S101  # it was asked for
            first = process.stdout.readline()
            try:
                rest, errors = process.communicate(timeout=life_s if kills else _DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                rest, errors = process.communicate()
                self.report.faults["kill"] += kills
                self.report.crashes += not kills
            else:
                if process.returncode:
                    self.report.crashes += 1
                    sys.stderr.write(errors.decode("utf-8", "replace"))
        for line in (first + rest).decode("ascii").splitlines():
            self._hear(line)

    def _hear(self, line: str) -> None:
        """One line of a life; the last one of a killed process may be cut."""
        word, _, value = line.partition(" ")
        match word:
            case "C":
                self._held.add(bytes.fromhex(value))
            case "F":
                self._held.discard(bytes.fromhex(value))
            case "O":
                self.report.operations += int(value)
            case "X":
                self.report.faults[value] += 1
            case "W":
                self.report.wrong_bytes += int(value)
            case "L":
                self.report.leaked_bytes += int(value)
            case _:
                pass

    def _check(self, hit: set[bytes]) -> list[Reservation]:
        """Open the folder as the next process would, and compare every block with the truth."""
        medium = SsdBackend(self._folder, SSD_BYTES, fingerprint=FINGERPRINT)
        try:
            blocks = list(medium.blocks())
            good = [block for block in blocks if self._is_right(medium, block, hit)]
            known = sum(medium.footprint_bytes(block.key, block.layer_bytes) for block in blocks)
            self.report.leaked_bytes += medium.used_bytes - known
            medium.free(*(block for block in blocks if block not in good))
        finally:
            medium.close()
        self.report.lost_committed_blocks += len(self._held - {block.key for block in good} - hit)
        return good

    def _is_right(self, medium: SsdBackend, block: Reservation, hit: set[bytes]) -> bool:
        self.report.blocks_checked += 1
        buffers = [np.empty(size, np.uint8) for size in block.layer_bytes]
        try:
            medium.read_into(block, buffers)
        except DamagedBlockError:
            self.report.damage_detected += block.key in hit
            return False
        wrong = wrong_bytes(block.key, buffers)
        self.report.wrong_bytes += wrong
        return not wrong

    def _flip(self, blocks: Sequence[Reservation]) -> set[bytes]:
        """Flip a bit of some bytes of the slab; the keys of the blocks whose extent was hit."""
        slab = model_folder(self._folder, FINGERPRINT) / "slab"
        hit: set[bytes] = set()
        for _ in range(self._draw.randrange(1, 4)):
            self.report.faults["flip"] += 1
            block = self._draw.choice(blocks)
            size = extent_bytes(block.key, block.layer_bytes)
            _flip_bit(slab, block.offset_bytes + self._draw.randrange(size), self._draw.randrange(8))
            hit.add(block.key)
        return hit


def _flip_bit(path: Path, offset_bytes: int, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ (1 << bit)]))
