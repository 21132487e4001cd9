"""A kernel filter that refuses system calls to a confined process, by the call numbers of its architecture.

It refuses the calls that reach beyond the process: to start, trace, signal, slow down or limit another process, or
to open a socket. It refuses new threads too, because the limit on their number does not hold for root. It refuses
memory and messages that no limit counts or that outlive the process, and changes to a file's attributes without
opening it. Where the number of a call is not enough to decide, its arguments decide.
"""

import struct
from collections.abc import Iterable
from types import MappingProxyType
from typing import Final, NamedTuple

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
