"""The measuring code runs and counts right; no test here asserts a time."""

import itertools
import json
import sys

import numpy as np
import pytest
import torch
from measured import dry_run

from mooncake_lab.bench.baselines import HuggingFaceContinuous, HuggingFaceGenerate, hugging_face, our_engine
from mooncake_lab.bench.engine import (
    Case,
    compared_with_all,
    comparison,
    decode_case,
    mixed_case,
    prefill_case,
    work_of,
)
from mooncake_lab.bench.floors import Rates, floor_seconds, rates_of, with_floors
from mooncake_lab.bench.gpu import main, make_lab, measure
from mooncake_lab.bench.gpu_sections import SECTIONS, prefill_flops
from mooncake_lab.engine.config import config_from_shape
from mooncake_lab.perf import Hardware, model_shape
from mooncake_lab.perf.models import MODELS

PEAKS = Hardware(
    name="test",
    devices=1,
    bfloat16_flops_per_s=1e12,
    float32_flops_per_s=1e12,
    device_memory_bytes=1e9,
    device_memory_bytes_per_s=1e9,
    source="test",
)


def floor(case, config):
    """The floor of a case in float32."""
    return floor_seconds(*work_of(case, config, 4), rates_of(PEAKS, 4))


class TestFloor:
    CONFIG = config_from_shape(model_shape("lab-tiny"))

    def test_a_decode_step_reads_weights_once_and_each_cache_once(self):
        """Bandwidth bounds small batches: bytes of weights and KVCache, exactly."""
        seconds, bound = floor(decode_case(3, 10, 2), self.CONFIG)
        weights, kv = self.CONFIG.linear_parameters * 4, self.CONFIG.kv_bytes_per_token(4)
        assert bound == "bandwidth"
        assert seconds == pytest.approx((2 * weights + 3 * kv * (11 + 12)) / 1e9)

    def test_a_prefill_multiplies_what_the_sections_count(self):
        """Compute bounds a long prompt, with the FLOPs that `bench_gpu` divides by."""
        case = prefill_case(4096)
        seconds, bound = floor(case, self.CONFIG)
        lab = make_lab("lab-tiny", "cpu", "float32")
        assert bound == "compute"
        assert seconds == pytest.approx(prefill_flops(lab, 4096) / 1e12)

    def test_chunks_of_work_add_up(self):
        """Prefill and decode floors of a request never exceed that of doing both."""
        both = Case(name="both", kind="mixed", prompt_tokens=(50,), new_tokens=(5,))
        assert floor(both, self.CONFIG)[0] >= floor(prefill_case(50), self.CONFIG)[0]

    def test_no_time_lies_below_its_floor(self):
        """Whatever was timed, ours or a peer's, is a candidate: the highest rate of all is the roof of all."""
        cases = (decode_case(1, 16, 4), decode_case(32, 16, 4), prefill_case(64))
        times = ([[1e-9], [1e-3]], [[1e-3], [1e-9]], [[1e-10], [1.0]])
        rows = [comparison(case, each, self.CONFIG, 4, PEAKS) for case, each in zip(cases, times, strict=True)]
        assert min(row.seconds / row.floor_seconds for row in rows) < 1  # these peaks are none
        floored = compared_with_all(rows, PEAKS, 4)
        over = [min(row.seconds, row.peer_seconds) / row.floor_seconds for row in floored]
        assert min(over) == pytest.approx(1.0)
        assert [row.seconds for row in floored] == [row.seconds for row in rows]

    def test_rates_count_for_rows_that_could_have_them(self):
        """A rate of more threads, or of smaller numbers, says nothing of a row without them."""
        about = {"bytes_moved": 8.0, "flops": 8.0, "peer_seconds": None, "peaks": Rates(1.0, 1.0)._asdict()}
        rows = with_floors(
            [
                {**about, "threads": 1, "dtype": "float32", "seconds": 4.0},
                {**about, "threads": 1, "dtype": "bfloat16", "seconds": 2.0},
                {**about, "threads": 2, "dtype": "float32", "seconds": 1.0},
            ]
        )
        assert [row["peaks"]["flops_per_s"] for row in rows] == [2.0, 4.0, 8.0]
        assert [row["peaks"]["bytes_per_s"] for row in rows] == [4.0, 4.0, 8.0]

    def test_the_burst_has_the_lengths_it_says(self):
        """Prompts of 64 to 1024 tokens, outputs of 16 to 128, the same for the same seed."""
        case = mixed_case(200)
        assert case == mixed_case(200)
        assert 64 <= min(case.prompt_tokens) <= max(case.prompt_tokens) <= 1024
        assert 16 <= min(case.new_tokens) <= max(case.new_tokens) <= 128


class TestPeers:
    def test_all_subjects_generate_the_same_tokens(self):
        """Ours, `generate` on a padded batch and transformers' batching agree on the same random weights."""
        lab = make_lab("lab-tiny", "cpu", "float32")
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 256, count).tolist() for count in (5, 17, 40)]
        theirs = hugging_face(lab.weights)
        subjects = (
            our_engine(lab.model, cache_tokens=512),
            HuggingFaceGenerate(theirs),
            HuggingFaceContinuous(theirs, {"num_blocks": 16, "max_batch_tokens": 64}),
        )
        found = [subject.generate(prompts, (3, 9, 6)) for subject in subjects]
        assert found[0] == found[1] == found[2]
        assert [len(tokens) for tokens in found[0]] == [3, 9, 6]

    def test_every_llama_shape_has_a_config(self):
        """Shapes that `bench` offers are Llamas."""
        assert all(config_from_shape(shape).layers for name, shape in MODELS.items() if name.startswith("lab-"))


@pytest.fixture
def written(tmp_path_factory):
    """What the command wrote of a dry run of all sections."""
    return dry_run(tmp_path_factory)


@pytest.fixture
def found(written):
    """Its sections."""
    return written["sections"]


class TestDryRun:
    def test_every_section_finds_something(self, found):
        """On a tiny shape and a CPU all sections run."""
        assert list(found) == list(SECTIONS)
        assert [name for name in found if not found[name].get("rows")] == []

    def test_rows_say_what_was_measured(self, found):
        """Each decode point is there or says why not; each tile, chunk and ratio has its time."""
        sizes = make_lab("lab-tiny", "cpu", "float32").sizes
        points = itertools.product(sizes.decode_contexts, sizes.decode_batches)
        assert [(row["context"], row["batch"]) for row in found["decode"]["rows"]] == list(points)
        assert [row["tokens"] for row in found["tiles"]["rows"]] == list(sizes.tile_tokens)
        assert found["chunks"]["rows"][-1]["over_whole"] == 1.0
        assert all(row["sarathi"] > 0 for row in found["pd_sweep"]["rows"])
        assert found["memory"]["rows"][0]["available_after"] == found["memory"]["rows"][0]["blocks"]

    def test_what_fails_or_comes_too_late_is_written_down(self, monkeypatch):
        """A section that raises is marked failed with its error; one after the budget is skipped."""
        lab = make_lab("lab-tiny", "cpu", "float32")
        monkeypatch.setattr(torch.Tensor, "norm", lambda *_: torch.tensor(float("nan")))
        assert "differs from dense" in measure(lab, budget_s=1e9, names=["correctness"])["correctness"]["failed"]
        assert "budget" in measure(lab, budget_s=-1.0, names=["tiles"])["tiles"]["skipped"]

    def test_the_file_says_where(self, written):
        """The machine and the backend are in the file."""
        assert written["machine"]["device"] == "cpu"
        assert written["backend"] == "cpu"

    def test_one_section_alone(self, monkeypatch, tmp_path):
        """`--section` measures that one and no other."""
        out = tmp_path / "tiles.json"
        asked = ["--shape", "lab-tiny", "--device", "cpu", "--section", "tiles", "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["bench_gpu", *asked])
        assert main() == 0
        sections = json.loads(out.read_text())["sections"]
        assert list(sections) == ["tiles"]
        assert len(sections["tiles"]["rows"]) == 3
