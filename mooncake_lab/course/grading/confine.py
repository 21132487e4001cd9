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
from typing import Final, NamedTuple

import msgspec

from mooncake_lab.core import GIB, MIB

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, value: the small language of classic BPF."""

_PROCESSES: Final = (
    "fork vfork execve execveat ptrace process_vm_readv process_vm_writev process_madvise unshare setns"
)
_SIGNALS: Final = "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_getfd pidfd_send_signal"
_OTHERS_TIME: Final = "setpriority sched_setparam sched_setscheduler sched_setaffinity sched_setattr ioprio_set"
_SOCKETS: Final = "socket socketpair io_uring_setup"
_UNCOUNTED: Final = "memfd_create memfd_secret shmget msgget semget mq_open setrlimit userfaultfd"
_FILES: Final = (
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat setxattr lsetxattr fsetxattr removexattr"
    " lremovexattr fremovexattr utime utimes futimesat utimensat mount"
)
_KERNEL: Final = "bpf perf_event_open add_key request_key keyctl"
REFUSED: Final = f"{_PROCESSES} {_SIGNALS} {_OTHERS_TIME} {_SOCKETS} {_UNCOUNTED} {_FILES} {_KERNEL}".split()

_X86_64: Final = (
    "fork=57 vfork=58 execve=59 execveat=322 ptrace=101 process_vm_readv=310 process_vm_writev=311"
    " process_madvise=440 unshare=272 setns=308 kill=62 tkill=200 tgkill=234 rt_sigqueueinfo=129"
    " rt_tgsigqueueinfo=297 pidfd_open=434 pidfd_getfd=438 pidfd_send_signal=424 setpriority=141"
    " sched_setparam=142 sched_setscheduler=144 sched_setaffinity=203 sched_setattr=314 ioprio_set=251"
    " socket=41 socketpair=53 io_uring_setup=425 memfd_create=319 memfd_secret=447 shmget=29 msgget=68"
    " semget=64 mq_open=240 setrlimit=160 userfaultfd=323 chmod=90 fchmod=91 fchmodat=268 fchmodat2=452"
    " chown=92 fchown=93 lchown=94 fchownat=260 setxattr=188 lsetxattr=189 fsetxattr=190 removexattr=197"
    " lremovexattr=198 fremovexattr=199 utime=132 utimes=235 futimesat=261 utimensat=280 mount=165 bpf=321"
    " perf_event_open=298 add_key=248 request_key=249 keyctl=250 prlimit64=302 fcntl=72 clone=56 clone3=435"
    " capset=126 prctl=157"
)
_AARCH64: Final = (
    "execve=221 execveat=281 ptrace=117 process_vm_readv=270 process_vm_writev=271 process_madvise=440"
    " unshare=97 setns=268 kill=129 tkill=130 tgkill=131 rt_sigqueueinfo=138 rt_tgsigqueueinfo=240"
    " pidfd_open=434 pidfd_getfd=438 pidfd_send_signal=424 setpriority=140 sched_setparam=118"
    " sched_setscheduler=119 sched_setaffinity=122 sched_setattr=274 ioprio_set=30 socket=198 socketpair=199"
    " io_uring_setup=425 memfd_create=279 memfd_secret=447 shmget=194 msgget=186 semget=190 mq_open=180"
    " setrlimit=164 userfaultfd=282 fchmod=52 fchmodat=53 fchmodat2=452 fchown=55 fchownat=54 setxattr=5"
    " lsetxattr=6 fsetxattr=7 removexattr=14 lremovexattr=15 fremovexattr=16 utimensat=88 mount=40 bpf=280"
    " perf_event_open=241 add_key=217 request_key=218 keyctl=219 prlimit64=261 fcntl=25 clone=220 clone3=435"
    " capset=91 prctl=167"
)
_SET_OWNER, _SET_SIGNAL, _SET_OWNER_EX = 8, 10, 15
"""What `fcntl` could send signals with."""
_CLONE_THREAD: Final = 0x00010000
_DEATH_SIGNAL: Final = 1
"""`prctl` option: a process that clears its parent-death signal would keep running after its grader."""
_LOAD, _EQUAL, _AT_LEAST, _BITS_SET, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOWED, _DENIED, _NO_MORE, _UNKNOWN, _KILLED = 0x7FFF0000, 0x00050001, 0x0005000B, 0x00050026, 0x80000000
_ARCHITECTURE_AT, _NUMBER_AT, _ARGUMENTS_AT = 4, 0, 16


class Architecture(NamedTuple):
    """Its name in the kernel's audit interface, and the numbers of its calls; it need not have all of them."""

    audit: int
    numbers: MappingProxyType[str, int]


def _numbers(table: str) -> MappingProxyType[str, int]:
    pairs = (entry.split("=") for entry in table.split())
    return MappingProxyType({name: int(number) for name, number in pairs})


ARCHITECTURES: Final = MappingProxyType(
    {
        "x86_64": Architecture(0xC000003E, _numbers(_X86_64)),
        "aarch64": Architecture(0xC00000B7, _numbers(_AARCH64)),
    }
)


def call_filter(machine: Architecture) -> bytes:
    """The program for seccomp: an instruction every eight bytes."""
    numbers = machine.numbers
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, machine.audit),
        (_GIVE, 0, 0, _KILLED),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, 1 << 30),  # a second set of numbers for the same calls (x32)
        (_GIVE, 0, 0, _KILLED),
    ]
    for name in REFUSED:
        if name in numbers:
            program += [(_EQUAL, 0, 1, numbers[name]), (_GIVE, 0, 0, _DENIED)]
    # the C library falls back to clone, and reports that no more threads can be started
    program += [(_EQUAL, 0, 1, numbers["clone3"]), (_GIVE, 0, 0, _UNKNOWN)]
    thread = [(_LOAD, 0, 0, _argument(0)), (_BITS_SET, 0, 1, _CLONE_THREAD), (_GIVE, 0, 0, _NO_MORE), _deny()]
    program += _where(numbers["clone"], thread)
    program += _where(numbers["prctl"], _if_one_of(_argument(0), (_DEATH_SIGNAL,)))
    program += _where(numbers["prlimit64"], _unless_zero(_argument(0), _argument(2), _argument(2) + 4))
    program += _where(numbers["fcntl"], _if_one_of(_argument(1), (_SET_OWNER, _SET_SIGNAL, _SET_OWNER_EX)))
    program.append((_GIVE, 0, 0, _ALLOWED))
    return b"".join(struct.pack("HBBI", *line) for line in program)


def _argument(index: int) -> int:
    """Where the lower half of an argument is."""
    return _ARGUMENTS_AT + 8 * index


def _deny() -> Instruction:
    return (_GIVE, 0, 0, _DENIED)


def _where(number: int, told: list[Instruction]) -> list[Instruction]:
    """Instructions for one call only; a call that they do not deny is allowed."""
    return [(_EQUAL, 0, len(told) + 1, number), *told, (_GIVE, 0, 0, _ALLOWED)]


def _unless_zero(*places: int) -> list[Instruction]:
    """Deny unless all these words are zero: of `prlimit64`, only asking for one's own limits is left."""
    return [line for at in places for line in ((_LOAD, 0, 0, at), (_EQUAL, 1, 0, 0), _deny())]


def _if_one_of(place: int, values: Iterable[int]) -> list[Instruction]:
    return [(_LOAD, 0, 0, place), *(line for value in values for line in ((_EQUAL, 0, 1, value), _deny()))]


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_LEAST_ABI: Final = 3  # earlier ones do not govern truncation
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
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
    """What a submission may use."""

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
    _must(_libc().prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0), "end with its parent")
    _restrict_files(folder)
    _restrict_calls(machine)


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
    given = (ctypes.c_long(value) if isinstance(value, int) else value for value in arguments)
    return int(_libc().syscall(number, *given))


def _must(result: int, step: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot {step}: {os.strerror(code)}")
    return result
