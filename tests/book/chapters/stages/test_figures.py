"""The figures of the stages chapter."""

import numpy as np
import pytest
from figure_laws import FigureLaws, diamonds
from measured import stages

from mooncake_lab.book.chapters.stages import figures as draw
from mooncake_lab.book.chapters.stages.experiment import calibrate_machine
from mooncake_lab.book.chapters.stages.model import (
    calibration_misses,
    equation_2,
    kernel_floors,
    normalised_machine,
    normalised_node,
    roofline_of_paper,
)
from mooncake_lab.book.paper import claim, fact
from mooncake_lab.book.testbeds.fit_nodes import DECODED_TOKENS, calibrate_paper_node
from mooncake_lab.perf import hardware

OF_PAPER = ["normalised", "reuse_bandwidth", "roofline", "calibration"]
NAMES = [*OF_PAPER, "kernels"]


@pytest.fixture(scope="module")
def figures():
    """Every figure of the chapter, by name."""
    node, measured = calibrate_paper_node(), stages()
    fitted = calibrate_machine(measured)
    printed = {"a800-node": claim("F43").fact, "h800-node": claim("F44").fact}
    links = {"host link": fact("fast_table1_constants", x="B_h2d_GBps").value, "network": 100.0}
    return {
        "normalised": draw.normalised(
            normalised_node(node.latency), normalised_machine(measured, fitted, 24), fitted.machine
        ),
        "reuse_bandwidth": draw.reuse_bandwidth(equation_2(), printed, links, 8192),
        "roofline": draw.roofline(hardware("a800-node"), roofline_of_paper(node), measured),
        "kernels": draw.kernels(hardware("h200"), kernel_floors()),
        "calibration": draw.calibration(calibration_misses(node), decode_steps=DECODED_TOKENS),
    }


@pytest.mark.parametrize("name", NAMES)
class TestEvery(FigureLaws):
    """Laws of every figure."""


@pytest.mark.parametrize("name", OF_PAPER)
def test_the_paper_is_drawn(figures, name):
    """Figures with a counterpart in the papers show its points."""
    assert diamonds(figures[name])


def test_kernels_lie_on_the_roof_and_none_is_measured(figures):
    """A point is what the device could do at its intensity, drawn hollow, and the footer says computed."""
    roof, *points = figures["kernels"].axes[0].lines
    for line in points:
        assert line.get_markerfacecolor() == "white"
        allowed = np.interp(np.log(line.get_xdata()), np.log(roof.get_xdata()), np.log(roof.get_ydata()))
        assert np.log(line.get_ydata()) == pytest.approx(allowed, abs=0.01)
    assert "no device was measured" in figures["kernels"].get_supxlabel()


def test_measured_points_are_filled_circles_and_name_their_machine(figures):
    """What this machine did is drawn as circles, and the footer says which machine it was."""
    panel = figures["normalised"].axes[2]
    assert any(line.get_marker() == "o" and len(line.get_xdata()) for line in panel.lines)
    assert "torch" in figures["normalised"].get_supxlabel()
    assert "torch" in figures["roofline"].get_supxlabel()


def test_bars_start_at_zero(figures):
    """The calibration's bars are honest about size."""
    assert all(axes.get_ylim()[0] == 0 for axes in figures["calibration"].axes)


def test_prompt_lengths_are_said_as_people_say_them():
    """Multiples of 1024 are k, other thousands too, small numbers themselves."""
    assert [draw._thousands(value) for value in (512, 8192, 131072, 20000)] == ["512", "8k", "128k", "20k"]
