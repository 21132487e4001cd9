"""How much memory is left to this process: of the machine, and of every control group that it is in (Linux)."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_LIMITS: Final = {
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}
"""By the type of file system: the files of the limits and of the usage, and the part of the usage that the kernel
gives back before it kills a process: files that were read and are not in use."""


def memory_left_bytes(proc: Path = _PROC) -> int | None:
    """The least of what the machine and the control groups have left, or None where nothing is known.

    Args:
        proc: where `/proc` is mounted.
    """
    lefts = [left for folder, kind in _groups(proc) if (left := _left_bytes(folder, kind)) is not None]
    available = _table(proc / "meminfo").get("MemAvailable")
    return min([*lefts, *([] if available is None else [available])], default=None)


def most_memory_bytes(proc: Path = _PROC) -> int:
    """The most memory that this process has had at once; 0 where that is unknown."""
    return _table(proc / "self" / "status").get("VmHWM", 0)


def _table(path: Path) -> dict[str, int]:
    """The amounts (bytes) of a file such as `/proc/meminfo`, whose lines are `name: number kB`."""
    found: dict[str, int] = {}
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB" and number.isdecimal():
            found[name] = int(number) * 1024
    return found


def _groups(proc: Path) -> Iterator[tuple[Path, str]]:
    """The folder of each control group that limits this process, outer ones included, and its file system."""
    paths = [line.split(":", 2) for line in _text(proc / "self" / "cgroup").splitlines()]
    for line in _text(proc / "self" / "mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        fields, (kind, *_, options) = mount.split(), system.split() or ["", ""]
        if kind not in _LIMITS or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        for _, controllers, path in filter(lambda one: len(one) == 3, paths):
            if controllers if kind == "cgroup2" else "memory" not in controllers.split(","):
                continue
            root, top = Path(_unescaped(fields[3])), Path(_unescaped(fields[4]))
            inner = Path(path)
            # in a container, the path may be that of the host, and the mount begins at the container's own group
            below = inner.relative_to(root) if inner.is_relative_to(root) and ".." not in inner.parts else Path()
            folder = top / below
            while True:
                yield folder, kind
                if folder == top:
                    break
                folder = folder.parent


def _left_bytes(folder: Path, kind: str) -> int | None:
    """What one group has left; None where it has no limit."""
    limit_names, usage_name, inactive = _LIMITS[kind]
    limits = [limit for name in limit_names if (limit := _number(folder / name)) is not None]
    used = _number(folder / usage_name)
    if not limits or used is None:
        return None
    given_back = 0
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == inactive and value.isdecimal():
            given_back = int(value)
    return max(0, min(limits) - max(0, used - given_back))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # `max` is no limit


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _unescaped(path: str) -> str:
    """A path of `mountinfo`, which has spaces as octal digits behind a backslash."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)
