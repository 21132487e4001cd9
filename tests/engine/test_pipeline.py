"""Prefill over processes: the same tokens and KVCache as one process, the predicted bytes, and deaths reported."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from waiting import until

from mooncake_lab.engine import PrefillEngine, load_model
from mooncake_lab.engine.pipeline import (
    Activity,
    CppJob,
    Crew,
    CrewSpec,
    ProcessDiedError,
    RunaheadJob,
    Share,
    cpp_prefill,
    overlap_share,
    runahead_prefill,
)
from mooncake_lab.perf import model_shape
from mooncake_lab.perf.runahead import traffic_tokens

MODEL = "random:lab-8m"
SHAPE = model_shape("lab-8m")
TOKENS = np.random.default_rng(0).integers(0, SHAPE.vocabulary, 230)
TINY = CrewSpec(model="random:lab-tiny", processes=2, backend="dense", timeout_s=600)


@pytest.fixture(scope="module")
def crew():
    """Four processes for all tests of this file; a job may use fewer."""
    with Crew(CrewSpec(model=MODEL, processes=4, backend="dense", timeout_s=600)) as started:
        yield started


@pytest.fixture(scope="module")
def model():
    return load_model(MODEL, device="cpu", backend="dense")


@pytest.fixture(scope="module")
def alone(model):
    return PrefillEngine(model).prefill(TOKENS)


def assert_same(together, alone):
    assert together.first_token == alone.first_token
    assert len(together.kv) == SHAPE.layers
    for ours, theirs in zip(together.kv, alone.kv.layers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("processes", "chunk"), [(1, 64), (2, 230), (2, 37), (3, 64), (4, 1 << 20), (4, 50)])
def test_chunked_pipelines_compute_what_one_process_does(crew, alone, processes, chunk):
    """First token and KVCache of all layers are those of one process; activations cross each boundary once."""
    found = cpp_prefill(crew, TOKENS, chunk_tokens=chunk, processes=processes)
    assert_same(found, alone)
    hop = len(TOKENS) * SHAPE.width * SHAPE.bytes_per_element
    assert [share.sent_bytes for share in found.shares] == [hop] * (processes - 1) + [0]
    assert [share.received_bytes for share in found.shares] == [0] + [hop] * (processes - 1)


@pytest.mark.parametrize("bounds", [(230,), (115, 230), (200, 230), (1, 230), (90, 170, 230), (80, 140, 190, 230)])
def test_runahead_computes_what_one_process_does(crew, alone, bounds):
    """Whatever the slices, first token and KVCache are those of one process; `sum b_i` tokens cross a layer."""
    found = runahead_prefill(crew, TOKENS, bounds=bounds)
    assert_same(found, alone)
    assert found.sent_bytes == traffic_tokens(bounds) * SHAPE.kv_bytes_per_token
    assert sum(share.received_bytes for share in found.shares) == found.sent_bytes


def test_every_process_tells_what_it_did(crew):
    """Each chunk is computed once on each process, in order, never before its input, and never two at a time."""
    found = cpp_prefill(crew, TOKENS, chunk_tokens=64, processes=3)
    computed = [[each for each in share.activities if each.what == "compute"] for share in found.shares]
    for before, after in pairwise(computed):
        assert [each.piece for each in after] == [0, 1, 2, 3]
        assert all(late.start_s >= early.end_s for early, late in zip(before, after, strict=True))
    assert all(a.end_s <= b.start_s for each in computed for a, b in pairwise(each))
    assert 0 <= overlap_share(found.shares) <= 1
    assert found.seconds > 0


def test_overlap_is_counted_from_intervals():
    """Two processes that compute 0-2 s and 1-3 s overlap for one of three seconds."""

    def share(rank, start_s, end_s):
        done = (Activity("compute", 0, start_s, end_s), Activity("wait", 0, 0.0, 9.0))
        return Share(
            rank=rank, first_token=None, first_layer=0, kv=(), sent_bytes=0, received_bytes=0, activities=done
        )

    assert overlap_share([share(0, 0.0, 2.0), share(1, 1.0, 3.0)]) == pytest.approx(1 / 3)
    assert overlap_share([share(0, 0.0, 2.0), share(1, 2.0, 3.0)]) == 0
    with pytest.raises(ValueError, match="none of 0 processes"):
        overlap_share([])


def test_a_crew_that_is_too_small_says_so_and_goes_on(crew, alone):
    """A job for more processes than there are is refused, and the crew still works."""
    with pytest.raises(ValueError, match="5 processes; this crew has 4"):
        runahead_prefill(crew, TOKENS, bounds=(50, 100, 150, 200, 230))
    assert_same(cpp_prefill(crew, TOKENS, chunk_tokens=100), alone)


@pytest.mark.parametrize("how", ["ends", "had ended", "fails", "hangs"])
def test_what_happens_to_one_process_is_reported_and_no_process_is_left(how):
    """The error names the rank and the reason, or those that gave no answer in time; all others are stopped."""
    job = RunaheadJob(tokens=np.arange(40), bounds=(20, 40))
    if how == "fails":
        job.tokens[0] = 10**6  # no token of the model
    with Crew(TINY) as crew:
        pids = list(crew.pids)
        if how != "fails":
            os.kill(pids[0], signal.SIGSTOP if how == "hangs" else signal.SIGKILL)
        if how == "had ended":
            assert until(lambda: not _exists(pids[0]))
            time.sleep(0.5)  # until its executor has noticed that, too
        with pytest.raises(TimeoutError if how == "hangs" else ProcessDiedError, match="prefilling") as caught:
            crew.run(job, timeout_s=0.5 if how == "hangs" else 60)
        if how == "hangs":
            assert "ranks [0, 1] gave no answer within 0.5 s" in str(caught.value)
        else:
            assert caught.value.rank == 0
        assert crew.pids == []
        with pytest.raises(ValueError, match="start another crew"):
            crew.run(job)
    assert not any(_exists(pid) for pid in pids)


@pytest.mark.slow
def test_no_process_outlives_its_crew(tmp_path):
    """When the program that started a crew is killed outright, its processes end themselves."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            import threading
            from mooncake_lab.engine.pipeline import Crew, CrewSpec

            if __name__ == "__main__":
                crew = Crew(CrewSpec(model="random:lab-tiny", processes=2, backend="dense", timeout_s=600))
                print(*crew.pids, flush=True)
                threading.Event().wait()
            """
        )
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        program.kill()
    assert len(pids) == 2
    for _ in range(600):
        if not any(_exists(pid) for pid in pids):
            return
        time.sleep(0.05)
    pytest.fail(f"processes {[pid for pid in pids if _exists(pid)]} outlived their crew")


def _exists(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not collected yet does not."""
    try:
        os.kill(pid, 0)
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    except ProcessLookupError:
        return False
    return bool(state.stdout.strip()) and not state.stdout.strip().startswith("Z")


def test_a_model_that_does_not_come_up_is_reported():
    """A crew whose model is unknown fails with the reason, not with a wait."""
    with pytest.raises(ProcessDiedError, match="unknown model 'nonsense'"):
        Crew(CrewSpec(model="random:nonsense", processes=2, timeout_s=600))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CppJob(tokens=np.arange(9), sizes=(4, 4), processes=2), "add up to 9"),
        (lambda: CppJob(tokens=np.arange(9), sizes=(9, 0), processes=2), "must be positive"),
        (lambda: RunaheadJob(tokens=np.arange(9), bounds=(4, 4, 9)), "must rise"),
        (lambda: RunaheadJob(tokens=np.arange(9), bounds=(4, 8)), "end at 9"),
        (lambda: CrewSpec(processes=0), "CrewSpec.processes is 0; at least 1 is needed"),
        (lambda: CrewSpec(threads=0), "CrewSpec.threads is 0; at least 1 is needed"),
        (lambda: CrewSpec(timeout_s=0), "CrewSpec.timeout_s is 0; more than 0 is needed"),
        (lambda: CrewSpec(dtype="int8"), "CrewSpec.dtype is 'int8'; allowed are"),
    ],
)
def test_impossible_jobs_are_refused(make, said):
    """Chunks and slices that do not cover the prompt, and crews that cannot be, are refused in a sentence."""
    with pytest.raises(ValueError, match=said):
        make()
