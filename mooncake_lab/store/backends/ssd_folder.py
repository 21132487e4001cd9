"""An SSD folder: its owner, and whether every block in it is intact."""

import fcntl
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from mooncake_lab.store.backends.base import FolderInUseError, check_fingerprint
from mooncake_lab.store.backends.ssd_slab import Slab, clear_header, find_blocks, is_intact, seed_of


@final
class FolderLock:
    """Keeps a folder for this process until `release`; the system releases it when the process ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            owner = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise FolderInUseError(
                f"{folder} is open in process {owner}; one process at a time may use an SSD folder"
            ) from error
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Let other processes have the folder."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def model_folder(folder: Path, fingerprint: bytes) -> Path:
    """Where the blocks of one model are, so that those of another are never found there."""
    check_fingerprint(fingerprint)
    return folder / fingerprint.hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderReport:
    """The state of one model's folder."""

    fingerprint: str
    """Hexadecimal, the name of its folder."""
    blocks: int = 0
    """Blocks whose header is whole, intact or damaged."""
    payload_bytes: int = 0
    damaged: tuple[str, ...] = ()
    """Keys (hexadecimal) of blocks of which a layer cannot be read or is not what was written."""
    repaired: bool = False
    """Whether damaged blocks were dropped."""
    trouble: str | None = None
    """Why it could not be read or repaired."""

    @property
    def is_sound(self) -> bool:
        """Whether every block can be served."""
        return not self.damaged and self.trouble is None


def verify_folder(folder: Path, *, repair: bool = False) -> list[FolderReport]:
    """Read every block of a folder that no process has open; changes nothing unless asked to repair.

    The folder stays locked from the first read to the last repair.

    Raises:
        FolderInUseError: when a process has it open.
        ValueError: when the folder holds no store.
        OSError: when it cannot be listed.
    """
    models = [path for path in sorted(folder.iterdir()) if _is_model(path)] if folder.is_dir() else []
    if not models:
        raise ValueError(f"{folder} holds no block store")
    lock = FolderLock(folder)
    try:
        return [_verify(model, repair=repair) for model in models]
    finally:
        lock.release()


def _is_model(path: Path) -> bool:
    try:
        bytes.fromhex(path.name)
    except ValueError:
        return False  # the lock, or a file of another program
    return (path / "slab").exists()


def _verify(model: Path, *, repair: bool) -> FolderReport:
    """The report on one model; an error ends this report and leaves the other models to be verified."""
    report = FolderReport(fingerprint=model.name)
    seed = seed_of(bytes.fromhex(model.name))
    try:
        slab = Slab(model / "slab", (model / "slab").stat().st_size)
        try:
            found = list(find_blocks(slab, seed))
            damaged = [record.block for record in found if not is_intact(slab, record, seed)]
            report = replace(
                report,
                blocks=len(found),
                payload_bytes=sum(record.block.size_bytes for record in found),
                damaged=tuple(block.key.hex() for block in damaged),
            )
            if repair and damaged:
                for block in damaged:
                    clear_header(slab, block)
                slab.sync()
                report = replace(report, repaired=True)
        finally:
            slab.close()
    except OSError as error:
        return replace(report, trouble=str(error))
    return report
