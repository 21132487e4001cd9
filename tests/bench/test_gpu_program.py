"""`benchmarks/gpu.py` on a short lease: no minute is wasted, and one broken section costs itself only."""

import json
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import gpu
import gpu_sections
import pytest
import torch
from gpu import make_lab, measure
from gpu_lab import FULL

from mooncake_lab.engine import Engine
from mooncake_lab.engine.weights import LlamaWeights


@pytest.fixture
def lab():
    """A lab of the smallest model, on its CPU."""
    return make_lab("lab-tiny", "cpu", "float32", "dense")


@pytest.mark.parametrize(
    ("takes_s", "runs", "counts_s"),
    [
        ([1.0] * 9, 7, 1.0),
        ([5.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0], 7, 3.0),
        ([5.0, 2.5, 1.0], 2, 2.5),
        ([9.0, 1.0, 1.0], 1, 9.0),
    ],
    ids=["short", "long only while it compiles", "long", "very long"],
)
def test_what_takes_seconds_is_not_run_again_and_again(lab, takes_s, runs, counts_s):
    """Two runs do not count and five do; of a work of over 2 s the second counts, of over 6 s the first."""
    clock = SimpleNamespace(s=0.0)
    lab.clock = lambda: clock.s
    ran = iter(takes_s)
    done = []

    def work():
        done.append(next(ran))
        clock.s += done[-1]

    assert lab.median_s(work, repeats=5) == counts_s
    assert len(done) == runs


def test_transformers_batches_no_more_than_there_is(lab, monkeypatch):
    """It is told how many tokens an iteration may have: else its newest releases fill the memory with a mask."""
    told = []
    peer = SimpleNamespace(generate=lambda *_: None)
    monkeypatch.setattr(gpu_sections, "hugging_face", lambda _: None)
    monkeypatch.setattr(gpu_sections, "our_engine", lambda *_, **__: peer)
    monkeypatch.setattr(gpu_sections, "HuggingFaceGenerate", lambda _: peer)
    monkeypatch.setattr(gpu_sections, "HuggingFaceContinuous", lambda _, settings: told.append(settings) or peer)
    for batch in (2, 64):
        sizes = lab.sizes = replace(lab.sizes, peer_batch=batch)
        gpu_sections.beside_transformers(lab)
        prompts = batch * sizes.peer_prompt
        assert prompts <= told[-1]["max_batch_tokens"] <= max(256, 16 * prompts)


def test_a_burst_waits_for_no_recording(lab, monkeypatch):
    """All steps that a burst of the P:D sweep needs are recorded before its clock starts."""
    order = []
    monkeypatch.setattr(Engine, "record_steps", lambda engine: order.append(engine.limits.max_requests))
    monkeypatch.setattr(type(lab), "seconds", lambda _, __: order.append("clock") or 1.0)
    gpu_sections.pd_sweep(lab)
    assert order == [lab.sizes.pd_batch, "clock"] * len(order[::2])
    assert order


def test_the_weights_are_digested_once(monkeypatch):
    """Setting up and comparing with the dense backend bring the large weights to the host once."""
    digested, digest = [], LlamaWeights.digest
    monkeypatch.setattr(LlamaWeights, "digest", lambda weights: digested.append(id(weights)) or digest(weights))
    lab = make_lab("lab-tiny", "cpu", "float32", "dense")
    gpu_sections.correctness(lab)
    assert digested.count(id(lab.weights)) == 1


def test_prefill_workers_on_a_gpu_compute_long_chunks(lab, monkeypatch):
    """On a large GPU, chunks of 512 tokens would measure the host that launches them."""
    started = []

    class StartedError(Exception):
        """Ends the section."""

    def cluster(spec, *_, **__):
        started.append(spec)
        raise StartedError

    monkeypatch.setattr(gpu_sections, "LiveCluster", cluster)
    lab.sizes = replace(lab.sizes, worker_chunk_tokens=FULL.worker_chunk_tokens)
    with pytest.raises(StartedError):
        gpu_sections.processes(lab)
    assert started[0].pools[0].chunk_tokens == FULL.worker_chunk_tokens >= 2048


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    ],
    ids=str,
)
def test_a_lost_device_fails_one_section(lab, monkeypatch, error):
    """After an error that leaves the process without its device, the other sections are left to a new one."""

    def broken(_lab):
        raise error

    monkeypatch.setattr(gpu, "SECTIONS", gpu_sections.SECTIONS | {"tiles": broken})
    found = measure(lab, budget_s=1e9, names=["memory", "tiles", "graphs", "hybrid"])
    assert str(error) in found["tiles"]["failed"]
    assert found["memory"]["rows"]
    assert {name: found[name] for name in ("graphs", "hybrid")} == {
        name: {"skipped": "the device was lost in tiles"} for name in ("graphs", "hybrid")
    }


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("cuda differs from dense by 0.2; allowed is 0.05"),
    ],
    ids=str,
)
def test_an_error_of_one_section_only_is_no_lost_device(lab, monkeypatch, error):
    """Want of memory, or a wrong result, ends that section and not the process."""

    def broken(_lab):
        raise error

    monkeypatch.setattr(gpu, "SECTIONS", gpu_sections.SECTIONS | {"tiles": broken})
    found = measure(lab, budget_s=1e9, names=["tiles", "memory"])
    assert "failed" in found["tiles"]
    assert found["memory"]["rows"]


PROGRAM = """
import json, os, sys, time
from pathlib import Path
calls = Path(__file__).with_name("calls.jsonl")
before = len(calls.read_text().splitlines()) if calls.exists() else 0
with calls.open("a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
end, left = json.loads(Path(__file__).with_name("ends.json").read_text())[before]
print(json.dumps({"begun": "a" if not before else "b"}), flush=True)
if end == "hang":
    time.sleep(600)
if end < 0:
    os.kill(os.getpid(), -end)
if left:
    print(json.dumps({"left": left}))
sys.exit(end)
"""


@pytest.mark.parametrize(
    ("ends", "code", "sections"),
    [
        ([[0, None]], 0, [["a", "b", "c"]]),
        ([[1, None]], 1, [["a", "b", "c"]]),
        ([[3, ["b", "c"]], [0, None]], 1, [["a", "b", "c"], ["b", "c"]]),
        ([[3, ["b", "c"]], [3, ["c"]], [1, None]], 1, [["a", "b", "c"], ["b", "c"], ["c"]]),
        ([[-11, None], [0, None]], 1, [["a", "b", "c"], ["b", "c"]]),
        ([["hang", None], [-6, None], [0, None]], 1, [["a", "b", "c"], ["b", "c"], ["c"]]),
    ],
    ids=["all went well", "one failed", "lost once", "lost twice", "ended by a signal", "hangs, then a signal"],
)
def test_a_new_process_measures_what_is_left(tmp_path, monkeypatch, ends, code, sections):
    """A process that loses the device, is killed or hangs is replaced by one for the sections behind it.

    The file says of a section that ended no other way what ended it; the options of all processes are the same.
    """
    program = tmp_path / "gpu.py"
    program.write_text(PROGRAM)
    (tmp_path / "ends.json").write_text(json.dumps(ends))
    monkeypatch.setattr(gpu, "__file__", str(program))
    out = tmp_path / "x.json"
    out.write_text('{"sections": {}}')
    options = ["--shape", "lab-tiny", "--out", str(out), "--section-s", "5"]
    wanted = [word for name in sections[0] for word in ("--section", name)]
    assert gpu.measure_in_processes([*wanted, *options]) == code
    signals = {"hang": "SIGKILL", -6: "SIGABRT", -11: "SIGSEGV"}
    said = [signals[end] for end, _ in ends if end in signals]
    for each, name in zip(json.loads(out.read_text())["sections"].values(), said, strict=True):
        assert name in each["failed"]
    called = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [[b for a, b in pairwise(call) if a == "--section"] for call in called] == sections
    for call in called:
        assert call[0] == "--child"
        assert str(out) in call
        assert "lab-tiny" in call


def test_a_process_that_lost_the_device_says_what_is_left(monkeypatch, tmp_path, capfd):
    """Its exit code says so, its output names the other sections, and its file has the error."""

    def broken(_lab):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(gpu, "SECTIONS", gpu_sections.SECTIONS | {"tiles": broken})
    out = tmp_path / "found.json"
    told = ["gpu.py", "--child", "--shape", "lab-tiny", "--device", "cpu", "--backend", "dense", "--out", str(out)]
    monkeypatch.setattr(
        sys, "argv", [*told, *(word for name in ("tiles", "memory") for word in ("--section", name))]
    )
    assert gpu.main() == gpu.DEVICE_LOST
    told = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert told == [{"begun": "tiles"}, {"left": ["memory"]}]
    assert "launch failure" in json.loads(out.read_text())["sections"]["tiles"]["failed"]
