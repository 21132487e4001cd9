"""The testbed of the arXiv edition: what it is fitted to, and that the record says what the fit gives."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from mooncake_lab.book.paper import facts
from mooncake_lab.book.paper.evidence import alternatives
from mooncake_lab.book.testbeds import arxiv_fit, arxiv_testbed, arxiv_testbed_latency, paper_node_latency
from mooncake_lab.book.testbeds.arxiv import Slower, latency_of, steepest
from mooncake_lab.book.testbeds.fit_arxiv import PERCENT, FitRecord, FitRun, fitted, planned, replayed, targets
from mooncake_lab.core import carried_folder


@pytest.fixture(scope="module")
def record():
    """The recorded fit with all its replays."""
    return msgspec.json.decode((carried_folder("measured") / "arxiv_testbed.json").read_bytes(), type=FitRecord)


def test_the_node_of_fast_is_the_one_that_is_not_slower():
    """With factors of one and its own constant, the testbed computes as the node of FAST'25."""
    fast = paper_node_latency()
    same = arxiv_testbed(1.0, 1.0, fast.decode.constant_s)
    assert (same.prefill, same.decode, same.transfer) == (fast.prefill, fast.decode, fast.transfer)


def test_factors_multiply_times():
    """A prefill without reuse takes as many times as long, and a decode step grows as many times as fast."""
    fast, slow = paper_node_latency(), arxiv_testbed(1.7, 6.5, 0.02)
    assert slow.prefill.seconds(9000) == pytest.approx(1.7 * fast.prefill.seconds(9000))
    grown = slow.decode.step_s(9, 90_000) - slow.decode.step_s(0, 0)
    assert grown == pytest.approx(6.5 * (fast.decode.step_s(9, 90_000) - fast.decode.step_s(0, 0)))
    assert slow.decode.step_s(0, 0) == 0.02


def test_the_steepest_testbed_is_an_end_of_the_region():
    """No setting of the region has a steeper decode slope, and the alternative that names its numbers is it."""
    end = steepest()
    assert end in arxiv_fit().region
    assert end.decode == max(each.decode for each in arxiv_fit().region)
    assert latency_of("arxiv_steepest") == arxiv_testbed(end.prefill, end.decode, end.constant_s)
    (words,) = {each.alternative for each in alternatives() if "arxiv_steepest" in each.how}
    assert words == f"prefill {end.prefill:g}, decode slope {end.decode:g}, constant {1e3 * end.constant_s:g} ms"


def test_the_fit_reads_two_figures_and_no_number_of_table_3(monkeypatch, record):
    """Every file of the papers that the fit opens is one of arXiv Figs. 8 and 13, or the index of figures."""
    opened = []
    read = facts.read_rows
    monkeypatch.setattr(facts, "read_rows", lambda name: opened.append(name) or read(name))
    targets()
    fitted(record.runs)
    assert {name for name in opened if name != "index.csv"} == {
        "curves/arxiv_fig08_ttft_box_scheduling.csv",
        "curves/arxiv_fig13_ttft_cdf.csv",
        "curves/arxiv_fig13_tbt_cdf.csv",
    }


def test_the_record_is_what_its_replays_give(record):
    """All planned replays are there, and the optimum and region follow from them."""
    assert {run.key for run in record.runs} == {run.key for run in planned()}
    again = fitted(record.runs)
    assert (again.optimum, again.error, again.region) == (record.optimum, record.error, tuple(record.region))
    assert arxiv_fit().optimum == record.optimum
    assert record.optimum in record.region


def test_the_fit_finds_the_machine_that_made_the_numbers(record, monkeypatch):
    """If the printed quantiles were those of a replayed setting, the fit would find this setting."""
    true = Slower(1.7, 7.0, 0.025)
    of = {"box": (8, "ttft"), "ttft": (10, "ttft"), "tbt": (10, "tbt")}

    def simulated(name):
        nodes, kind = of[name]
        decode = {"ttft": (1.0, 0.025), "tbt": (true.decode, true.constant_s)}[kind]
        at = Slower(true.prefill, *decode)
        wanted = (kind, nodes, at, "all")
        runs = [run for run in record.runs if (run.of, run.nodes, run.at, run.admission) == wanted]
        values = [run.tbt["longest_tenth"] if name == "tbt" else getattr(run, name) for run in runs]
        return tuple(np.exp(np.mean(np.log(values), axis=0)))

    made = {name: simulated(name) for name in of}
    monkeypatch.setattr("mooncake_lab.book.testbeds.fit_arxiv.targets", lambda: made)
    assert fitted(record.runs).optimum == true


def test_slower_decode_lengthens_tbt_and_leaves_ttft():
    """On a short input, a steeper decode step moves TBT only, and a slower prefill moves TTFT."""
    at = Slower(1.7, 5.0, 0.025)
    runs = [replayed(FitRun(of="tbt", at=each, nodes=8, twin=0), 800) for each in (at, replace(at, decode=9.0))]
    assert all(a < b for a, b in zip(*(run.tbt["mean"] for run in runs), strict=True))
    two = [replayed(FitRun(of="ttft", at=each, nodes=8, twin=0), 800) for each in (at, replace(at, prefill=1.9))]
    assert all(a < b for a, b in zip(*(run.ttft for run in two), strict=True))
    assert len(two[0].ttft) == len(PERCENT)


def test_the_clock_is_the_fitted_one():
    """The latency model that chapters use has the three recorded numbers in its name and its coefficients."""
    found, node = arxiv_fit().optimum, arxiv_testbed_latency()
    assert node == arxiv_testbed(found.prefill, found.decode, found.constant_s)


@pytest.mark.slow
def test_the_replays_of_the_record_replay(record):
    """One replay of each kind gives the recorded quantiles again."""
    for kind in ("ttft", "tbt"):
        run = next(run for run in record.runs if run.of == kind)
        again = replayed(replace(run, box=(), ttft=(), tbt={}))
        assert (again.box, again.ttft, again.tbt) == (run.box, run.ttft, run.tbt)
