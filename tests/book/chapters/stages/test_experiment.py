"""The stages chapter's tables: the fitted node, this machine, Eqs. 1 and 2, and the comparison with the papers."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from measured import stages

from mooncake_lab.book.chapters.stages.experiment import (
    _COMMITTED,
    beside_committed,
    calibrate_machine,
    measured_rows,
    read_measurement,
    stage_columns,
)
from mooncake_lab.book.chapters.stages.model import (
    beside_papers,
    calibration_misses,
    decode_growth,
    decode_over_prefill,
    equation_1,
    equation_2,
    machine_misses,
    normalised_machine,
    normalised_node,
    reuse_or_compute,
    roofline_of_paper,
    shortest_useful_prefix,
)
from mooncake_lab.book.paper import Verdict, constant, fact
from mooncake_lab.book.paper.claims import AGREEMENT, BASIS
from mooncake_lab.book.testbeds import paper_node_latency
from mooncake_lab.book.testbeds.fit_nodes import calibrate_paper_node, normalised
from mooncake_lab.core import GB
from mooncake_lab.perf import check_floor, hardware, model_shape, reuse_bandwidth_bytes_per_s


@pytest.fixture(scope="module")
def node():
    """The paper's node, calibrated once."""
    return calibrate_paper_node()


@pytest.fixture
def measured():
    """A real measurement of the smallest model."""
    return stages()


class TestPaperNode:
    def test_its_misses_are_the_recorded_ones(self, node):
        """All ten prefill bars are met within the recorded error, decode within its own."""
        assert node.prefill.max_relative_error == pytest.approx(
            constant("prefill_joint_max_rel_error").value, abs=1e-3
        )
        assert node.decode_alone.max_relative_error < constant("decode_step_max_rel_error").value + 5e-4
        assert max(node.transfer.max_relative_error, node.dram.max_relative_error) < 0.03

    def test_it_is_possible_and_always_the_same(self, node):
        """It stays above the node's floor at every probe, and the record is what is fitted, bit for bit."""
        assert min(probe.ratio for probe in check_floor(node.latency, hardware("a800-node"))) >= 1
        assert paper_node_latency() == node.latency

    def test_it_is_the_same_on_every_processor(self):
        """Whichever kernels the linear algebra takes, each of which rounds in its own way, the node is one."""
        told = "from mooncake_lab.book.testbeds.fit_nodes import *; print(calibrate_paper_node().latency)"
        plain = {**os.environ, "OPENBLAS_CORETYPE": "Prescott"}
        done = subprocess.run([sys.executable, "-c", told], env=plain, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(paper_node_latency())

    def test_every_point_it_was_fitted_to_is_listed_with_its_miss(self, node):
        """Ten prefills, five decodes, sixteen batches, five transfers and five loads."""
        misses = calibration_misses(node)
        assert misses.groupby("stage", sort=False).size().tolist() == [10, 5, 16, 5, 5]
        recomputed = 100 * (misses["model_s"] / misses["paper_s"] - 1)
        assert np.allclose(misses["miss_percent"], recomputed)


class TestEquations:
    def test_printed_and_exact_counts_cross_between_the_shortest_prompts(self, node):
        """Eq. 1 counts too little for a short prompt, too much for a long one, and never reaches the peak."""
        table = equation_1(node)
        assert table["printed_over_exact"].is_monotonic_increasing
        assert table["printed_over_exact"].iloc[0] < 1 < table["printed_over_exact"].iloc[-1]
        assert table["exact_mfu"].between(0, 1).all()
        assert table["printed_mfu"].iloc[-1] == pytest.approx(constant("mfu_eq1_n131072").value, rel=1e-3)

    def test_eq2_curves_are_eq2(self):
        """The drawn curve is the function at the same prefix, below every link of the testbed."""
        table = equation_2()
        point = table[(table["node"] == "a800-node") & (table["prefix_tokens"] == 8192)]
        assert point["printed_gb_per_s"].item() == pytest.approx(constant("B_min_a800_p8192").value, rel=1e-6)
        assert table["printed_gb_per_s"].max() < fact("fast_table1_constants", x="B_h2d_GBps").value

    def test_a_smaller_model_needs_a_faster_link(self):
        """Over a fast link every prefix pays; over a slow one the smaller model needs the longer prefix."""
        table = shortest_useful_prefix(["llama3-70b", "llama3-8b"], [100.0, 12.5])
        assert table["100 GB/s"].tolist() == [0, 0]
        assert table.loc["llama3-8b", "12.5 GB/s"] > table.loc["llama3-70b", "12.5 GB/s"]
        peak = hardware("a800-node").flops_per_s()
        prefix = table.loc["llama3-8b", "12.5 GB/s"]
        found = reuse_bandwidth_bytes_per_s(model_shape("llama3-8b"), float(prefix), peak)
        assert found == pytest.approx(12.5 * GB, rel=1e-4)

    def test_reuse_pays_above_the_bandwidth_of_eq2(self, node):
        """Just below Eq. 2 only the node is slow enough to gain, just above it everybody, far below nobody."""
        least = constant("B_min_a800_p8192").value
        table = reuse_or_compute(node.latency, [8192], [0.3 * least, 0.99 * least, 1.01 * least])
        assert table["pays"].tolist() == ["no", "on this node", "yes"]
        assert (table["load_s"] * table["gb_per_s"]).std() == pytest.approx(0, abs=1e-9)


class TestCurves:
    def test_the_papers_points_are_drawn_where_the_model_is(self, node):
        """Each series has the paper's sixteen points and as many of the model, at the same places."""
        table = normalised_node(node.latency)
        for (stage, quantity), group in table.groupby(["stage", "quantity"]):
            expected = normalised(f"{stage} {quantity}")[0].tolist()
            assert {source: part["x"].tolist() for source, part in group.groupby("source")} == {
                "paper": expected,
                "modelled": expected,
            }

    def test_the_paper_divides_length_by_latency(self):
        """The paper's throughput is length over latency, and batch over latency, up to the reading error."""
        for stage in ("prefill", "decode"):
            x, latency = normalised(f"{stage} latency")
            _, throughput = normalised(f"{stage} throughput")
            implied = x / latency
            assert throughput == pytest.approx(implied / implied.max(), abs=0.006)

    def test_bars_lie_under_the_roof(self, node):
        """Nothing the paper drew is faster than its node could be; prefill is right of the ridge, decode left."""
        peaks = hardware("a800-node")
        table = roofline_of_paper(node)
        roof = np.minimum(peaks.flops_per_s(), table["intensity_flops_per_byte"] * peaks.memory_bytes_per_s) / 1e12
        assert (table["tflops_per_s"] < roof).all()
        assert set(table["stage"]) == {"prefill", "decode"}

    def test_batching_never_pays_more_than_it_gains(self):
        """A batch of b takes longer than one request and less than b of them, on the roofline alone."""
        for batch in (2, 16, 18):
            assert 1 < decode_growth(batch) < batch
            assert 1 < decode_over_prefill(batch) < decode_over_prefill(1)


class TestMeasured:
    def test_rows_carry_times_shares_and_the_machine(self, measured):
        """Each point is there with a positive time, and its share of the peak that was measured with it."""
        points = set(zip(measured["stage"], measured["batch"], measured["tokens"], strict=True))
        assert {("prefill", 1, n) for n in (8, 16, 24, 32)} <= points
        assert {("decode", b, n) for b in (1, 2) for n in (8, 24)} <= points
        assert (measured["seconds"] > 0).all()
        shares = measured["flops_per_s"] / measured["peak_flops_per_s"]
        assert measured["share_of_peak_flops"].to_numpy() == pytest.approx(shares.to_numpy())
        assert len(set(measured["machine"])) == 1

    def test_the_machine_is_calibrated_on_its_own_points(self, measured):
        """Predictions belong to the points measured, with their misses."""
        fitted = calibrate_machine(measured)
        assert fitted.prefill.measured_s.tolist() == stage_columns(measured, "prefill")[2].tolist()
        table = machine_misses(fitted)
        assert table["points"].tolist() == [4, 4]
        assert (table["mean_miss_percent"] <= table["largest_miss_percent"]).all()

    def test_this_machine_is_normalised_by_what_it_measured(self, measured):
        """The largest measured value of each series is one; the model is in the same unit."""
        table = normalised_machine(measured, calibrate_machine(measured), 24)
        ours = table[table["source"] == "measured"]
        assert ours.groupby(["stage", "quantity"])["value"].max().to_numpy() == pytest.approx(1.0)
        assert len(table) == 2 * len(ours)

    def test_two_machines_are_compared_where_both_measured(self, measured):
        """Only points of the same model are beside each other; against itself every ratio is one."""
        assert beside_committed(measured).empty
        committed = read_measurement(_COMMITTED)
        again = pd.DataFrame(measured_rows(committed)).assign(model=committed.model)
        table = beside_committed(again)
        assert len(table) == len(again)
        assert (table["here_over_book"] == 1).all()


def test_the_comparison_judges_every_claim_of_the_chapter(node):
    """Predictions are reproduced, equations and fits are named so, and one number contradicts the bars."""
    frame = beside_papers(node).frame().set_index("quantity")
    contradicted = frame.index.str.contains("TTFT saved")
    assert (frame.loc[contradicted, "verdict"] == Verdict.CONTRADICTS.value).all()
    expected = frame["evidence"].map({name: AGREEMENT[basis].value for name, basis in BASIS.items()})
    assert (frame["verdict"] == expected)[~contradicted].all()
    assert set(frame["evidence"]) == {"arithmetic", "calibrated", "simulated"}


def test_the_verdicts_can_fail(node):
    """A node whose prefill were linear would not reproduce the superlinear claim."""
    latency = node.latency
    linear = dataclasses.replace(latency, prefill=dataclasses.replace(latency.prefill, per_token_squared_s=0.0))
    frame = beside_papers(dataclasses.replace(node, latency=linear)).frame().set_index("quantity")
    claimed = frame.index.str.contains("superlinearly")
    assert (frame.loc[claimed, "verdict"] == Verdict.NOT_REPRODUCED.value).all()
