"""What a submission may use is held by the kernel: disk, memory, threads, time; and nothing of it stays."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from submissions import needs_confinement

from mooncake_lab.course.grading import confine, remote
from mooncake_lab.course.grading.confine import Allowance, bounds, why_no_folder
from mooncake_lab.course.grading.messages import Code
from mooncake_lab.course.grading.remote import Budget, Submission, SubmissionError

pytestmark = needs_confinement
MIB = 2**20
LITTLE = Allowance(folder_bytes=8 * MIB, folder_entries=100, reply_s=60, wall_s=600)
FLOODS = {
    "a folder that cannot be read": (
        "os.mkdir('d', 0o300)\nfor n in itertools.count():\n    write(f'd/{n}', 2**20)",
        8 * MIB,
    ),
    "files without a name": (
        """
held = []
for n in itertools.count():
    held.append(open('x', 'wb', buffering=0))
    os.unlink('x')
    count += held[-1].write(bytes(2**20))
""",
        8 * MIB,
    ),
    "one large file": ("for n in itertools.count():\n    write('x', 2**20)", 8 * MIB),
    "many small files": ("for n in itertools.count():\n    write(str(n), 1)", 100),
    "folders in folders": (
        "for n in itertools.count():\n    os.mkdir('d')\n    os.chdir('d')\n    count += 1",
        100,
    ),
}
HEAD = """
import itertools, os
count = 0
def write(name, size):
    global count
    with open(name, "ab", buffering=0) as file:
        count += file.write(bytes(size))
try:
{flood}
except OSError as error:
    said = error.strerror
def found():
    return [count, said]
"""

needs_folder = pytest.mark.skipif(bool(why_no_folder()), reason=f"no private folder here: {why_no_folder()}")


def submit(code: str, allowance: Allowance = LITTLE, budget: Budget | None = None) -> Submission:
    """A confined process that has executed one cell."""
    return Submission([Code("one", code)], allowance, budget)


@needs_folder
@pytest.mark.parametrize("flood", FLOODS)
def test_the_kernel_bounds_the_disk(flood, tmp_path, monkeypatch):
    """However a submission writes, the kernel refuses more than is allowed, and nothing of it stays."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, most = FLOODS[flood]
    indented = "\n".join(f"    {line}" for line in code.splitlines())
    with submit(HEAD.format(flood=indented)) as submission:
        count, said = submission.call("found", gives=tuple[int, str])
    assert said == "No space left on device"
    assert 0.8 * most <= count <= most
    assert list(tmp_path.iterdir()) == []


def test_without_private_folders_nothing_can_be_written(tmp_path, monkeypatch):
    """Where the kernel allows no private file system, a submission writes nothing, and the header says so."""
    monkeypatch.setattr(remote, "why_no_folder", lambda: "not here")
    monkeypatch.setattr(confine, "why_no_folder", lambda: "not here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o777)
    code = (
        "import os\n"
        "def tried(places):\n"
        "    said = []\n"
        "    for place in places:\n"
        "        try:\n"
        "            open(place + '/of-a-submission', 'w')\n"
        "        except OSError as error:\n"
        "            said.append(error.strerror)\n"
        "    return said"
    )
    with submit(code) as submission:
        places = [".", "/tmp", "/dev/shm", str(tmp_path), "/var/tmp"]  # noqa: S108  # where all may write
        assert submission.call("tried", places, gives=list[str]) == ["Permission denied"] * len(places)
    assert list(tmp_path.iterdir()) == []
    assert "it can write no file at all" in bounds()


def test_processor_time_is_for_all_tasks_together():
    """What one process of a submission has used is missing in the next one, to the end."""
    budget = Budget(allowance=Allowance(cpu_s=2, reply_s=100, wall_s=600))
    burn = "import time\nwhile time.process_time() < {}: pass\n"
    with submit(
        "import time\nbefore = time.process_time()\nwhile time.process_time() < before + 1.2: pass", budget=budget
    ):
        pass
    assert 1.2 <= budget.cpu_used_s < 2
    assert budget.left().cpu_s == 1
    with pytest.raises(SubmissionError, match=r"more than 2 s of processor time in all"):
        submit("while True: pass", budget=budget)
    with pytest.raises(SubmissionError, match=r"more than 2 s of processor time in all"):
        submit(burn.format(0), budget=budget)


def test_time_is_for_all_tasks_together():
    """The clock of a submission starts with its first cell and does not start anew."""
    budget = Budget(allowance=Allowance(wall_s=2, reply_s=100))
    with submit("pass", budget=budget):
        ends_s = budget.ends_s
    with pytest.raises(SubmissionError, match=r"more than 2 s in all"):
        submit("import time\ntime.sleep(100)", budget=budget)
    assert budget.ends_s == ends_s
    with pytest.raises(SubmissionError, match=r"more than 2 s in all"):
        submit("pass", budget=budget)


def test_an_answer_is_bounded():
    """The grader reads no answer that is longer than any it asks for."""
    with (
        submit("def f():\n    return 'A' * 3_000_000") as submission,
        pytest.raises(SubmissionError, match=r"a body of \d+ bytes; allowed are 65536"),
    ):
        submission.call("f")


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("np.float64(0.5)", 0.5),
        ("[np.uint8(1), (np.float32(2),)]", [1, [2.0]]),
        ("np.arange(3)", [0, 1, 2]),
    ],
)
def test_numbers_of_numpy_are_numbers(given, plain):
    """An answer may hold what numpy computes."""
    with submit(f"import numpy as np\ndef f():\n    return {given}") as submission:
        assert submission.call("f") == plain


def test_nothing_of_the_teachers_folder_runs(tmp_path, monkeypatch):
    """A module beside which the grader is called is not imported, neither before confinement nor after it."""
    for name in ("xxhash", "json", "numpy", "sitecustomize", "mooncake_lab"):
        text = f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise SystemExit('taken')"
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with submit("import mooncake_lab\ndef where():\n    return mooncake_lab.__file__") as submission:
        assert submission.call("where", gives=str) == str(Path(remote.mooncake_lab.__file__).resolve())
    assert not (tmp_path / "ran").exists()


def test_a_submission_ends_with_its_grader():
    """Whoever ends the grader, by whatever signal, leaves no process behind."""
    code = (
        "import time\n"
        "from mooncake_lab.course.grading.messages import Code\n"
        "from mooncake_lab.course.grading.remote import Submission\n"
        "one = Submission([Code('one', 'def f():\\n    import time\\n    time.sleep(1000)')])\n"
        "print(one._process.pid, flush=True)\n"
        "one.call('f')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as grader:
        assert grader.stdout is not None
        pid = int(grader.stdout.readline())
        grader.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not running(pid)


def running(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in {"Z", "X"} and os.path.exists(f"/proc/{pid}")  # noqa: PTH110


def test_a_folder_that_another_grader_removed_is_made_again(monkeypatch):
    """A grader takes an empty folder without a lock for abandoned, also one that another has made just now."""
    made, make = [], tempfile.mkdtemp

    def removed_once(prefix):
        made.append(make(prefix=prefix))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(remote.tempfile, "mkdtemp", removed_once)
    folder = remote._Folder()
    assert folder.path == made[1]
    folder.close()
    assert not Path(folder.path).exists()
