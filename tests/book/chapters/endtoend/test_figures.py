"""Figures of the end-to-end chapter: what is ours, what is the paper's, and where the numbers came from."""

import pandas as pd
import pytest

from mooncake_lab.book.chapters.endtoend import bracket
from mooncake_lab.book.chapters.endtoend import experiment as topic
from mooncake_lab.book.chapters.endtoend import figures as draw
from mooncake_lab.book.chapters.endtoend.claims import AT_LIMITS, CURVES, SYSTEMS, WORKLOADS
from mooncake_lab.book.experiments import run, vary
from mooncake_lab.book.paper import curve

SMALL = topic.EndToEnd(first=25, prefill_nodes=2, decode_nodes=2)


@pytest.fixture(scope="module")
def traces():
    """Four systems on three workloads, as small as can be."""
    return run(vary(SMALL, workload=tuple(CURVES), system=tuple(SYSTEMS)), cache=False)


def diamonds(axes):
    """The markers that stand for the paper."""
    return [line for line in axes.lines if line.get_marker() == "D"]


def lines(axes):
    """The lines that stand for us."""
    return [line for line in axes.lines if line.get_marker() != "D" and line.get_linestyle() == "-"]


def test_capacity_has_a_panel_for_each_workload_and_system(traces):
    """Ours is the recorded curve in percent; the paper's points are points of its curve; both chunks are drawn."""
    larger = traces[traces["system"] == "vllm_chunked"].assign(chunk_tokens=2048)
    paper = {workload: curve(name) for workload, name in CURVES.items()}
    both = pd.concat([traces, larger], ignore_index=True)
    figure = draw.capacity(both, topic.TBT_GRID_MS, paper, SYSTEMS, topic.LIMITS_MS)
    assert len(figure.axes) == len(CURVES) * len(SYSTEMS)
    for panel, (workload, system) in zip(figure.axes, [(w, s) for w in CURVES for s in SYSTEMS], strict=True):
        (mine,) = (
            r for r in traces.to_dict(orient="records") if (r["workload"], r["system"]) == (workload, system)
        )
        assert list(lines(panel)[0].get_ydata()) == pytest.approx([100 * share for share in mine["capacity"]])
        (theirs,) = diamonds(panel)
        known = paper[workload][paper[workload]["series"] == SYSTEMS[system]]
        assert set(theirs.get_ydata()) <= set(known["y"])
        assert panel.get_legend() is None
    assert {"512 tokens", "2048 tokens"} <= {text.get_text() for text in figure.legends[0].get_texts()}


def test_every_bar_of_figure_8_has_its_diamond(traces):
    """Twelve bars from zero, twelve diamonds."""
    paper = curve("fast_fig08_prefill_gpu_time")
    (axes,) = draw.gpu_time(traces, paper, SYSTEMS, WORKLOADS).axes
    assert sorted(bar.get_height() for bar in axes.patches) == pytest.approx(sorted(traces["prefill_gpu_s"]))
    assert sorted(y for line in diamonds(axes) for y in line.get_ydata()) == sorted(paper["y"])
    assert axes.get_ylim()[0] == 0


def test_the_bracket_has_every_router_with_and_without_the_host():
    """A panel has two lines per router, the paper's shares, and an interval at each router with the host."""
    rows = bracket.bracket(bracket.recorded())
    read = {workload: curve(name) for workload, name in AT_LIMITS.items()}
    baselines = {w: SYSTEMS[bracket.BASELINES[w]] for w in read}
    paper = {w: table[table["series"] == baselines[w]] for w, table in read.items()}
    figure = draw.bracket(rows, paper, WORKLOADS, bracket.ROUTERS)
    for panel, workload in zip(figure.axes, paper, strict=True):
        (theirs,) = diamonds(panel)
        assert list(theirs.get_ydata()) == paper[workload].sort_values("x")["y"].tolist()
        assert len(panel.lines) == 2 * len(bracket.ROUTERS) + 1
        assert len(panel.collections) == len(bracket.ROUTERS)


def test_a_search_names_its_source_and_what_it_leaves_open():
    """The footer says that it is simulated, and on which trace; the line on a bar is as long as the tolerance."""
    names = {name: SYSTEMS[name] for name in ("mooncake", "vllm")}
    rows = [
        {"system": s, "prefill_nodes": p, "decode_nodes": 16 - p, "tbt_limit_ms": ms, "source": "here"}
        | {"requests_per_s": 1.0, "hidden_overload": 0.25, "relative_tolerance": 0.1}
        for s, p in (("mooncake", 8), ("mooncake", 12), ("vllm", 8))
        for ms in (100, 200)
    ]
    bars = draw.goodput(pd.DataFrame(rows), names, 0.9)
    assert len(bars.axes[0].patches) == 6
    lowest, highest = bars.axes[0].collections[0].get_segments()[0][:, 1]
    assert (lowest, highest) == pytest.approx((1 / 1.25, 1.1))
    assert bars.get_supxlabel().startswith("simulated")
    assert "here" in bars.get_supxlabel()
