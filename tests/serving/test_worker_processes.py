"""Worker processes: started with exec, ready before they are needed, replaced when they are lost."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import flat
import pytest
from waiting import until

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.serving import LiveCluster, LiveOptions, WorkerError, WorkerProcesses
from mooncake_lab.serving.launch import process as worker_process
from mooncake_lab.serving.launch.process import _is_clean
from mooncake_lab.serving.spec import worker_spec

MODEL = "random:lab-tiny"
PROMPTS = [list(range(1, 40)), [7, 8, 9], [5] * 100]


def title(pid):
    """What `ps -o comm` shows."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def threads(pid):
    """Of each thread of a process: the clock ticks that it computed, and its nice value."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
        found[int(thread.name)] = (int(fields[11]) + int(fields[12]), int(fields[16]))
    return found


def test_spares_take_over(believed, reference):
    """Workers with two threads give the engine's tokens; a warm spare replaces a killed one; spares are replaced.

    One test, since each process takes seconds of two cores.
    """
    expected = reference(PROMPTS, 200)
    spec, options = flat.live(model=MODEL, device="cpu", threads=2, coupled_nodes=1)
    with WorkerProcesses(options) as pool, LiveCluster(spec, options, model=believed, launcher=pool) as live:
        assert live.generate(PROMPTS, max_new_tokens=200) == expected
        assert until(pool.idle)
        (lost,) = pool.idle()
        os.kill(lost, signal.SIGKILL)  # before it was used
        assert until(lambda: pool.idle() and lost not in pool.idle())
        (spare,) = pool.idle()
        killed = live.pids()["coupled-0"]
        assert (title(killed), title(spare)) == ("coupled-0", "spare-worker")
        live.kill("coupled-0")
        assert until(lambda: live.pids().get("coupled-0") == spare)
        assert title(spare) == "coupled-0"
        before = threads(spare)
        assert live.generate(PROMPTS, max_new_tokens=200) == expected
        used = [(ticks - before.get(key, (0, 0))[0], nice) for key, (ticks, nice) in threads(spare).items()]
        assert sum(ticks for ticks, _ in used) > 0
        assert all(nice == os.nice(0) for ticks, nice in used if ticks > 1)  # it was prepared at a lower priority
        assert len(pool.pids()) == 2  # the next spare is on its way


def test_clusters_share_processes(open_cluster, pool, reference):
    """A process that was a worker of one cluster is one of the next, and nothing of the first is left in it."""
    with open_cluster(coupled_nodes=1) as live:
        before = live.pids()["coupled-0"]
        live.generate(PROMPTS, max_new_tokens=3)
    assert before in pool.idle()
    with open_cluster() as live:
        assert set(live.pids().values()) <= set(pool.pids())
        assert live.generate(PROMPTS, max_new_tokens=3) == reference(PROMPTS, 3)
    assert before in pool.idle()


def test_a_process_with_threads_left_is_not_used_again(monkeypatch):
    """What a worker did not clean up must not disturb the next: the process ends instead."""
    spec = worker_spec(*flat.live(), "decode-0", b"t" * 32)
    monkeypatch.setattr(worker_process, "_THREADS_END_S", 0.05)
    go_on = threading.Event()
    monkeypatch.setattr(threading, "active_count", lambda: 1 + (not go_on.is_set()))
    assert not _is_clean(spec)
    go_on.set()
    assert _is_clean(spec)


CHILDREN_OF_A_POOL = """
import sys, time
from mooncake_lab.serving import LiveOptions, WorkerProcesses
pool = WorkerProcesses(LiveOptions(model="random:lab-tiny", device="cpu", backend="dense")).start(1)
print(*pool.idle(), flush=True)
time.sleep(600)
"""


def test_processes_end_with_their_parent():
    """When the parent is killed with -9 its worker processes are gone too, even if they are stopped."""
    with subprocess.Popen([sys.executable, "-c", CHILDREN_OF_A_POOL], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        os.kill(pids[0], signal.SIGSTOP)
        parent.kill()
    assert len(pids) == 1
    assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)


def test_a_process_whose_parent_died_before_it_began_ends():
    """A parent that was killed before its child could be bound to it leaves no child either."""
    done = subprocess.run(
        [sys.executable, worker_process.__file__, "0", str(2**22 + 1), "foreground"], check=False
    )
    assert done.returncode == 0  # it did not get as far as its socket


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Lets worker processes be another program: `program("echo no >&2; exit 3")`."""

    def make(script):
        path = tmp_path / "program"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))

    return make


def test_a_worker_on_a_gpu_is_warmed_up_before_it_serves(monkeypatch):
    """Its model is loaded and its kernels are compiled once, before the first worker of the process begins."""
    done = []
    monkeypatch.setattr(worker_process, "_place", lambda *_: "cuda:1")
    monkeypatch.setattr(worker_process, "_load", lambda _, place: done.append(("load", place)) or place)
    monkeypatch.setattr("mooncake_lab.engine.warm_up", lambda model: done.append(("warm up", model)))

    class Served:
        def __init__(self, _control, _spec, model):
            done.append(("serve", model))

        def run(self):
            pass

    monkeypatch.setattr("mooncake_lab.serving.worker.Worker", Served)
    models = {}
    for _ in range(2):
        control, theirs = socket.socketpair()
        worker_process._work(control, None, models)
        theirs.close()
    serve = ("serve", "cuda:1")
    assert done == [("load", "cuda:1"), ("warm up", "cuda:1"), serve, serve]


def test_a_process_that_ends_says_why(program, capfd):
    """Where a process ends without a word, the error has its exit status; what it wrote is on stderr."""
    program("echo no such library >&2; exit 3")
    with WorkerProcesses(LiveOptions()) as pool, pytest.raises(WorkerError, match="exited with status 3"):
        pool.start(1)
    assert "no such library" in capfd.readouterr().err
    with pytest.raises(WorkerError, match=r"(prefill|decode)-0 did not start: exited with status 3"):
        LiveCluster(ClusterSpec.small()).__enter__()


def test_a_process_that_cannot_be_started_says_why(monkeypatch):
    """An interpreter that is not there is an error with its name."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(WorkerError, match=r"could not be started.*/nowhere/python"):
        LiveCluster(ClusterSpec.small()).__enter__()


def test_spares_that_fail_are_tried_again(program, caplog):
    """A spare that cannot start is tried again after a pause, with a warning; closing does not wait for that."""
    program("exit 4")
    with WorkerProcesses(LiveOptions()) as pool:
        pool.keep_spares()
        assert until(lambda: caplog.text.count("exited with status 4") >= 2)
    assert "another starts in" in caplog.text
    assert pool.pids() == []


def test_a_start_that_is_given_up_takes_no_process(program):
    """A cluster that closes while a worker is being started has closed its connection: no process is used up."""
    program("sleep 60")
    ours, theirs = socket.socketpair()
    ours.close()
    theirs.close()
    with WorkerProcesses(LiveOptions()) as pool:
        with pytest.raises(OSError, match="Bad file descriptor"):
            pool.launch(worker_spec(*flat.live(), "prefill-0", b"token"), theirs)
        assert pool.pids() == []


def test_closing_does_not_wait_for_a_model(program):
    """A pool whose processes still load is closed at once."""
    program("exec sleep 600")
    pool = WorkerProcesses(LiveOptions())
    errors = []

    def starting():
        try:
            pool.start(1)
        except WorkerError as error:
            errors.append(error)

    thread = threading.Thread(target=starting)
    thread.start()
    assert until(pool.pids)
    (pid,) = pool.pids()
    pool.close()
    thread.join(20)
    assert len(errors) == 1
    assert not Path(f"/proc/{pid}").exists()
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ConnectionError, match="closed"):
        pool.launch(worker_spec(*flat.live(), "decode-0", b"t" * 32), theirs)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "random:unheard-of"}, "unheard-of"),
        ({"device_tokens": 10**12},
         r"coupled-0 did not start: device_tokens is 1000000000000: its KVCache takes [\d.]+ GB; this machine"),
    ],
)  # fmt: skip
def test_a_worker_that_cannot_start_says_why(believed, capfd, changes, says):
    """An unknown model and a KVCache that is too large are errors of one sentence, without a traceback."""
    alone = {"coupled_nodes": 1, "spares": 0}  # each process takes seconds
    spec, options = flat.live(**{"model": MODEL, "device": "cpu", "backend": "dense"} | alone | changes)
    with pytest.raises(WorkerError, match=says):
        LiveCluster(spec, options, model=believed).__enter__()
    assert "Traceback" not in capfd.readouterr().err
