"""A control group that bounds the memory of one submission, where this user may make one.

The bound of address space holds everywhere. A group (version 1 or 2) counts besides what the kernel keeps for a
process: page tables, pipes, files in memory.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

_PREFIX: Final = "mooncake-lab-submission-"


def group_folders(cgroup: str, mounts: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """Where a group for a submission can be made: in that of the grader, or beside it.

    Version 2 gives no group with processes in it a child with a limit, but often a sibling.

    Args:
        cgroup: the text of `/proc/self/cgroup`.
        mounts: where the hierarchies are mounted.
    """
    for line in cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        own = None
        if "memory" in controllers.split(","):
            own = mounts / "memory" / path.lstrip("/")
        elif not controllers and (mounts / "cgroup.controllers").exists():
            own = mounts / path.lstrip("/")
        if own is not None:
            yield own
            if path.strip("/"):
                yield own.parent


class MemoryGroup:
    """A group with one process and a limit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def around(cls, pid: int, limit_bytes: int) -> Self | None:
        """A group for a process that was just started; None where this user may not make one."""
        try:
            text = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        except OSError:
            return None  # this kernel has no groups
        for parent in group_folders(text):
            forget_empty_groups(parent)
            with contextlib.suppress(OSError):
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                try:
                    _bound(folder, pid, limit_bytes)
                except OSError:
                    folder.rmdir()
                    raise
                return cls(folder)
        return None

    def close(self) -> None:
        """Remove the group; its process has ended."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def forget_empty_groups(parent: Path) -> None:
    """Remove the groups of graders that were killed; one with a process in it stays."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _bound(folder: Path, pid: int, limit_bytes: int) -> None:
    """Give a new group its limit and its process.

    Raises:
        OSError: when this user may not.
    """
    first = folder / "memory.limit_in_bytes"
    _write(first if first.exists() else folder / "memory.max", limit_bytes)
    with contextlib.suppress(OSError):  # swap is off, or counted elsewhere
        _write(folder / "memory.swap.max", 0)
    _write(folder / "cgroup.procs", pid)


def _write(path: Path, value: int) -> None:
    # not `write_text`, which would make a file where the kernel has none
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)
