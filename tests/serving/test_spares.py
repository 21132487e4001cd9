"""A spare costs no serving worker its life: it is the first to be killed, and is not started without memory."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from waiting import until

from mooncake_lab.serving import LiveOptions, WorkerError, WorkerProcesses
from mooncake_lab.serving.launch import local
from mooncake_lab.serving.launch.local import READY
from mooncake_lab.serving.launch.memory import memory_left_bytes, most_memory_bytes
from mooncake_lab.serving.launch.process import OomScore

MB = 10**6
V1_MOUNT = "32 31 0:33 {root} {top} rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 {root} {top} rw,relatime - cgroup2 cgroup2 rw\n"


@pytest.fixture
def proc(tmp_path):
    """Makes a `/proc`: `proc(groups, mounts, available_kb)`."""

    def make(cgroup="", mounts="", available_kb=10**6):
        folder = tmp_path / "proc"
        (folder / "self").mkdir(parents=True)
        (folder / "self" / "cgroup").write_text(cgroup)
        (folder / "self" / "mountinfo").write_text("23 1 0:21 / /proc rw - proc proc rw\n" + mounts)
        if available_kb is not None:
            (folder / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {available_kb} kB\nHugePages: 0\n")
        return folder

    return make


def group_v1(folder, limit, used, inactive=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 5\ninactive_file 1\ntotal_inactive_file {inactive}\n")


def group_v2(folder, limit, used, inactive=0, high="max"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")


def test_the_memory_left_is_the_least_of_all_groups_of_version_2(tmp_path, proc):
    """Of nested groups the tightest counts, without the files that the kernel drops, and `max` is no limit."""
    top = tmp_path / "my cgroups"
    group_v2(top / "a", 900 * MB, 600 * MB)
    group_v2(top / "a/b", 500 * MB, 450 * MB, inactive=30 * MB)
    group_v2(top / "a/b/c", "max", 400 * MB)
    mount = V2_MOUNT.format(root="/", top=str(top).replace(" ", "\\040"))
    folder = proc("0::/a/b/c\n", mount)
    assert memory_left_bytes(folder) == 80 * MB
    group_v2(top / "a", 900 * MB, 860 * MB)
    assert memory_left_bytes(folder) == 40 * MB
    group_v2(top / "a/b/c", "max", 400 * MB, high=401 * MB)
    assert memory_left_bytes(folder) == MB
    group_v2(top / "a", 900 * MB, 950 * MB)
    assert memory_left_bytes(folder) == 0


def test_the_memory_left_in_groups_of_version_1(tmp_path, proc):
    """The controller of memory counts, alone or with others; a limit that is none leaves the machine's memory."""
    top = tmp_path / "memory"
    group_v1(top / "a", 900 * MB, 700 * MB, inactive=100 * MB)
    group_v1(top / "a/b", 2**63 - 4096, 600 * MB)
    mounts = "31 31 0:32 / /nowhere rw - cgroup cgroup rw,cpu\n" + V1_MOUNT.format(root="/", top=top)
    folder = proc("5:cpu:/x\n4:hugetlb,memory:/a/b\n1:name=systemd:/\n", mounts)
    assert memory_left_bytes(folder) == 300 * MB
    group_v1(top / "a", 2**63 - 4096, 700 * MB)
    assert memory_left_bytes(folder) == 10**6 * 1024


@pytest.mark.parametrize(("root", "path"), [("/docker/1", "/docker/1"), ("/", "/../other"), ("/docker/1", "/")])
def test_the_memory_left_in_a_container(tmp_path, proc, root, path):
    """A container sees its own group at the mount, whatever path the host has for it."""
    top = tmp_path / "memory"
    group_v1(top, 900 * MB, 700 * MB)
    assert memory_left_bytes(proc(f"4:memory:{path}\n", V1_MOUNT.format(root=root, top=top))) == 200 * MB


def test_memory_without_files(tmp_path, proc):
    """Without groups the machine's memory counts, and without any file nothing is known."""
    mounts = V2_MOUNT.format(root="/", top=tmp_path / "nowhere")
    assert memory_left_bytes(proc("0::/a\n", mounts)) == 10**6 * 1024
    assert memory_left_bytes(tmp_path / "no proc") is None
    (tmp_path / "proc" / "meminfo").unlink()
    assert memory_left_bytes(tmp_path / "proc") is None
    assert most_memory_bytes(tmp_path) == 0
    assert most_memory_bytes() > MB


ASK = "from mooncake_lab.serving.launch.memory import memory_left_bytes; input(); print(memory_left_bytes())"


def test_the_memory_left_in_a_real_group():
    """A process in a group that allows 300 MB has less than that left."""
    with contextlib.ExitStack() as undo:
        try:
            group, limit = _real_group(undo)
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        with subprocess.Popen(
            [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as asked:
            (group / "cgroup.procs").write_text(str(asked.pid))
            (group / limit).write_text(str(300 * MB))
            left, _ = asked.communicate("\n")
        assert 0 < int(left) <= 300 * MB


def _real_group(undo):
    tops = [
        (Path(fields[4]), line.split(" - ")[1].split()[0])
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if (fields := line.split()) and (" - cgroup2 " in line or (" - cgroup " in line and ",memory" in line))
    ]
    for top, kind in tops:
        limit = "memory.max" if kind == "cgroup2" else "memory.limit_in_bytes"
        group = top / f"mooncake-lab-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            undo.callback(until, lambda group=group: _removed(group), 10)
            return group, limit
        group.rmdir()
    raise OSError("none of the mounted hierarchies lets a group with a limit of memory be made")


def _removed(group):
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


class Dry:
    """The memory that is left, as a test sets it."""

    def __init__(self, left_bytes):
        self.left_bytes = left_bytes

    def __call__(self):
        return self.left_bytes


PROCESS = f"""
import socket, sys
pool = socket.socket(fileno=int(sys.argv[2]))
if not pool.recv({2**16}): sys.exit()
pool.send(b"{READY.decode()}0 {200 * MB}")
pool.recv({2**16})
"""


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Lets worker processes be a small Python program: `program(source)`."""
    python = sys.executable

    def make(source):
        (tmp_path / "program.py").write_text(source)
        path = tmp_path / "program"
        path.write_text(f'#!/bin/sh\nexec {python} {tmp_path}/program.py "$@"\n')
        path.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(path))

    return make


def test_no_spare_without_memory(program, monkeypatch, caplog):
    """Below what loading took no spare is started, and one warning says so; one is started when memory is left."""
    program(PROCESS)
    monkeypatch.setattr(local, "_NO_ROOM_S", 0.05)
    left = Dry(150 * MB)
    monkeypatch.setattr(local, "memory_left_bytes", left)
    looked = []
    monkeypatch.setattr(
        WorkerProcesses, "_top_up", lambda pool, top_up=WorkerProcesses._top_up: looked.append(top_up(pool))
    )
    with WorkerProcesses(LiveOptions(spares=2)) as pool:
        pool.start(1)
        before = pool.pids()
        pool.keep_spares()
        assert until(lambda: len(looked) > 5)
        assert pool.pids() == before
        warned = [record.getMessage() for record in caplog.records if "no spare worker" in record.getMessage()]
        assert len(warned) == 1
        assert "150 MB of memory are left, and loading the model took 200 MB" in warned[0]
        left.left_bytes = 250 * MB
        assert until(lambda: len(pool.idle()) == 2)
        left.left_bytes = 10 * MB
        os.kill(pool.idle()[0], signal.SIGKILL)
        assert until(lambda: len([r for r in caplog.records if "no spare worker" in r.getMessage()]) == 2)
        assert len(pool.pids()) == 1


def test_spares_that_load_at_once_need_memory_at_once(program, monkeypatch):
    """While a spare loads, the next one is only started if there is memory for both."""
    program("import time; time.sleep(60)")
    monkeypatch.setattr(local, "memory_left_bytes", Dry(500 * MB))
    with WorkerProcesses(LiveOptions(spares=4)) as pool:
        pool._loading_bytes = 200 * MB
        pool.keep_spares()
        assert until(lambda: len(pool.pids()) == 2)
        assert pool._count("starting") == 2


def test_memory_that_is_not_known_stops_no_spare(program, monkeypatch):
    """Where nothing tells how much memory is left, spares are started as before."""
    program(PROCESS)
    monkeypatch.setattr(local, "memory_left_bytes", Dry(None))
    with WorkerProcesses(LiveOptions()).start(1) as pool:
        os.kill(pool.idle()[0], signal.SIGKILL)
        assert until(lambda: not pool.pids())
        pool.keep_spares()
        assert until(pool.idle)


def test_one_retry_is_enough(program, caplog):
    """While a worker that is needed cannot be started, no spare tries the same beside it."""
    program("import sys; sys.exit(3)")
    with WorkerProcesses(LiveOptions()) as pool:
        for _ in range(2):
            with pytest.raises(WorkerError, match="status 3"):
                pool.start(1)
        pool.keep_spares()
        assert pool.pids() == []
        assert "spare" not in caplog.text
        program(PROCESS)
        pool.start(1)  # the model can be loaded again
        os.kill(pool.idle()[0], signal.SIGKILL)
        assert until(pool.idle)


def test_no_spare_beside_a_worker_that_loads(program):
    """A worker that is needed has the machine for itself until it is ready."""
    program("import time; time.sleep(60)")
    with WorkerProcesses(LiveOptions()) as pool:
        thread = threading.Thread(target=_tried, args=(pool,))
        thread.start()
        assert until(pool.pids)
        pool.keep_spares()
        assert len(pool.pids()) == 1
        pool.close()
        thread.join()


def _tried(pool):
    with contextlib.suppress(WorkerError):
        pool.start(1)


@pytest.mark.parametrize(("before", "raised"), [("0", "500"), ("300", "800"), ("900", "1000"), ("-200", "500")])
def test_a_spare_is_killed_first(tmp_path, before, raised):
    """The score of a spare is above that of the others until it is used; then it is what it was."""
    path = tmp_path / "oom_score_adj"
    path.write_text(f"{before}\n")
    score = OomScore(path)
    score.restore()  # of a process that never waited
    assert path.read_text().strip() == before
    score.raise_()
    score.raise_()
    assert path.read_text() == raised
    score.restore()
    assert path.read_text() == before
    score.raise_()
    assert path.read_text() == raised


def test_the_kernel_lets_a_process_raise_and_restore_its_score():
    """No privilege is needed for either."""
    if not Path("/proc/self/oom_score_adj").exists():
        pytest.skip("this system has no oom_score_adj")
    source = (
        "from pathlib import Path; from mooncake_lab.serving.launch.process import OomScore; s = OomScore()\n"
        "p = Path('/proc/self/oom_score_adj'); print(p.read_text()); s.raise_(); print(p.read_text())\n"
        "s.restore(); print(p.read_text())"
    )
    drop = ["setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource"] if os.geteuid() == 0 else []
    done = subprocess.run([*drop, sys.executable, "-c", source], capture_output=True, text=True, check=True)
    before, raised, after = map(int, done.stdout.split())
    assert (raised, after) == (min(1000, max(0, before) + 500), before)


def test_a_score_that_cannot_be_restored_is_told(tmp_path, monkeypatch, caplog):
    """A worker that stays the first to be killed says so, and works; so does one without the file."""
    path = tmp_path / "oom_score_adj"
    path.write_text("0")
    score = OomScore(path)
    score.raise_()

    def refuse(_path, _text):
        raise PermissionError("Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    score.restore()
    assert "stays at its raised value" in caplog.text
    score = OomScore(tmp_path / "nothing")
    score.raise_()
    score.restore()
