"""The programs that measure engines run and count right; no test here asserts a time."""

import itertools
import json
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
from engine import SMOKE, Setting, measure
from gpu import main as measure_gpu
from gpu import make_lab
from gpu import measure as measure_sections
from gpu_sections import GOALS, SECTIONS, prefill_flops
from measured import dry_run
from speed import (
    HuggingFaceContinuous,
    Rates,
    between_marks,
    floor_seconds,
    measurements,
    speed_sentence,
    speed_table,
    with_floors,
    work_of,
)

from mooncake_lab.bench.engine import Bench, Case, decode_case, mixed_case, prefill_case, reuse_case
from mooncake_lab.bench.peers import HuggingFaceGenerate, hugging_face, our_engine
from mooncake_lab.engine.config import config_from_shape
from mooncake_lab.perf import model_shape

ROOT = Path(__file__).parents[2]
ENGINE_SCRIPTS: dict[str, Path] = {}
_PEER = dedent(
    """
    import sys
    sys.path.insert(0, {folder!r})
    from protocol import answer

    class Peer:
        version = "1"

        def __init__(self, *_):
            self._fail("__init__")

        def _fail(self, do):
            if do == {do!r}:
                raise ValueError("this head is not supported")

        def begin(self, prompt, batch, most_tokens):
            self._fail("begin")

        def turn(self, steps):
            self._fail("turn")
            return 1.0

        def tokens(self):
            return [0] * 8

        def prefill(self, prompt):
            self._fail("prefill")
            return 1.0

        def reuse(self, prompt, reused_tokens):
            self._fail("reuse")
            return float(reused_tokens)

    answer(Peer)
    """
)
CONFIG = config_from_shape(model_shape("lab-tiny"))


class TestFloors:
    def test_a_decode_step_reads_weights_once_and_each_cache_once(self):
        """The bytes of a decode case are those of weights and KVCache, exactly."""
        weights, kv = CONFIG.linear_parameters * 4, CONFIG.kv_bytes_per_token(4)
        assert work_of(decode_case(3, 10, 2), CONFIG, 4)["bytes_moved"] == 2 * weights + 3 * kv * (11 + 12)

    def test_a_prefill_multiplies_what_the_sections_count(self):
        """The FLOPs of a prefill case are those that the GPU program divides by."""
        lab = make_lab("lab-tiny", "cpu", "float32")
        assert work_of(prefill_case(4096), CONFIG, 4)["flops"] == pytest.approx(prefill_flops(lab, 4096))

    def test_chunks_of_work_add_up(self):
        """Prefill and decode of a request take at least the work of the prefill."""
        both = Case(name="both", kind="mixed", prompt_tokens=(50,), new_tokens=(5,))
        for kind, least in work_of(prefill_case(50), CONFIG, 4).items():
            assert work_of(both, CONFIG, 4)[kind] > least

    def test_what_is_reused_is_no_work(self):
        """A prompt behind a computed prefix multiplies what the whole prompt does beyond the prefix."""
        whole, prefix = (work_of(prefill_case(tokens), CONFIG, 4)["flops"] for tokens in (50, 20))
        head = 2 * CONFIG.vocabulary * CONFIG.width  # each of the three ends with one token
        assert work_of(reuse_case(50, 20), CONFIG, 4)["flops"] == pytest.approx(whole - prefix + head)

    def test_the_longer_part_is_the_floor(self):
        """Bytes over bandwidth or FLOPs over the rate of computation, and which of them it is."""
        assert floor_seconds(8, 2, Rates(2, 1)) == (4, "bandwidth")
        assert floor_seconds(2, 8, Rates(2, 1)) == (8, "compute")

    def test_rates_count_for_rows_that_could_have_them(self):
        """A rate of more threads, or of smaller numbers, says nothing of others; no row beats its floor."""
        about = {"bytes_moved": 8.0, "flops": 8.0, "peaks": Rates(1.0, 1.0)._asdict()}
        rows = with_floors(
            [
                {**about, "threads": 1, "dtype": "float32", "seconds": 4.0, "peer_seconds": 5.0},
                {**about, "threads": 1, "dtype": "bfloat16", "seconds": 3.0, "peer_seconds": 2.0},
                {**about, "threads": 2, "dtype": "float32", "seconds": 1.0, "peer_seconds": 9.0},
            ]
        )
        assert [row["peaks"]["flops_per_s"] for row in rows] == [2.0, 4.0, 8.0]
        assert [row["peaks"]["bytes_per_s"] for row in rows] == [4.0, 4.0, 8.0]
        assert all(min(row["seconds"], row["peer_seconds"]) >= row["floor_seconds"] for row in rows)


class TestCases:
    def test_the_burst_has_the_lengths_it_says(self):
        """Prompts of 64 to 1024 tokens, outputs of 16 to 128, the same for the same seed."""
        case = mixed_case(200)
        assert case == mixed_case(200)
        assert 64 <= min(case.prompt_tokens) <= max(case.prompt_tokens) <= 1024
        assert 16 <= min(case.new_tokens) <= max(case.new_tokens) <= 128
        assert case.tokens == sum(case.new_tokens)

    def test_what_counts_as_tokens(self):
        """Prompt tokens of a prefill; of decodes those after the first, which is not timed."""
        assert (prefill_case(50).tokens, decode_case(3, 10, 4).tokens) == (50, 12)
        assert reuse_case(50, 20).tokens == 30

    @pytest.mark.parametrize("warm_up", [True, False])
    def test_ratios_are_taken_within_a_round(self, warm_up):
        """Seconds are medians of the rounds that count; all peers of a case stand beside one number of ours."""

        class Constant:
            def __init__(self, *seconds):
                self.given = iter(seconds)

            def seconds(self, *_):
                return next(self.given)

        bench = Bench("lab-tiny", cache_tokens=256)
        cold = [100.0] * warm_up
        bench.ours = Constant(*cold, 1.0, 2.0, 4.0)
        bench.peers = {"twice": Constant(*cold, 2.0, 4.0, 8.0), "odd": Constant(*cold, 4.0, 2.0, 2.0)}
        twice, odd = bench.compare(prefill_case(8), ["twice", "odd"], 3, warm_up=warm_up)
        assert (twice.seconds, twice.peer_seconds, twice.ratio, twice.rounds) == (2.0, 4.0, 2.0, 3)
        assert (odd.seconds, odd.ratio_low, odd.ratio, odd.ratio_high) == (2.0, 0.5, 1.0, 4.0)
        assert odd.tokens_per_s == 4.0


def test_all_subjects_generate_the_same_tokens():
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


class TestReuse:
    def test_our_engine_computes_what_no_request_computed(self):
        """Each time the prefix is computed anew and then reused: the prompt leaves its last tokens to compute."""
        lab = make_lab("lab-tiny", "cpu", "float32")
        ours = our_engine(lab.model, cache_tokens=512, prefix_caching=True)
        prompt = np.random.default_rng(0).integers(0, 256, 70).tolist()
        for _ in range(2):
            assert ours.reuse_s(prompt, 48, itertools.count().__next__) == 1
            assert [segment.new_tokens for segment in ours.engine.last_plan.segments] == [70 - 48]

    def test_a_peer_without_reuse_is_refused(self):
        """`generate` keeps no prefixes."""
        with pytest.raises(TypeError, match="HuggingFaceGenerate reuses no prefixes"):
            Bench("lab-tiny", cache_tokens=256).compare(reuse_case(40, 32), ["hf"], 1)


class TestPeerProcess:
    SETTING = Setting(
        model="lab-tiny", dtype="float32", threads=1,
        cases=((decode_case(2, 8, 2), 1), (reuse_case(40, 32), 1), (prefill_case(8), 1)),
    )  # fmt: skip

    @pytest.fixture
    def run(self, monkeypatch, tmp_path):
        """Measures two peers of which one fails at what `do` names."""

        def run(do):
            for name in ("good", "bad"):
                script = tmp_path / f"{name}.py"
                script.write_text(
                    _PEER.format(folder=str(ROOT / "benchmarks" / "peers"), do=do if name == "bad" else "")
                )
                monkeypatch.setitem(ENGINE_SCRIPTS, name, script)
            monkeypatch.setattr("engine.SERVES", ("good", "bad"))
            return measure((self.SETTING,), dict.fromkeys(("good", "bad"), Path(sys.executable)), budget_s=1e9)

        monkeypatch.setattr("engine.SCRIPTS", ENGINE_SCRIPTS)
        return run

    @pytest.mark.parametrize(
        ("do", "where"),
        [
            ("__init__", "bad does not start"),
            ("begin", "bad ended in decode 2 at 8"),
            ("turn", "bad ended in decode 2 at 8"),
            ("reuse", "bad ended in prefill 1 x 40, 32 of them reused"),
            ("prefill", "bad ended in prefill 1 x 8"),
        ],
    )
    def test_a_peer_that_ends_is_named_and_the_others_go_on(self, run, do, where):
        """Wherever it ends: its reason stands in the file, and each case has the other peers' rows."""
        found = run(do)
        assert found["skipped"] == [f"lab-tiny float32, 1 thread: {where}: ValueError: this head is not supported"]
        assert [row["case"] for row in found["rows"] if row["peer"] == "good"] == [
            case.name for case, _ in self.SETTING.cases
        ]

    def test_a_case_of_reuse_has_peers_that_reuse(self, run):
        """Transformers' `generate` has no row there, and what a peer reuses it is told."""
        rows = [row for row in run("")["rows"] if row["kind"] == "reuse"]
        assert [(row["peer"], row["tokens"], row["peer_seconds"]) for row in rows] == [
            ("good", 8, 32),
            ("bad", 8, 32),
        ]


class TestSpeedTable:
    def test_a_run_compares_tokens_and_fills_a_table(self):
        """A line a case and peer, with its ratio and floor; decodes of the peer generate our tokens."""
        found = measure(SMOKE, {}, budget_s=1e9)
        table = speed_table(found)
        assert found["machine"]["processor"] in table
        lines = [line for line in table.splitlines() if line.startswith("| lab-")]
        assert len(lines) == len(found["rows"]) == 4
        for line, row in zip(lines, found["rows"], strict=True):
            assert f"**{row['ratio']:.2f}**" in line
            assert f"{row['seconds'] / row['floor_seconds']:.1f}" in line
            assert row["seconds"] >= row["floor_seconds"] * (1 - 1e-9)
        assert found["rows"][0]["same_tokens"] == found["rows"][0]["compared_tokens"] > 0

    def test_what_comes_after_the_budget_is_named(self):
        """With no time at all every case is skipped, and the file says which."""
        left = measure(SMOKE, {}, budget_s=-1)
        assert left["rows"] == []
        assert left["skipped"] == [f"lab-recall float32, 1 thread: {case.name}" for case, _ in SMOKE[0].cases]

    def test_a_peer_that_does_not_start_is_named(self):
        """The others are measured, and the file says which peer was left out."""
        found = measure(SMOKE, {"OpenVINO": Path("/bin/false")}, budget_s=1e9)
        assert found["skipped"] == [
            "lab-recall float32, 1 thread: OpenVINO does not start: the peer ended with status 1"
        ]
        assert {row["peer"] for row in found["rows"]} == {"hf", "hf-continuous"}

    def test_the_page_of_the_benchmarks_shows_the_kept_measurements(self):
        """The table between the marks is the one that the kept JSON gives, and no row lies below its floor."""
        kept = json.loads((ROOT / "data" / "measured" / "cpu_engine.json").read_text())
        page = (ROOT / "benchmarks" / "README.md").read_text()
        assert between_marks(page, "speed", speed_table(kept)) == page
        assert with_floors(kept["rows"]) == kept["rows"]
        for row in kept["rows"]:
            assert min(row["seconds"], row["peer_seconds"]) >= row["floor_seconds"] * (1 - 1e-9)

    def test_the_readme_has_the_range_of_the_kept_ratios(self):
        """Its sentence names each peer with its least and largest ratio."""
        page = (ROOT / "README.md").read_text()
        assert between_marks(page, "speed", speed_sentence(*measurements())) == page
        for found in measurements():
            for peer in {row["peer"] for row in found["rows"]} - {"whole"}:
                ratios = [row["ratio"] for row in found["rows"] if row["peer"] == peer]
                one, several = f" {ratios[0]:.2f} (one case)", f" ({min(ratios):.2f} to {max(ratios):.2f})"
                assert (one if len(ratios) == 1 else several) in page
            for row in found["rows"]:
                named = f"{row['model']} {row['dtype']}, {row['case']} ({row['peer']} {row['ratio']:.2f})"
                assert (named in page) == (row["ratio"] < 1)

    def test_a_page_without_marks_is_refused(self):
        """No mark, no table: an error that says so."""
        with pytest.raises(ValueError, match="0 pairs of marks"):
            between_marks("no marks here", "speed", "")


class TestGpuDryRun:
    @pytest.fixture
    def written(self, tmp_path_factory):
        """What the command wrote of a dry run of all sections."""
        return dry_run(tmp_path_factory)

    def test_every_section_finds_something(self, written):
        """On a tiny shape and a CPU all sections run; the file names machine and backend."""
        found = written["sections"]
        assert list(found) == list(SECTIONS)
        assert [name for name in found if not found[name].get("rows")] == []
        assert (written["machine"]["device"], written["backend"]) == ("cpu", "cpu")

    def test_rows_say_what_was_measured(self, written):
        """Each decode point is there; each tile, chunk, ratio and transfer has its time and its bytes."""
        found, sizes = written["sections"], make_lab("lab-tiny", "cpu", "float32").sizes
        points = itertools.product(sizes.decode_contexts, sizes.decode_batches)
        assert [(row["context"], row["batch"]) for row in found["decode"]["rows"]] == list(points)
        assert [row["tokens"] for row in found["tiles"]["rows"]] == list(sizes.tile_tokens)
        assert found["chunks"]["rows"][-1]["over_whole"] == 1.0
        assert all(row["sarathi"] > 0 for row in found["pd_sweep"]["rows"])
        assert found["memory"]["rows"][0]["available_after"] == found["memory"]["rows"][0]["blocks"]
        layerwise = found["layerwise"]["rows"]
        assert [(row["moved_tokens"], row["operation"]) for row in layerwise] == list(
            itertools.product(sizes.layerwise_tokens, ("load", "store"))
        )
        for row in layerwise:
            assert row["moved_bytes"] == row["moved_tokens"] * CONFIG.kv_bytes_per_token(4)
            assert row["hidden_share"] == pytest.approx(1 - row["layerwise_extra_s"] / row["serialized_extra_s"])
        assert [row["batch"] for row in found["graphs"]["rows"]] == list(sizes.decode_batches)
        for row in found["processes"]["rows"]:
            assert row["moved_bytes"] == row["requests"] * row["prompt"] * CONFIG.kv_bytes_per_token(4)
        held = {row["method"]: row["device_bytes"] for row in found["compressed"]["rows"]}
        assert held["full"] == sizes.compressed_tokens * CONFIG.kv_bytes_per_token(4)
        assert held["snapkv"] == sizes.kept_tokens * CONFIG.kv_bytes_per_token(4)
        assert max(held["minicache"], held["kcache"]) < held["full"]

    def test_a_goal_stands_beside_what_was_found(self, written):
        """Rows that are too short for a goal do not count; a dry run has none at 8k tokens."""
        assert {name for name, found in written["sections"].items() if "goal" in found} == set(GOALS)
        assert "no row" in written["sections"]["prefill"]["goal"]
        rows = [{"tokens": 512, "share_of_gemm": 0.1}, {"tokens": 8192, "share_of_gemm": 0.66}]
        assert GOALS["prefill"].beside(rows) == "share_of_gemm: the goal is 0.65; 0.66 to 0.66, 1 of 1 reach it"
        rows = [{"bytes": 2**20, "device_to_host_share": 0.3, "host_to_device_share": 0.3}]
        rows += [{"bytes": 2**26, "device_to_host_share": 0.95, "host_to_device_share": 0.85}]
        assert GOALS["copies"].beside(rows).endswith("0.85 to 0.95, 1 of 2 reach it")

    def test_what_fails_or_comes_too_late_is_written_down(self, monkeypatch):
        """A section that raises is marked failed with its error; one after the budget is skipped."""
        lab = make_lab("lab-tiny", "cpu", "float32")
        monkeypatch.setattr(torch.Tensor, "norm", lambda *_: torch.tensor(float("nan")))
        failed = measure_sections(lab, budget_s=1e9, names=["correctness"])
        assert "differs from dense" in failed["correctness"]["failed"]
        assert "budget" in measure_sections(lab, budget_s=-1.0, names=["tiles"])["tiles"]["skipped"]

    @pytest.fixture
    def run(self, monkeypatch, tmp_path):
        """The command with some sections, into one file: its exit code, and what the file then has."""

        def run(*sections, options=()):
            out = tmp_path / "found.json"
            named = [word for name in sections for word in ("--section", name)]
            asked = ["--shape", "lab-tiny", "--device", "cpu", "--backend", "dense", "--out", str(out)]
            monkeypatch.setattr(sys, "argv", ["gpu.py", *asked, *named, *options])
            return measure_gpu(), json.loads(out.read_text())["sections"]

        return run

    def test_sections_one_by_one(self, run):
        """`--section` measures that one and keeps the others of the file; one that is skipped replaces nothing."""
        code, first = run("tiles")
        assert (code, list(first)) == (0, ["tiles"])
        code, both = run("memory")
        assert (code, list(both), both["tiles"]) == (0, ["tiles", "memory"], first["tiles"])
        assert run("tiles", "graphs", options=["--budget-s", "-1"])[1]["tiles"] == first["tiles"]

    def test_another_machine_or_model_is_another_file(self, run):
        """Sections of one file belong to one machine, commit, shape and type."""
        run("memory", options=["--commit", "one"])
        with pytest.raises(ValueError, match=r"commit 'one', this is 'two'"):
            run("tiles", options=["--commit", "two"])

    def test_what_was_found_is_kept_when_a_run_is_cut_short(self, run, monkeypatch, tmp_path):
        """The file is written after each section."""
        monkeypatch.setattr("gpu.SECTIONS", SECTIONS | {"chunks": lambda _: sys.exit("cut short")})
        with pytest.raises(SystemExit, match="cut short"):
            run("tiles", "chunks")
        assert list(json.loads((tmp_path / "found.json").read_text())["sections"]) == ["tiles"]
