"""An SSD folder: one owner at a time, and one room in it for each model."""

import fcntl
import os
from pathlib import Path
from typing import final

from mooncake_lab.store.media.medium import FolderInUseError


@final
class FolderLock:
    """The folder belongs to this process until `release`; the system releases it when the process dies.

    Raises:
        FolderInUseError: when another process, or another medium of this one, has it.
        OSError: when the folder cannot be made or written.
    """

    __slots__ = ("_descriptor",)

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "lock"
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise FolderInUseError(
                f"{folder} is open in process {owner}; one process at a time may use an SSD folder"
            ) from error
        try:
            os.truncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Let others have the folder."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def room_of(folder: Path, fingerprint: bytes) -> Path:
    """Where the blocks of one model lie, so that those of another are never found there.

    Raises:
        ValueError: when the fingerprint is empty or longer than 64 bytes.
    """
    if not 0 < len(fingerprint) <= 64:
        raise ValueError(f"a model fingerprint of {len(fingerprint)} bytes; allowed are 1 to 64")
    return folder / fingerprint.hex()


def rooms_in(folder: Path) -> list[tuple[bytes, Path]]:
    """The fingerprint and the room of every model that has one, in the order of their names.

    Raises:
        OSError: when the folder cannot be listed.
    """
    rooms: list[tuple[bytes, Path]] = []
    for path in sorted(folder.iterdir()):
        try:
            rooms.append((bytes.fromhex(path.name), path))
        except ValueError:
            continue  # not a room: the lock, or a file of somebody else
    return [(fingerprint, path) for fingerprint, path in rooms if (path / "slab").exists()]
