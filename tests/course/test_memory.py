"""No submission keeps more memory than its allowance, in its process, in the kernel or in the grader."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submissions import needs_confinement

from mooncake_lab.batching import Limits, Progress, trace_plans
from mooncake_lab.core import SLO
from mooncake_lab.course.grading.confine import ARCHITECTURES, Allowance
from mooncake_lab.course.grading.memory_group import MemoryGroup, group_folders
from mooncake_lab.course.grading.messages import Code
from mooncake_lab.course.grading.remote import Budget, Submission, SubmissionError
from mooncake_lab.course.grading.task import MOST_PLANS, RemoteBatching
from mooncake_lab.course.grading.watch import Wait, Watch
from mooncake_lab.engine import CoupledEngine, EngineSettings, load_model

PATIENT = Allowance(reply_s=60, wall_s=600)
MIB = 2**20
X86 = platform.machine() == "x86_64"

HEAD = """
import ctypes, errno, fcntl, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
pages = mmap.mmap(-1, 4 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
folder = open("x", "wb") if os.access(".", os.W_OK) else None
def said(call):
    ctypes.set_errno(0)
    try:
        result = call()
    except OSError as error:
        return errno.errorcode[error.errno]
    return errno.errorcode[ctypes.get_errno()] if result == -1 else "done"
"""

HOLDERS = {
    "pipe": "os.pipe()",
    "named pipe": "os.mkfifo('fifo')",
    "larger pipe": "fcntl.fcntl(0, 1031, 2**20)",
    "pages in a pipe": "libc.vmsplice(1, ctypes.byref((ctypes.c_size_t * 2)(at, 4096)), 1, 0)",
    "splice": "libc.splice(0, None, 1, None, 4096, 0)",
    "tee": "libc.tee(0, 1, 4096, 0)",
    "pages of a file in a pipe": "os.sendfile(1, 0, None, 4096)",
    "socket": "libc.socket(1, 1, 0)",
    "pair of sockets": "libc.socketpair(1, 1, 0, (ctypes.c_int * 2)())",
    "file in memory": "os.memfd_create('x')",
    "shared segment": "libc.shmget(0, 4096, 0o600)",
    "queue of messages": "libc.msgget(0, 0o600)",
    "semaphores": "libc.semget(0, 1, 0o600)",
    "POSIX queue": "libc.mq_open(b'/x', 66, 0o600, None)",
    "shared memory without a file": "mmap.mmap(-1, 4096)",
    "huge pages of the system": "libc.mmap(None, 2**21, 3, 0x40022, -1, 0)",
    "huge pages on advice": "pages.madvise(14)",
    "huge pages on demand": "pages.madvise(25)",
    "huge pages again": "libc.prctl(41, 0, 0, 0, 0)",
    "locked pages": "libc.mlock(ctypes.c_void_p(at), 4096)",
    "all pages locked": "libc.mlockall(3)",
    "locks of a file": "fcntl.lockf(1, fcntl.LOCK_EX, 1, 0)",
    "lock of a file": "fcntl.flock(1, fcntl.LOCK_EX)",
    "watches": "libc.inotify_init1(0)",
    "watches of a folder": "fcntl.fcntl(1, 1026, 1)",
    "watches of the system": "libc.fanotify_init(0, 0)",
    "events": "libc.eventfd(0, 0)",
    "waiting for events": "libc.epoll_create1(0)",
    "timers": "libc.timerfd_create(1, 0)",
    "more timers": "libc.timer_create(1, None, (ctypes.c_int * 4)())",
    "signals to read": "libc.signalfd(-1, (ctypes.c_long * 16)(), 0)",
    "extended attributes": "libc.setxattr(b'x', b'user.x', b'x', 1, 0)",
    "policies of memory": "libc.syscall({mbind}, at, 4096, 1, None, 0, 0)",
    "keys": "libc.syscall({add_key}, b'user', b'x', b'x', 1, -3)",
    "asynchronous I/O": "libc.syscall({io_setup}, 64, (ctypes.c_long * 1)())",
    "rings": "libc.syscall(425, 64, (ctypes.c_char * 256)())",
    "faults to handle": "libc.syscall({userfaultfd}, 1)",
    "counters": "libc.syscall({perf}, (ctypes.c_char * 256)(), 0, -1, -1, 0)",
    "programs in the kernel": "libc.syscall({bpf}, 0, (ctypes.c_char * 256)(), 128)",
    "rules on files": "libc.syscall(444, (ctypes.c_long * 3)(1, 0, 0), 8, 0)",
    "filters of system calls": "libc.syscall({seccomp}, 1, 0, None)",
    "secret memory": "libc.syscall(447, 0)",
    "a process by descriptor": "libc.syscall(434, os.getpid(), 0)",
    "a mount": "libc.syscall(430, b'tmpfs', 0)",
    "handles": "libc.syscall({handle}, -100, b'.', (ctypes.c_char * 256)(), (ctypes.c_int * 1)(), 0)",
    "local descriptors": "libc.syscall(154, 1, (ctypes.c_char * 64)(), 16)" if X86 else "os.pipe()",
}
"""What keeps memory that the limit of address space does not count."""
NUMBERS = (
    {"mbind": 237, "add_key": 248, "io_setup": 206, "userfaultfd": 323}
    | {"perf": 298, "bpf": 321, "seccomp": 317, "handle": 303}
    if X86
    else {"mbind": 235, "add_key": 217, "io_setup": 0, "userfaultfd": 282}
    | {"perf": 241, "bpf": 280, "seccomp": 277, "handle": 264}
)


def submit(code: str, allowance: Allowance = PATIENT) -> Submission:
    """A confined process that has executed one cell."""
    return Submission([Code("one", code)], allowance)


@needs_confinement
def test_whatever_keeps_memory_is_refused():
    """Each way to keep memory outside the address space is refused by the kernel."""
    calls = {name: code.format(**NUMBERS) for name, code in HOLDERS.items()}
    listed = ",\n".join(f"    {name!r}: lambda: {code}" for name, code in calls.items())
    code = f"{HEAD}\ncalls = {{\n{listed}\n}}\ndef tried():\n    return {{n: said(c) for n, c in calls.items()}}"
    with submit(code) as submission:
        assert submission.failed_cells == ()
        found = submission.call("tried", gives=dict[str, str])
    assert found == dict.fromkeys(HOLDERS, "EPERM")


@needs_confinement
def test_no_call_beyond_the_list_is_made():
    """Of all numbers of system calls, known today or not, only those of the list reach the kernel."""
    machine = ARCHITECTURES[platform.machine()]
    known = {*machine.allowed.values(), *machine.looked_into.values()}
    known |= {335, 336} if X86 else set()  # of uprobes: filters do not see them, and outside of a probe they crash
    code = (
        f"{HEAD}\ndef tried(numbers):\n    return {{said(lambda: libc.syscall(n, -1, -1, -1)) for n in numbers}}"
    )
    with submit(code) as submission:
        assert submission.call("tried", [n for n in range(463) if n not in known], gives=set[str]) == {"EPERM"}
        assert submission.call("tried", list(range(463, 700)), gives=set[str]) == {"ENOSYS"}


@needs_confinement
def test_the_address_space_is_the_bound():
    """Memory that is mapped, touched and held ends at the allowance, however it is asked for."""
    code = (
        "import mmap\n"
        "held = []\n"
        "def hold():\n"
        "    try:\n"
        "        while True:\n"
        "            held.append(mmap.mmap(-1, 2**24, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))\n"
        "            for at in range(0, 2**24, 4096):\n"
        "                held[-1][at] = 1\n"
        "    except OSError:\n"
        "        return len(held) * 2**24\n"
    )
    with submit(code, Allowance(memory_bytes=512 * MIB, reply_s=60)) as submission:
        held = submission.call("hold", gives=int)
        assert 128 * MIB < held < 512 * MIB
        assert resident_bytes(submission._process.pid) < 512 * MIB


def resident_bytes(pid: int) -> int:
    """What a process holds of the machine's memory."""
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024 * sum(int(rows[name].split()[0]) for name in ("VmRSS", "VmSwap", "VmPTE"))


@needs_confinement
def test_page_tables_are_bounded():
    """Single pages far from each other need four pages of memory each; a submission with too many of them ends."""
    code = (
        "import ctypes, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.mmap.restype = ctypes.c_void_p\n"
        "def spread():\n"
        "    for n in range(1, 60_000):\n"
        "        at = libc.mmap(ctypes.c_void_p(n * 2**30), ctypes.c_size_t(4096), 3, 0x22, -1, 0)\n"
        "        if at and at < 2**47:\n"
        "            ctypes.memset(at, 1, 1)\n"
        "    time.sleep(30)\n"
    )
    with (
        submit(code) as submission,
        pytest.raises(SubmissionError, match=r"too many pieces: page tables of \d+ MiB"),
    ):
        submission.call("spread")


@needs_confinement
def test_a_control_group_bounds_it_too():
    """Where this user may make control groups, a submission is in one with a limit, which goes with it."""
    with submit("pass") as submission:
        if submission._group is None:
            pytest.skip("no control group can be made here")
        folder = submission._group._folder
        assert int((folder / "cgroup.procs").read_text()) == submission._process.pid
        name = next(each for each in ("memory.limit_in_bytes", "memory.max") if (folder / each).exists())
        most = PATIENT.memory_bytes + PATIENT.folder_bytes + 128 * MIB
        assert int((folder / name).read_text()) == most
    assert not folder.exists()


@pytest.mark.parametrize(
    ("cgroup", "controllers", "found"),
    [
        ("9:memory:/a/b\n0::/\n", False, ["memory/a/b", "memory/a"]),
        ("3:cpu,memory:/\n", False, ["memory"]),
        ("0::/user.slice/x.scope\n", True, ["user.slice/x.scope", "user.slice"]),
        ("0::/\n", False, []),
        ("8:pids:/\n", False, []),
    ],
)
def test_where_a_control_group_can_be(tmp_path, cgroup, controllers, found):
    """In the group of the grader or beside it, in version 1 and 2; nowhere without a controller of memory."""
    if controllers:
        (tmp_path / "cgroup.controllers").write_text("memory")
    assert [str(path.relative_to(tmp_path)) for path in group_folders(cgroup, tmp_path)] == found


def test_without_control_groups_there_is_none(monkeypatch, tmp_path):
    """A group that cannot be made is none, and nothing of the attempt stays."""
    monkeypatch.setattr("mooncake_lab.course.grading.memory_group.group_folders", lambda _: [tmp_path])
    assert MemoryGroup.around(os.getpid(), MIB) is None
    assert list(tmp_path.iterdir()) == []


PREEMPTS = """
from mooncake_lab.batching import Plan, Segment
class MyChunking:
    def __init__(self, chunk_tokens):
        pass
    def plan(self, waiting, running, limits):
        if running:
            return Plan(preempted=tuple(r.request_id for r in running), reason="A" * 60_000)
        r = waiting[0]
        return Plan(segments=(Segment(r.request_id, "prefill", 1, 0, r.pending_tokens == 1),), reason="B" * 60_000)
"""


@needs_confinement
def test_an_engine_of_a_submission_ends():
    """A policy that preempts for ever ends after some iterations, and reasons of any length are cut."""
    model = load_model("random:lab-tiny", device="cpu", positions=256)
    with submit(PREEMPTS) as submission:
        policy = RemoteBatching(submission, submission.make("MyChunking", 16))
        engine = CoupledEngine(model, policy, EngineSettings(cache_blocks=64))
        with pytest.raises(SubmissionError, match=r"after 2,000 iterations \d requests still wait"):
            engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=4)
        assert policy.plans == MOST_PLANS + 1


def test_the_engine_that_grades_loads_no_compiler():
    """Tokens to compare with are computed without numba, which takes a third of what a grader may hold."""
    code = (
        "import sys\n"
        "from mooncake_lab.course.grading.scheduling_assignments import _reference\n"
        "prompts, tokens = _reference('seed')\n"
        "print(len(prompts), len(tokens), 'torch' in sys.modules, 'numba' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["6", "6", "True", "False"]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("Plan(preempted=tuple(range(5000)))", "decides about 5000 requests, but 1 are there"),
        ("Plan(segments=(Segment(0, 'prefill', 1, 0, False),) * 1000)", "decides about 1000 requests, but 1 are"),
        ("Plan(rejected=(Refusal(0, 'x' * 60_000),))", ""),
        ("Plan(reason='x' * 60_000, segments=(Segment(0, 'prefill', 3, 0, True),))", ""),
    ],
)
@needs_confinement
def test_a_plan_that_is_kept_is_small(plan, said):
    """The grader keeps no plan with more entries than requests, and no long reason."""
    code = (
        "from mooncake_lab.batching import Plan, Refusal, Segment\n"
        "class P:\n"
        f"    def plan(self, waiting, running, limits):\n        return {plan}\n"
    )
    limits = Limits(max_batch_tokens=8, max_requests=8, block_size_tokens=4, capacity_blocks=9, free_blocks=9)
    requests = [Progress(request_id=0, arrival=0, prompt_tokens=3)]
    with submit(code) as submission:
        policy = RemoteBatching(submission, submission.make("P"))
        if said:
            with pytest.raises(SubmissionError, match=said):
                trace_plans(policy, requests, limits, {0: 1})
            return
        (step,) = trace_plans(policy, requests, limits, {0: 1})
    assert max(len(text) for text in (step.plan.reason, *(each.reason for each in step.plan.rejected))) == 200


@needs_confinement
def test_reasons_of_placements_and_rejections_are_cut():
    """What a log keeps of each decision of a submission has at most 200 letters of its own."""
    from mooncake_lab.course.admission import _cases
    from mooncake_lab.course.grading.task import RemoteAdmission, RemotePlacement
    from mooncake_lab.course.round_estimates import RoundEstimator

    code = (
        "from mooncake_lab.conductor import Placement, Rejection\n"
        "class P:\n"
        "    def place(self, request, view, estimate):\n"
        "        return Placement(request_id=request.id, prefill='prefill-0', decode='decode-0', \n"
        "            reused_tokens=0, expected_ttft_s=1.0, expected_tbt_s=1.0, reason='x' * 60_000)\n"
        "    def admit(self, request, proposed, view, *, estimate, slo):\n"
        "        return Rejection(request_id=request.id, stage='admission', reason='x' * 60_000)\n"
    )
    request, view = _cases()[0]
    estimate = RoundEstimator()
    with submit(code) as submission:
        number = submission.make("P")
        placed = RemotePlacement(submission, number).place(request, view, estimate)
        policy = RemoteAdmission(submission, number)
        refused = policy.admit(request, placed, view, estimate=estimate, slo=SLO(ttft_s=1, tbt_s=1))
    assert (len(placed.reason), len(refused.reason)) == (200, 200)


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ([(1.0, 0.0)] * 31, [30]),
        ([(1.0, 0.05)] * 62, [30]),
        ([(1.0, 0.11)] * 62, []),
        ([(9.0, 0.0)] * 5, []),
        ([(0.01, 0.0)] * 2000, []),
    ],
    ids=["asleep", "nearly asleep", "slow", "the grader was stopped", "not long enough"],
)
def test_who_sleeps_is_ended(monkeypatch, waits, said):
    """A submission that uses less than a tenth of a core for 30 s in which it is waited for has to end."""
    busy_s = 0.0
    monkeypatch.setattr(Watch, "_busy_so_far_s", lambda _: busy_s)
    monkeypatch.setattr(Watch, "_state", lambda _: "S")
    monkeypatch.setattr(Watch, "_queued_so_far_s", lambda _: 0.0)
    watch = Watch(os.getpid(), Wait())
    found = []
    for step, (seconds, busy) in enumerate(waits, start=1):
        busy_s += busy
        if why := watch.waited(seconds, silent=True):
            assert "it used less than 10% of a core for 30 s" in why
            found.append(step)
    assert found[:1] == said


@pytest.mark.parametrize(("state", "ends"), [("S", True), ("D", False), ("R", False)])
def test_a_slow_machine_is_no_sleeper(monkeypatch, state, ends):
    """Who waits for a core or for a disk while no answer comes does not sleep."""
    monkeypatch.setattr(Watch, "_busy_so_far_s", lambda _: 0.0)
    monkeypatch.setattr(Watch, "_state", lambda _: state)
    watch = Watch(os.getpid(), Wait())
    assert any(watch.waited(1.0, silent=True) for _ in range(40)) == ends


@pytest.mark.parametrize(("busy_s", "ends"), [(0.02, False), (0.002, True)])
def test_the_graders_own_wait_for_a_core_is_no_sleep(monkeypatch, busy_s, ends):
    """Of 1 s until an answer is read, 0.95 s of the grader in the queue do not count; asleep for the rest does."""
    passed = [0]
    monkeypatch.setattr(Watch, "_busy_so_far_s", lambda _: busy_s * passed[0])
    monkeypatch.setattr(Watch, "_queued_so_far_s", lambda _: 0.95 * passed[0])
    watch = Watch(os.getpid(), Wait())
    found = []
    for _ in range(700):
        passed[0] += 1
        found.append(watch.waited(1.0, silent=False))
    assert any(found) == ends
    assert not any(found[:599]), "30 s of real waiting take 600 such answers"


def test_the_grader_sees_its_own_time_in_the_queue():
    """A thread that shares its core with a busy process waits for it about half of the time."""
    before, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    other = subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile 1: 0"])
    watch = Watch(os.getpid(), Wait())
    try:
        os.sched_setaffinity(0, {core})
        began_s, queued_s = time.thread_time(), watch._queued_so_far_s()
        while time.thread_time() < began_s + 0.3:
            pass
        assert watch._queued_so_far_s() - queued_s > 0.03
    finally:
        os.sched_setaffinity(0, before)
        other.kill()
        other.wait()


def test_time_in_the_queue_for_a_core_counts():
    """Two busy processes on one core are both busy, whatever share of it they get."""
    core = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    two = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        time.sleep(1)
        before = [Watch(each.pid, Wait())._busy_so_far_s() for each in two]
        began_s = time.monotonic()
        time.sleep(2)
        after = [Watch(each.pid, Wait())._busy_so_far_s() for each in two]
        passed_s = time.monotonic() - began_s
    finally:
        for each in two:
            each.kill()
            each.wait()
    assert all(b - a > 0.5 * passed_s for a, b in zip(before, after, strict=True))


@needs_confinement
def test_a_sleeper_ends_over_all_its_answers(monkeypatch):
    """Sleeping a little per answer, and a little per task, adds up."""
    monkeypatch.setattr("mooncake_lab.course.grading.watch.SLEEPER_S", 1.0)
    budget = Budget(allowance=PATIENT)
    code = "def f():\n    import time\n    time.sleep(0.3)"
    answers = []

    def ask():
        for _ in range(5):
            with Submission([Code("one", code)], budget=budget) as submission:
                answers.extend(submission.call("f") for _ in range(2))

    with pytest.raises(SubmissionError, match="does it sleep"):
        ask()
    assert 2 <= len(answers) <= 6


@needs_confinement
def test_the_folders_of_a_killed_grader_are_removed(tmp_path, monkeypatch):
    """What a killed grader leaves is removed at the next start; the folders of others stay."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = (
        "import time\n"
        "from mooncake_lab.course.grading.messages import Code\n"
        "from mooncake_lab.course.grading.remote import Submission\n"
        "one = Submission([Code('one', 'pass')])\n"
        "print(flush=True)\n"
        "time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as grader:
        assert grader.stdout is not None
        grader.stdout.readline()
        (left,) = tmp_path.iterdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        with submit("pass"):
            assert left.exists()
            assert len(list(tmp_path.iterdir())) == 2
        grader.kill()
        grader.wait()
    assert left.exists()
    with submit("pass"):
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []
