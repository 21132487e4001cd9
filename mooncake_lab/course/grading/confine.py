"""A process that runs untrusted code drops the rights that the code must not have.

After `confine()`, a process can read only what Python needs and its own folder, and write only its own folder; of
this package and the repository around it, it can read nothing. It can start no process or thread, open no socket
and send no signal. It can use no more memory, processor time and disk than it was given. The Linux kernel enforces
this, not Python. The process cannot undo it.

Landlock (Linux 5.13, here used from its third version on) rules over files, seccomp over system calls, of which
only those of a list are allowed. A file system in memory bounds what is written (`enter.py`). Where the kernel
allows no such file system to this user, a submission gets no folder at all: the bound stays, and what it could be
used for goes.
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

_X86_64: Final = (
    "read=0 write=1 readv=19 writev=20 pread64=17 pwrite64=18 preadv=295 pwritev=296 preadv2=327 pwritev2=328"
    " open=2 openat=257 openat2=437 creat=85 close=3 close_range=436 lseek=8 truncate=76 ftruncate=77"
    " fallocate=285 copy_file_range=326 fsync=74 fdatasync=75 fadvise64=221 stat=4 fstat=5 lstat=6 newfstatat=262"
    " statx=332 statfs=137 fstatfs=138 access=21 faccessat=269 faccessat2=439 readlink=89 readlinkat=267"
    " getdents=78 getdents64=217 getcwd=79 chdir=80 fchdir=81 umask=95 mkdir=83 mkdirat=258 rmdir=84 unlink=87"
    " unlinkat=263 rename=82 renameat=264 renameat2=316 link=86 linkat=265 symlink=88 symlinkat=266 dup=32 dup2=33"
    " dup3=292 brk=12 munmap=11 mremap=25 mprotect=10 mincore=27 msync=26 membarrier=324 get_mempolicy=239"
    " clock_gettime=228 clock_getres=229 gettimeofday=96 time=201 times=100 nanosleep=35 clock_nanosleep=230"
    " getitimer=36 setitimer=38 alarm=37 poll=7 ppoll=271 select=23 pselect6=270 rt_sigaction=13"
    " rt_sigprocmask=14 rt_sigreturn=15 rt_sigpending=127 rt_sigsuspend=130 rt_sigtimedwait=128 sigaltstack=131"
    " restart_syscall=219 pause=34 exit=60 exit_group=231 getpid=39 getppid=110 gettid=186 getpgid=121"
    " getpgrp=111 getsid=124 getuid=102 geteuid=107 getgid=104 getegid=108 getresuid=118 getresgid=120"
    " getgroups=115 capget=125 getrlimit=97 getrusage=98 getpriority=140 sched_yield=24 sched_getaffinity=204"
    " sched_getparam=143 sched_getscheduler=145 sched_get_priority_max=146 sched_get_priority_min=147 sysinfo=99"
    " uname=63 getcpu=309 getrandom=318 futex=202 rseq=334 set_tid_address=218 set_robust_list=273"
    " get_robust_list=274 arch_prctl=158 wait4=61 waitid=247"
)
_AARCH64: Final = (
    "read=63 write=64 readv=65 writev=66 pread64=67 pwrite64=68 preadv=69 pwritev=70 preadv2=286 pwritev2=287"
    " openat=56 openat2=437 close=57 close_range=436 lseek=62 truncate=45 ftruncate=46 fallocate=47"
    " copy_file_range=285 fsync=82 fdatasync=83 fadvise64=223 fstat=80 newfstatat=79 statx=291 statfs=43"
    " fstatfs=44 faccessat=48 faccessat2=439 readlinkat=78 getdents64=61 getcwd=17 chdir=49 fchdir=50 umask=166"
    " mkdirat=34 unlinkat=35 renameat=38 renameat2=276 linkat=37 symlinkat=36 dup=23 dup3=24 brk=214 munmap=215"
    " mremap=216 mprotect=226 mincore=232 msync=227 membarrier=283 get_mempolicy=236 clock_gettime=113"
    " clock_getres=114 gettimeofday=169 times=153 nanosleep=101 clock_nanosleep=115 getitimer=102 setitimer=103"
    " ppoll=73 pselect6=72 rt_sigaction=134 rt_sigprocmask=135 rt_sigreturn=139 rt_sigpending=136"
    " rt_sigsuspend=133 rt_sigtimedwait=137 sigaltstack=132 restart_syscall=128 exit=93 exit_group=94 getpid=172"
    " getppid=173 gettid=178 getpgid=155 getsid=156 getuid=174 geteuid=175 getgid=176 getegid=177 getresuid=148"
    " getresgid=150 getgroups=158 capget=90 getrlimit=163 getrusage=165 getpriority=141 sched_yield=124"
    " sched_getaffinity=123 sched_getparam=121 sched_getscheduler=120 sched_get_priority_max=125"
    " sched_get_priority_min=126 sysinfo=179 uname=160 getcpu=168 getrandom=278 futex=98 rseq=293"
    " set_tid_address=96 set_robust_list=99 get_robust_list=100 wait4=260 waitid=95"
)
"""The calls that a submission may make, and their numbers. No other call is allowed, known or not.

None of them keeps memory that the limit of address space does not count: not pipes and sockets, memory files,
shared segments, queues of messages, keys, locks, timers, watches, rings or page references of `vmsplice`.
"""
_X86_64_LOOKED_INTO: Final = (
    "clone=56 clone3=435 prctl=157 prlimit64=302 fcntl=72 ioctl=16 mmap=9 madvise=28 capset=126"
)
_AARCH64_LOOKED_INTO: Final = (
    "clone=220 clone3=435 prctl=167 prlimit64=261 fcntl=25 ioctl=29 mmap=222 madvise=233 capset=91"
)
"""Calls that are allowed with some arguments; `capset` is the number that `confine` itself needs."""
_NEWER: Final = 463
"""Calls from this number on are newer than the list; the C library must believe that the kernel lacks them."""
_FCNTL: Final = (0, 1, 2, 3, 4, 1030)
"""Duplicate, flags of descriptor and file. Not owners, and not locks, which need memory and have no limit."""
_IOCTL: Final = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Is it a terminal, of what size; how many bytes wait; do not block; close when a program is executed, or not."""
_PRCTL: Final = (2, 3, 15, 16, 21, 23, 39, 42)
"""Names, and questions. Not the signal at the parent's death, and not huge pages."""
_MADVISE: Final = (0, 1, 2, 3, 4, 8, 10, 11, 16, 17, 18, 19)
"""Advice on reading, freeing and forking; not huge pages and not merging."""
_SHARED_ANONYMOUS: Final = 0x21
"""Such a mapping keeps all its pages until the last of them is unmapped, and the address space shrinks before."""
_HUGE_PAGES: Final = 0x40000
_CLONE_THREAD: Final = 0x00010000
_DEATH_SIGNAL, _NO_HUGE_PAGES = 1, 41
_LOAD, _EQUAL, _AT_LEAST, _BITS_SET, _AND, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOWED, _DENIED, _NO_MORE, _UNKNOWN, _KILLED = 0x7FFF0000, 0x00050001, 0x0005000B, 0x00050026, 0x80000000
_ARCHITECTURE_AT, _NUMBER_AT, _ARGUMENTS_AT = 4, 0, 16


class Architecture(NamedTuple):
    """Its name in the kernel's audit interface, and the numbers of calls."""

    audit: int
    allowed: MappingProxyType[str, int]
    looked_into: MappingProxyType[str, int]


def _numbers(table: str) -> MappingProxyType[str, int]:
    pairs = (entry.split("=") for entry in table.split())
    return MappingProxyType({name: int(number) for name, number in pairs})


ARCHITECTURES: Final = MappingProxyType(
    {
        "x86_64": Architecture(0xC000003E, _numbers(_X86_64), _numbers(_X86_64_LOOKED_INTO)),
        "aarch64": Architecture(0xC00000B7, _numbers(_AARCH64), _numbers(_AARCH64_LOOKED_INTO)),
    }
)


def call_filter(machine: Architecture) -> bytes:
    """The program for seccomp: an instruction every eight bytes."""
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, machine.audit),
        (_GIVE, 0, 0, _KILLED),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, 1 << 30),  # a second set of numbers for the same calls (x32)
        (_GIVE, 0, 0, _KILLED),
        (_AT_LEAST, 0, 1, _NEWER),
        (_GIVE, 0, 0, _UNKNOWN),
    ]
    for number in machine.allowed.values():
        program += [(_EQUAL, 0, 1, number), (_GIVE, 0, 0, _ALLOWED)]
    some = machine.looked_into
    # the C library falls back to clone, and reports that no more threads can be started
    program += [(_EQUAL, 0, 1, some["clone3"]), (_GIVE, 0, 0, _UNKNOWN)]
    thread = [(_LOAD, 0, 0, _argument(0)), (_BITS_SET, 0, 1, _CLONE_THREAD), (_GIVE, 0, 0, _NO_MORE), _deny()]
    program += _where(some["clone"], thread)
    program += _where(some["prlimit64"], _unless_zero(_argument(0), _argument(2), _argument(2) + 4))
    program += _where(some["mmap"], _if_all_bits(_argument(3), _SHARED_ANONYMOUS, _HUGE_PAGES))
    for name, index, values in (
        ("madvise", 2, _MADVISE),
        ("fcntl", 1, _FCNTL),
        ("ioctl", 1, _IOCTL),
        ("prctl", 0, _PRCTL),
    ):
        program += _where(some[name], _unless_one_of(_argument(index), values))
    program.append(_deny())
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


def _if_all_bits(place: int, *masks: int) -> list[Instruction]:
    """Deny if all bits of one of these are set."""
    return [
        line
        for mask in masks
        for line in ((_LOAD, 0, 0, place), (_AND, 0, 0, mask), (_EQUAL, 0, 1, mask), _deny())
    ]


def _unless_one_of(place: int, values: Iterable[int]) -> list[Instruction]:
    allowed = ((_EQUAL, 0, 1, value) for value in values)
    return [(_LOAD, 0, 0, place), *(line for test in allowed for line in (test, (_GIVE, 0, 0, _ALLOWED))), _deny()]


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_LEAST_ABI: Final = 3  # earlier ones do not govern truncation
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_CAPABILITIES_OF_SELF: Final = struct.pack("Ii", 0x20080522, 0)
"""Version 3 of that call's head."""
_MOST_OPEN_FILES: Final = 256
_SETTINGS: Final = ("/etc/ld.so.cache", "/etc/localtime", "/etc/ssl/openssl.cnf", "/etc/mime.types")
"""The only system settings that stay readable: a grader that is root could read all of them."""

_READ_FILE: Final = 1 << 2
_READ_FOLDER: Final = 1 << 3
_READ: Final = _READ_FILE | _READ_FOLDER
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


_ELSEWHERE: Final = "grade in a virtual machine with such a kernel, or in a container on one"


def check_confinable() -> None:
    """Find out whether `confine` can work here.

    Raises:
        UnconfinableError: when the kernel or the processor is not one that it knows.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ARCHITECTURES:
        raise UnconfinableError(
            f"submissions can be confined on Linux on {' or '.join(ARCHITECTURES)};"
            f" this is {sys.platform} on {machine}; {_ELSEWHERE}"
        )
    abi = _syscall(_CREATE_RULESET, None, 0, 1)
    if abi < _LEAST_ABI:
        raise UnconfinableError(
            f"the kernel offers Landlock {max(abi, 0)}; version {_LEAST_ABI} is needed"
            f" (Linux 6.2, with `landlock` in the list of /sys/kernel/security/lsm); {_ELSEWHERE}"
        )


@cache
def why_no_folder() -> str:
    """Why a submission gets no folder to write in on this machine; empty when it gets one.

    Found out by trying: whether an unprivileged user may mount is a matter of the kernel, of the security modules,
    and of the container around it.
    """
    order = msgspec.json.encode({"folder": tempfile.gettempdir(), "allowance": Allowance()}).decode()
    command = [sys.executable, "-I", "-P", str(Path(__file__).with_name("enter.py")), "probe", order]
    found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # our own script
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
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    machine = ARCHITECTURES[platform.machine()]
    _must(_libc().prctl(_NO_HUGE_PAGES, 1, 0, 0, 0), "do without huge pages")
    _must(_libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "give up new privileges")
    _must(_syscall(machine.looked_into["capset"], _CAPABILITIES_OF_SELF, bytes(24)), "give up what root may do")
    _must(_libc().prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0), "end with its parent")
    _restrict_files(folder)
    _restrict_calls(machine)


def _python_roots() -> list[Path]:
    """Where Python, its packages and the libraries of the system lie."""
    prefixes = dict.fromkeys(
        (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, "/usr/local", "/usr", "/")
    )
    return [Path(prefix, folder) for prefix in prefixes for folder in ("lib", "lib64")]


def withheld_paths() -> frozenset[Path]:
    """Where answers may lie: the project around this package, and every copy of the package that is installed."""
    package = Path(__file__).resolve().parents[2]
    copies = [
        path.resolve()
        for root in _python_roots()
        for pattern in ("*-packages", "python*/*-packages")
        for site in root.glob(pattern)
        for path in site.iterdir()
        if path.name.lower().replace("-", "_").startswith(package.name)
    ]
    project = package.parent
    around = [project] if (project / "pyproject.toml").exists() else [package, project / "data"]
    return frozenset([*around, *copies])


def readable() -> dict[Path, int]:
    """What Python needs to read while it runs, and what is allowed there.

    A rule of Landlock holds for all that lies below. A folder with something withheld in it gets none of its own:
    its names can be listed, and what else it holds gets rules.
    """
    withheld = withheld_paths()
    system = ("/usr/share/zoneinfo", "/sys/devices/system", "/dev/urandom", "/dev/null", *_SETTINGS)
    found: dict[Path, int] = {}
    for root in (*_python_roots(), *map(Path, system)):
        if root.exists():
            _allow_around(root.resolve(), withheld, found)
    return found


def _allow_around(path: Path, withheld: frozenset[Path], found: dict[Path, int]) -> None:
    if path in withheld:
        return
    if not path.is_dir():
        found[path] = _READ_FILE
    elif any(each.is_relative_to(path) for each in withheld):
        found[path] = _READ_FOLDER
        for child in path.iterdir():
            if not child.is_symlink():
                _allow_around(child, withheld, found)
    else:
        found[path] = _READ


def _restrict_files(folder: Path | None) -> None:
    abi = _syscall(_CREATE_RULESET, None, 0, 1)
    everything = _ALL_BY_ABI[5 if abi >= 5 else 3]
    attributes = struct.pack("QQQ", everything, _ALL_TCP, _ALL_SCOPES)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _must(_syscall(_CREATE_RULESET, attributes, size, 0), "make a ruleset")
    try:
        for path, access in readable().items():
            _allow(ruleset, path, access)
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
