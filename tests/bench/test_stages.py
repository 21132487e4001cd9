"""Measuring the stages: every point is visited, warm-up is not counted, results survive a file."""

import dataclasses
from functools import partial

import pytest
import torch
from gpu import driver_version
from measured import small_peaks
from stages import main

from mooncake_lab.bench.machine import describe_machine, measure_peaks
from mooncake_lab.bench.measuring import computing_threads
from mooncake_lab.bench.peaks import PeakCandidate, peak_of, products, streams
from mooncake_lab.bench.stages import StagePlan, measure_stages, read_measurement
from mooncake_lab.engine.backends.onednn import multiplies_bfloat16
from mooncake_lab.perf import model_shape

TINY = model_shape("lab-tiny")
PLAN = StagePlan(prefill_tokens=(8, 16), decode_points=((1, 8), (3, 8), (2, 24)), rounds=3, steps=2)


class CountingClock:
    """A clock whose reading k is k squared, so that no two intervals are alike."""

    def __init__(self):
        self.readings = 0

    def __call__(self):
        self.readings += 1
        return float(self.readings**2)


@pytest.fixture(autouse=True, scope="module")
def _small_peaks():
    """No test here needs the rates of this machine: products and arrays are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mooncake_lab.bench.stages.measure_peaks", small_peaks)
        yield


@pytest.fixture(scope="module")
def measured():
    """A measurement whose clock ticks at every reading."""
    return measure_stages(TINY, dataclasses.replace(PLAN, budget_s=1e12), clock=CountingClock())


def test_every_point_is_measured_as_often_as_planned(measured):
    """Prefills once a round (those that decode needs too), decode steps `steps` times a round."""
    counted = {(time.stage, time.batch, time.tokens): time.samples for time in measured.times}
    assert counted == {
        ("prefill", 1, 8): 3, ("prefill", 1, 16): 3, ("prefill", 1, 24): 3,
        ("decode", 1, 8): 6, ("decode", 3, 8): 6, ("decode", 2, 24): 6,
    }  # fmt: skip


def test_no_round_begins_after_the_budget():
    """With no time left, one round warms up and one counts, no more."""
    hasty = measure_stages(TINY, dataclasses.replace(PLAN, budget_s=1e-9), clock=CountingClock())
    assert {time.samples for time in hasty.times} == {1, 2}


def test_the_processors_clock_is_for_the_cpu_alone():
    """Where a device computes by itself, the seconds of this process say nothing and are refused."""
    with pytest.raises(ValueError, match="'cuda'"):
        measure_stages(TINY, dataclasses.replace(PLAN, threads=1, clock="processor"), device="cuda")


def test_threads_are_set_for_the_measurement_and_put_back(measured):
    """The machine reports the threads asked for, and torch has its own again afterwards."""
    before = torch.get_num_threads()
    with computing_threads(1):
        assert describe_machine().threads == 1
        with computing_threads(None):
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before == measured.machine.threads


def test_peaks_are_work_over_the_best_time():
    """With a clock that always ticks one second, the rates are the most work of any candidate."""
    seconds = iter(range(1000))
    peaks = measure_peaks(side=8, copy_bytes=4096, repeats=2, clock=lambda: float(next(seconds)))
    most = max(each.amount for each in products(torch.float32, 8))
    assert peaks.float32_flops_per_s == peaks.bfloat16_flops_per_s == most >= 2 * 8**3
    assert peaks.device_memory_bytes_per_s == 2 * 4096


@pytest.mark.parametrize("best", range(4))
def test_a_peak_is_the_maximum_over_its_candidates(best):
    """Whichever of them is the fastest has the peak, and each counts with its fastest call."""
    now = [0.0]

    def take(durations):
        now[0] += next(durations)

    amounts = [8.0, 4.0, 6.0, 2.0]
    spent = [[9.0, 2.0, 1.0 if i != best else 0.01, 3.0] for i in range(4)]
    candidates = [
        PeakCandidate(name=str(i), amount=amount, work=partial(take, iter(durations)))
        for i, (amount, durations) in enumerate(zip(amounts, spent, strict=True))
    ]
    peak = peak_of(candidates, repeats=3, clock=lambda: now[0])
    assert (peak.name, peak.per_s) == (str(best), pytest.approx(amounts[best] / 0.01))
    with pytest.raises(ValueError, match="0 candidates"):
        peak_of([], repeats=3)


def test_packed_weights_and_our_kernels_are_candidates():
    """More than one plain product and one copy: what the engine computes with is among them, and right."""
    names = [each.name for dtype in (torch.float32, torch.bfloat16) for each in products(dtype, 16)]
    assert sum("packed" in name for name in names) == 6
    assert {name.split()[1] for name in names if name.startswith("float32")} == {"product", "linear", "packed"}
    others = {"product", "linear"} if multiplies_bfloat16() else set()  # without instructions they take minutes
    assert {name.split()[1] for name in names if name.startswith("bfloat16")} == {"packed"} | others
    readers = [*streams(1 << 16)]
    assert {each.name for each in readers if " linear of " in each.name} == {
        f"{dtype} linear of {rows}" for dtype in ("float32", "bfloat16") for rows in (1, 4, 32)
    }
    for each in readers:
        each.work()


def test_the_command_writes_what_it_measured(tmp_path):
    """The file reads back as a measurement of the model asked for, and a damaged file is named."""
    path = tmp_path / "measured.json"
    main(["--model", "lab-tiny", "--rounds", "1", "--tokens", "4", "8", "--output", str(path)])
    found = read_measurement(path)
    assert (found.model, found.seed) == ("lab-tiny", 0)
    assert {time.tokens for time in found.times} == {4, 8}
    path.write_text('{"model": 3}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"measured\.json.*not a measurement"):
        read_measurement(path)


@pytest.mark.parametrize(
    "bad",
    [{"rounds": 0}, {"threads": -1}, {"clock": "processor"}, {"prefill_tokens": (0,)}, {"budget_s": 0.0}],
)
def test_impossible_plans_are_refused(bad):
    """A plan without rounds, tokens, requests or time is an error."""
    with pytest.raises(ValueError, match="stage plan"):
        dataclasses.replace(PLAN, **bad)


def test_the_driver_is_what_its_own_tool_says(tmp_path, monkeypatch):
    """None where there is no tool, or it knows no device."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() is None
    tool = tmp_path / "nvidia-smi"
    for answer, code, expected in (("570.124.06", 0, "570.124.06"), ("No devices were found", 6, None)):
        tool.write_text(f"#!/bin/sh\necho {answer}\nexit {code}\n")
        tool.chmod(0o755)
        assert driver_version() == expected
