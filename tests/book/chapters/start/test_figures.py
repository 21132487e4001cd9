"""Figures of the front chapter, drawn from a log made by hand."""

import pytest

from mooncake_lab.book.chapters.start import experiment as life
from mooncake_lab.book.chapters.start import figures as draw
from mooncake_lab.core import Arrived, DecodeStretch, Finished, FirstToken, Moved, Placed, Prefilled

LAYERS = 2


@pytest.fixture
def log():
    """One request of four tokens: two layers, one stretch, two decode steps."""
    moves = [
        Moved(at_s=1.2 + k, request_id=0, source="prefill-0", destination="decode-0", start_s=1.1 + k, bytes=8)
        for k in range(LAYERS)
    ]
    steps = [
        DecodeStretch(
            at_s=5.0 + k, instance="decode-0", start_s=4.0 + k, steps=1, first_step_s=1.0, step_growth_s=0.0,
            request_ids=(0,),
        )
        for k in range(2)
    ]  # fmt: skip
    return [
        Arrived(at_s=0.5, request_id=0, input_tokens=4),
        Placed(at_s=0.6, request_id=0, prefill_instance="prefill-0", decode_instance="decode-0", reused_tokens=0),
        *moves,
        Prefilled(at_s=3.0, request_id=0, instance="prefill-0", start_s=1.0, computed_tokens=4, reused_tokens=0),
        FirstToken(at_s=3.5, request_id=0),
        *steps,
        Finished(at_s=6.0, request_id=0, output_tokens=3),
    ]


def test_timeline_has_a_row_for_each_layer_and_a_bar_for_each_span(log):
    """Rows: the Conductor, prefill, the layers, decode; bars: prefill, moves, steps; times count from arrival."""
    figure = draw.timeline(life.timeline(log, LAYERS), "a machine")
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "Conductor", "prefill-0", "move of layer 0", "move of layer 1", "decode-0",
    ]  # fmt: skip
    assert len(axes.patches) == 1 + LAYERS + 2
    assert axes.patches[-1].get_x() + axes.patches[-1].get_width() == pytest.approx(5500)
    assert "a machine" in figure.get_supxlabel()


def test_burst_has_a_lane_for_each_request(log):
    """A lane shows waiting, prefill, hand-over and steps, and says who measured."""
    figure = draw.burst(life.lanes(log), "a machine")
    assert len(figure.axes[0].patches) == 3 + 2
    assert figure.get_supxlabel().startswith("measured")


def test_parts_name_modules_of_the_package():
    """Every part of the drawing is code that exists, and the footer names the processes."""
    import mooncake_lab.serving.kv_transfer.receiver  # noqa: F401
    from mooncake_lab.engine import DecodeEngine, PrefillEngine  # noqa: F401
    from mooncake_lab.store.tiered_store import TieredStore  # noqa: F401

    figure = draw.parts({"Conductor": 7, "prefill-0": 8})
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    for part in ("engine.PrefillEngine", "engine.DecodeEngine", "store.TieredStore", "serving.kv_transfer"):
        assert part in words
    assert "prefill-0 8" in figure.get_supxlabel()
