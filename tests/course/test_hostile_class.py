"""A class with some of the worst submissions is graded whole, within the memory that the guide states."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from submissions import hand_in, needs_confinement

from mooncake_lab.course.grading.confine import Allowance
from mooncake_lab.course.grading.grade import ASSIGNMENTS

MIB = 2**20
GRADER_BYTES = 500 * MIB
HONEST = 15
"""Right submissions, of all five topics in turn."""
FLOOD = """
import ctypes, mmap, os
libc = ctypes.CDLL(None)
kept = []
def flood():
    while True:
        pages = mmap.mmap(-1, 2**26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for at in range(0, 2**26, 4096):
            pages[at] = 1
        kept.append(pages)
try:
    flood()
except (OSError, MemoryError):
    pass
import time
time.sleep(5)
"""
SHARED = """
import mmap
for _ in range(10_000):
    pages = mmap.mmap(-1, 2**28)
    for at in range(0, 2**28, 4096):
        pages[at] = 1
"""
PREEMPTS = """
class MyChunking:
    def __init__(self, chunk_tokens):
        pass
    def plan(self, waiting, running, limits):
        if running:
            return Plan(preempted=tuple(r.request_id for r in running), reason="A" * 60_000)
        r = waiting[0]
        return Plan(segments=(Segment(r.request_id, "prefill", 1, 0, r.pending_tokens == 1),), reason="B" * 60_000)
"""
SLEEPS = """
import time
def chain_keys(tokens, n):
    time.sleep(0.5)
    return [repr(tokens[: start + n]) for start in range(0, len(tokens), n)]
"""
PIECES = """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
for n in range(1, 60_000):
    at = libc.mmap(ctypes.c_void_p(n * 2**30), ctypes.c_size_t(4096), 3, 0x22, -1, 0)
    if at and at < 2**47:
        ctypes.memset(at, 1, 1)
while True:
    pass
"""
WORST = {
    "flood": ("keys", {"chain-keys": FLOOD}),
    "shared": ("keys", {"chain-keys": SHARED}),
    "preempts": ("chunked", {"my-chunking": PREEMPTS}),
    "sleeps": ("keys", {"chain-keys": SLEEPS}),
    "pieces": ("keys", {"chain-keys": PIECES}),
}


def processes():
    """Every process: its parent, its resident memory with page tables, and whether it is a submission."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            lines = (folder / "status").read_text().splitlines()
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        rows = dict(line.split(":", 1) for line in lines if ":" in line)
        held = sum(1024 * int(rows[name].split()[0]) for name in ("VmRSS", "VmSwap", "VmPTE") if name in rows)
        found[int(folder.name)] = (int(rows["PPid"]), held, b"enter.py" in command)
    return found


def watch(pid, most, done):
    """Keep the most memory of any grader and of any submission below a process."""
    while not done.wait(0.1):
        found = processes()
        for each in found:
            ancestor = each
            while ancestor in found and ancestor != pid:
                ancestor = found[ancestor][0]
            if ancestor == pid:
                _, held, submission = found[each]
                kind = "submission" if submission else "grader"
                most[kind] = max(most[kind], held)


@pytest.mark.slow
@needs_confinement
def test_a_class_with_the_worst_is_graded_within_its_memory(tmp_path, record_property):
    """Everybody has a grade, the worst have no undeserved point, and grader and submissions stay within bounds."""
    topics = sorted(ASSIGNMENTS)
    for number in range(HONEST):
        topic = topics[number % len(topics)]
        hand_in(tmp_path / "in" / f"honest-{number:03}", topic)
    for name, (topic, cells) in WORST.items():
        hand_in(tmp_path / "in" / name, topic, cells)
    command = [sys.executable, "-m", "mooncake_lab", "classroom", "grade", str(tmp_path / "in")]
    options = ["--out", str(tmp_path / "out"), "--jobs", "2", "--json", "--reply-s", "60", "--wall-s", "1800"]
    most, done = {"grader": 0, "submission": 0}, threading.Event()
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, env={**os.environ}) as grader:
        watcher = threading.Thread(target=watch, args=(grader.pid, most, done))
        watcher.start()
        out, _ = grader.communicate()
        done.set()
        watcher.join()
    earned = {each["student"]: each["earned"] for each in json.loads(out)["grades"]}
    record_property("most_mib", {name: held // MIB for name, held in most.items()})
    record_property("earned", earned)
    assert grader.returncode == 0
    assert {name: points for name, points in earned.items() if name.startswith("honest")} == {
        f"honest-{number:03}": 10 for number in range(HONEST)
    }
    assert {name: earned[name] for name in WORST} == {
        "flood": 4,  # only its own cell is lost
        "shared": 4,
        "preempts": 0,
        "sleeps": 5,  # the keys are right, but only the task that asks for two of them gets an answer in time
        "pieces": 0,
    }
    assert most["grader"] < GRADER_BYTES
    assert most["submission"] < Allowance().memory_bytes + 64 * MIB
