"""A process that runs untrusted code drops the rights that the code must not have.

After `confine()`, a process can read only what Python needs and its own folder, and write only its own folder. It
can start no process or thread, open no socket and send no signal. It can use no more memory, processor time and
disk than it was given. The Linux kernel enforces this, not Python. The process cannot undo it.

Landlock (Linux 5.13, here used from its third version on) rules over files, seccomp over system calls, and a file
system in memory bounds what is written (`enter.py`). Where the kernel allows no such file system to this user, a
submission gets no folder at all: the bound stays, and what it could be used for goes.
"""

import ctypes
import math
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from mooncake_lab.core import GIB, MIB
from mooncake_lab.course.grading.system_calls import ARCHITECTURES, Architecture, call_filter

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_LEAST_ABI: Final = 3  # earlier ones do not govern truncation
_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 1, 38, 22, 2
_CAPABILITIES_OF_SELF: Final = struct.pack("Ii", 0x20080522, 0)
"""Version 3 of that call's head."""
_MOST_OPEN_FILES: Final = 256
_SETTINGS: Final = ("/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf", "/etc/mime.types")
"""The only system settings that stay readable: a grader that is root could read all of them."""

_READ: Final = (1 << 2) | (1 << 3)
_READ_FILE: Final = 1 << 2
_WRITE_FILE: Final = (1 << 1) | (1 << 14)
_ALL_BY_ABI: Final = MappingProxyType({3: (1 << 15) - 1, 5: (1 << 16) - 1})
_ALL_TCP: Final = 0b11
_ALL_SCOPES: Final = 0b11


class UnconfinableError(RuntimeError):
    """This machine cannot confine a process; it says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a submission may use.

    Raises:
        ValueError: when an allowance is not positive.
    """

    memory_bytes: int = 2 * GIB
    """Address space, Python and its libraries included."""
    cpu_s: int = 120
    """Processor time of the whole submission, over all tasks."""
    file_bytes: int = 64 * MIB
    """The largest file it may write."""
    folder_bytes: int = 256 * MIB
    """All its files together, those without a name included; a file system in memory of this size."""
    folder_entries: int = 2000
    """How many files and folders it may have."""
    reply_s: float = 20.0
    """The longest wait for one answer."""
    wall_s: float = 600.0
    """From the first cell for the first task to the last answer for the last one."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"Allowance.{name} is {getattr(self, name)!r}; allowed are positive numbers")


def check_confinable() -> None:
    """Find out whether `confine` can work here.

    Raises:
        UnconfinableError: when the kernel or the processor is not one that it knows.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        raise UnconfinableError(
            f"submissions can be confined on Linux on {' or '.join(ARCHITECTURES)};"
            f" this is {sys.platform} on {machine}"
        )
    abi = _syscall(_CREATE_RULESET, None, 0, 1)
    if abi < _LEAST_ABI:
        raise UnconfinableError(
            f"the kernel offers Landlock {max(abi, 0)}; version {_LEAST_ABI} is needed"
            " (Linux 6.2, with `landlock` in the list of /sys/kernel/security/lsm)"
        )


@cache
def why_no_folder() -> str:
    """Why a submission gets no folder to write in on this machine; empty when it gets one.

    Found out by trying: whether an unprivileged user may mount is a matter of the kernel, of the security modules,
    and of the container around it.
    """
    folder = tempfile.mkdtemp(prefix="probe-")
    try:
        order = msgspec.json.encode({"folder": folder, "allowance": Allowance()}).decode()
        command = [sys.executable, "-I", "-P", str(Path(__file__).with_name("enter.py")), "probe", order]
        found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own script
    finally:
        Path(folder).rmdir()
    return found.stderr.strip().splitlines()[-1] if found.returncode else ""


def bounds() -> str:
    """What the kernel holds a submission to on this machine, as a sentence."""
    why = why_no_folder()
    files = (
        f"it can write no file at all, because private file systems are not allowed here ({why})"
        if why
        else ("its files are in a private file system in memory, of fixed size")
    )
    return f"each submission is confined by Landlock and seccomp; {files}"


def confine(folder: Path | None, allowance: Allowance) -> None:
    """Drop every right except reading Python and working in a folder; for this process, for good.

    Args:
        folder: the only one in which it may write; without one it writes nothing.
        allowance: `cpu_s` counts from now on.

    Raises:
        UnconfinableError: when this machine cannot do it; then nothing was given up.
        OSError: when the kernel refuses a step.
    """
    check_confinable()
    for what, limit in (
        (resource.RLIMIT_AS, allowance.memory_bytes),
        (resource.RLIMIT_CPU, math.ceil(time.process_time()) + allowance.cpu_s),
        (resource.RLIMIT_FSIZE, allowance.file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MOST_OPEN_FILES),
    ):
        resource.setrlimit(what, (limit, limit))
    machine = ARCHITECTURES[platform.machine()]
    _must(_libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "give up new privileges")
    _must(_syscall(machine.numbers["capset"], _CAPABILITIES_OF_SELF, bytes(24)), "give up what root may do")
    end_with_parent()
    _restrict_files(folder)
    _restrict_calls(machine)


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, however it ends."""
    _must(_libc().prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0), "end with its parent")


def readable_folders() -> list[Path]:
    """What Python and this package need to read while they run."""
    package = Path(__file__).resolve().parents[2]
    system = ("/usr", "/lib", "/lib64", "/sys/devices/system", "/dev/urandom", "/dev/null", *_SETTINGS)
    return [
        path
        for path in map(Path, (sys.prefix, sys.base_prefix, package, package.parent / "data", *system))
        if path.exists()
    ]


def _restrict_files(folder: Path | None) -> None:
    abi = _syscall(_CREATE_RULESET, None, 0, 1)
    everything = _ALL_BY_ABI[5 if abi >= 5 else 3]
    attributes = struct.pack("QQQ", everything, _ALL_TCP, _ALL_SCOPES)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _must(_syscall(_CREATE_RULESET, attributes, size, 0), "make a ruleset")
    try:
        for path in readable_folders():
            _allow(ruleset, path, _READ if path.is_dir() else _READ_FILE)
        _allow(ruleset, Path("/dev/null"), _READ_FILE | _WRITE_FILE)
        if folder is not None:
            _allow(ruleset, folder, everything)
        _must(_syscall(_RESTRICT_SELF, ruleset, 0, 0), "restrict itself")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, descriptor)
        _must(_syscall(_ADD_RULE, ruleset, 1, rule, 0), f"allow {path}")
    finally:
        os.close(descriptor)


def _restrict_calls(machine: Architecture) -> None:
    program = call_filter(machine)
    code = ctypes.create_string_buffer(program)
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    _must(_libc().prctl(_SET_SECCOMP, _FILTER_MODE, head, 0, 0), "filter system calls")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    return int(_libc().syscall(number, *_as_c(arguments)))


def _as_c(arguments: Iterable[int | bytes | None]) -> list[object]:
    return [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]


def _must(result: int, step: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot {step}: {os.strerror(code)}")
    return result
